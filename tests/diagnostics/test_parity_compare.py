"""What is the same is found to be, and what is not is found, with the place where it lies."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from specdec.diagnostics.anchors import AnsweredText, answered_texts
from specdec.diagnostics.parity_compare import (
    DECODED,
    EXPORTED,
    SLOTS,
    TOLERANCE,
    DraftOutputs,
    ParityRow,
    compare_drafting,
    compare_outputs,
    compared_slots,
    rounding,
    spaced,
)
from specdec.drafter import Drafter
from specdec.drafting.mode import DrafterMemory
from specdec.export import NotServable, export_drafter
from specdec.target import Target
from tests.diagnostics.parity_made import (
    DEPTH,
    REFUSED,
    SPECS,
    compared,
    drafter,
    edit,
    exported,
    holds,
    sharp,
    target,
    verdicts,
)
from tests.export.made import made_drafter
from tests.export.test_round_trip import ROPES
from tests.tiny import llama_config

PLACES = ["alone", "packed"]


@pytest.mark.parametrize("name", sorted(set(SPECS) - set(REFUSED)))
def test_everything_that_is_served_is_the_same(name: str, tmp_path: Path) -> None:
    directory = exported(name, tmp_path / "out")
    found = compared(name, directory)
    assert holds(found)
    wanted = [
        (pair, place, k)
        for pair in (DECODED, EXPORTED)
        for place in PLACES
        for k in range(DEPTH + 1)
    ]
    assert [row[:3] for row in found.rows] == wanted
    assert all(row.agree == row.slots >= 4 for row in found.rows)
    assert max(row.share for row in found.rows) < 1e-11


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_compared_with_decoding(name: str, tmp_path: Path) -> None:
    with pytest.raises(NotServable):
        exported(name, tmp_path / "out")
    found = compared(name, None)
    assert {row.pair for row in found.rows} == {DECODED} and found.equal and not holds(found)


@pytest.mark.parametrize(("name", "format"), [("eagle1", "sglang"), ("eagle3_1", "sglang"), ("two_layer", "speculators"), ("four_states", "speculators")])  # fmt: skip # noqa: E501
def test_the_other_formats_as_vllm_reads_them(name: str, format: str, tmp_path: Path) -> None:
    directory = exported(name, tmp_path / "out", format)
    assert holds(compared(name, directory))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["eagle1", "eagle3_1"])
def test_rounding_is_none_of_the_differences(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    export_drafter(drafter(name, dtype), target(dtype), tmp_path / "own")
    found = compared(name, tmp_path / "own", dtype)
    assert holds(found)
    assert max(row.share for row in found.rows) > 1e-9  # else the dtype was not what was asked


@pytest.mark.parametrize("rope", ROPES[1:], ids=lambda rope: rope["rope_type"])
def test_scaled_ropes(rope: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    scaled = Target(LlamaForCausalLM(llama_config(rope_parameters=rope)).double())
    own = sharp(made_drafter(SPECS["eagle3_1"], scaled))
    export_drafter(own, scaled, tmp_path / "out")
    asked = answered_texts(scaled, [("a", [3, 9, 4] * 9)], 12, to_end=False)
    assert holds(compare_drafting(scaled, own, asked, 2, tmp_path / "out"))
    edit(tmp_path / "out", lambda raw: raw["rope_parameters"].update(factor=3.0), None)
    assert not holds(compare_drafting(scaled, own, asked, 2, tmp_path / "out"))


def test_a_mistake_that_training_and_decoding_share(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The reference has no part in it, however right the export looks."""
    rope = drafter("eagle3").layers.rope
    monkeypatch.setattr(rope, "inverse", rope.inverse * 1.01)
    directory = exported("eagle3", tmp_path / "out")
    found = compared("eagle3", directory)
    assert {row.equal for row in found.rows if row.pair == DECODED} == {True}
    assert {row.equal for row in found.rows if row.pair == EXPORTED} == {False}


def test_documents_that_see_each_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def leaking(drafter: Any, ids: Any, aux: Any, documents: Any, *rest: Any) -> Any:
        return unroll(drafter, ids, aux, torch.zeros_like(documents), *rest)

    unroll = Drafter.unroll
    monkeypatch.setattr(Drafter, "unroll", leaking)
    found = compared("eagle3_1", exported("eagle3_1", tmp_path / "out"))
    assert {(row.pair, row.place) for row in found.rows if not row.equal} == {
        (DECODED, "packed"),
        (EXPORTED, "packed"),
    }


def test_an_unroll_that_reads_a_token_too_late(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only after the first step: depth 0 is the same, whatever is unrolled."""

    def late(drafter: Any, ids: Any, aux: Any, documents: Any, steps: int, *rest: Any) -> Any:
        right = unroll(drafter, ids, aux, documents, steps, *rest)
        wrong = unroll(drafter, ids.roll(1, dims=1), aux, documents, steps, *rest)
        return (b if k else a for k, (a, b) in enumerate(zip(right, wrong, strict=True)))

    unroll = Drafter.unroll
    monkeypatch.setattr(Drafter, "unroll", late)
    found = compared("eagle3", exported("eagle3", tmp_path / "out"))
    for pair in (DECODED, EXPORTED):
        assert [k for k, said in verdicts(found, pair).items() if said != {"equal"}] == list(
            range(1, DEPTH + 1)
        )


def test_a_cache_that_stands_still(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Decoding alone is wrong: the export is what was trained."""
    original = DrafterMemory.append

    def append(
        self: DrafterMemory, length_B: Any, ids: Any, h: Any, seen: Any, depth_Q: Any
    ) -> Any:
        return original(self, length_B, ids, h, seen, torch.zeros_like(depth_Q))

    monkeypatch.setattr(DrafterMemory, "append", append)
    found = compared("eagle3_1", exported("eagle3_1", tmp_path / "out"))
    assert any(said != {"equal"} for said in verdicts(found, DECODED).values())
    assert {row.verdict for row in found.rows if row.pair == EXPORTED} == {"equal"}


def outputs(seed: int = 0) -> DraftOutputs:
    generator = torch.Generator().manual_seed(seed)
    log_probs = torch.randn(3, 2, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
    log_probs[..., 2] = -math.inf
    return DraftOutputs(torch.randn(3, 2, 4, generator=generator, dtype=torch.float64), log_probs)


@pytest.mark.parametrize(("factor", "equal"), [(0.5, True), (2.0, False)])
def test_a_difference_is_measured_by_the_range(factor: float, equal: bool) -> None:
    one, two = outputs(), outputs()
    known = one.log_probs_AKV[:, 1].isfinite()
    spread = one.log_probs_AKV[:, 1][known].max() - one.log_probs_AKV[:, 1][known].min()
    two.log_probs_AKV[1, 1, 3] += factor * TOLERANCE[torch.float64] * float(spread)
    first, second = compare_outputs("pair", "place", one, two)
    assert (
        first.equal
        and second.equal is equal
        and second.share == pytest.approx(factor * 1e-9, rel=1e-5)
    )


def test_other_tokens_and_no_numbers_are_no_match() -> None:
    one = outputs()
    two = DraftOutputs(one.features_AKH, one.log_probs_AKV.roll(1, dims=-1))
    assert (
        next(compare_outputs("a", "b", one, two)).verdict
        == "DIFFERENT: the tokens that the head knows"
    )
    spoilt = DraftOutputs(one.features_AKH * math.nan, one.log_probs_AKV * math.nan)
    for pair in ((one, spoilt), (spoilt, one), (spoilt, spoilt)):
        row = next(compare_outputs("a", "b", *pair))
        assert row.gap == row.share == math.inf and not row.equal


def test_rows_of_several_texts_are_one() -> None:
    one, two = outputs(), outputs(1)
    (same, _), (other, _) = (list(compare_outputs("a", "x", one, with_)) for with_ in (one, two))
    found = same.joined(other)
    assert (found.slots, found.gap, found.share, found.agree) == (
        6,
        other.gap,
        other.share,
        3 + other.agree,
    )


@pytest.mark.parametrize(
    ("dtype", "seen", "allowed"),
    [
        (torch.bfloat16, 4e-3, 1.6e-2),
        (torch.bfloat16, 1e-4, 1e-2),
        (torch.bfloat16, 0.5, 5e-2),
        (torch.float32, 1e-7, 1e-4),
    ],
)
def test_another_implementation_rounds_as_our_own_two_do(
    dtype: torch.dtype, seen: float, allowed: float
) -> None:
    for shares in ((seen, 0.0), (0.0, seen)):
        assert rounding([ParityRow("p", "q", 0, 1, 1, 0.0, *shares, 1.0)], dtype) == pytest.approx(
            allowed
        )


def test_every_place_has_its_tokens() -> None:
    """Slot t at depth k reads token t + 1 + k."""
    text = AnsweredText("a", list(range(40)), 20)
    assert compared_slots(text, 7) == [0, 6, 11, 17, 18, 19, 20, 21, 24, 28, 31]
    assert spaced(range(3, 3)) == [] and spaced(range(3, 7)) == [3, 4, 5, 6]
    assert spaced(range(100)) == [0, 33, 66, 99] and len(spaced(range(5, 1000))) == SLOTS
    assert compared_slots(AnsweredText("b", [0] * 11, 1), 7) == [0, 1, 2]
