"""What is the same is found to be, and what is not is found, with the place where it lies."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from specdec.decoding import Proposer
from specdec.export import NotServable, export_drafter
from specdec.parity import ours
from specdec.parity.differences import differences
from specdec.parity.run import DECODED, EXPORTED, parity
from specdec.parity.texts import answered
from specdec.target import Target
from specdec.training.ttt import ttt_unroll
from tests.export.made import made_drafter
from tests.export.test_round_trip import ROPES
from tests.parity_command.made import (
    DEPTH,
    REFUSED,
    SPECS,
    compared,
    drafter,
    edit,
    exported,
    sharp,
    target,
    texts,
    verdicts,
)
from tests.tiny import llama_config

PLACES = ["prompt", "boundary", "answer", "packed"]


@pytest.mark.parametrize("name", sorted(set(SPECS) - set(REFUSED)))
def test_everything_that_is_served_is_the_same(name: str, tmp_path: Path) -> None:
    directory = exported(name, tmp_path / "out")
    found = compared(name, directory)
    assert found.holds and found.lacking is None
    wanted = [(pair, place, k) for pair in (DECODED, EXPORTED) for place in PLACES for k in range(DEPTH + 1)]
    assert [row[:3] for row in found.rows] == wanted
    assert all(row.agree == row.anchors >= 4 for row in found.rows)
    assert max(row.share for row in found.rows) < 1e-11
    assert differences(directory, drafter(name), target()) == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_compared_with_decoding(name: str, tmp_path: Path) -> None:
    with pytest.raises(NotServable):
        exported(name, tmp_path / "out")
    found = compared(name, None)
    assert {row.pair for row in found.rows} == {DECODED} and all(row.equal for row in found.rows)
    assert found.lacking and not found.holds


@pytest.mark.parametrize("format", ["speculators", "sglang"])
@pytest.mark.parametrize("name", ["eagle1", "eagle3_1", "two_layer", "four_states"])
def test_the_other_formats_as_vllm_reads_them(name: str, format: str, tmp_path: Path) -> None:
    if (name, format) == ("eagle1", "speculators"):
        return  # there is no such thing
    directory = exported(name, tmp_path / "out", format)
    assert compared(name, directory).holds
    assert differences(directory, drafter(name), target()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["eagle1", "eagle3", "eagle3_1"])
def test_rounding_is_none_of_the_differences(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    assert compared(name, exported(name, tmp_path / "out"), dtype).lacking is None
    export_drafter(drafter(name, dtype), target(dtype), tmp_path / "own")
    found = compared(name, tmp_path / "own", dtype)
    assert found.holds
    assert max(row.share for row in found.rows) > 1e-9  # else the dtype was not what was asked


@pytest.mark.parametrize("rope", ROPES[1:], ids=lambda rope: rope["rope_type"])
def test_scaled_ropes(rope: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    turned = Target(LlamaForCausalLM(llama_config(rope_parameters=rope)).double())
    own = sharp(made_drafter(SPECS["eagle3_1"], turned))
    export_drafter(own, turned, tmp_path / "out")
    asked = answered(turned, [[3, 9, 4] * 9], 12, 2)
    assert parity(turned, own, asked, 2, tmp_path / "out").holds
    edit(tmp_path / "out", lambda raw: raw["rope_parameters"].update(factor=3.0), None)
    assert not parity(turned, own, asked, 2, tmp_path / "out").holds


def test_a_mistake_that_training_and_decoding_share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The reference has no part in it, however right the export looks."""
    rope = drafter("eagle3").layers.rope
    monkeypatch.setattr(rope, "inverse", rope.inverse * 1.01)
    directory = exported("eagle3", tmp_path / "out")
    assert differences(directory, drafter("eagle3"), target()) == []
    found = compared("eagle3", directory)
    assert {row.equal for row in found.rows if row.pair == DECODED} == {True}
    assert {row.equal for row in found.rows if row.pair == EXPORTED} == {False}


def test_documents_that_see_each_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def leaking(drafter: Any, ids: Any, aux: Any, documents: Any, *rest: Any) -> Any:
        return ttt_unroll(drafter, ids, aux, torch.zeros_like(documents), *rest)

    monkeypatch.setattr(ours, "ttt_unroll", leaking)
    found = compared("eagle3_1", exported("eagle3_1", tmp_path / "out"))
    assert {(row.pair, row.place) for row in found.rows if not row.equal} == {(DECODED, "packed"), (EXPORTED, "packed")}


def test_an_unroll_that_reads_a_token_too_late(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only after the first step: depth 0 is the same, whatever is unrolled."""

    def late(drafter: Any, ids: Any, aux: Any, documents: Any, steps: int, *rest: Any) -> Any:
        right = ttt_unroll(drafter, ids, aux, documents, steps, *rest)
        wrong = ttt_unroll(drafter, ids.roll(1, dims=1), aux, documents, steps, *rest)
        return (b if k else a for k, (a, b) in enumerate(zip(right, wrong, strict=True)))

    monkeypatch.setattr(ours, "ttt_unroll", late)
    found = compared("eagle3", exported("eagle3", tmp_path / "out"))
    for pair in (DECODED, EXPORTED):
        assert [k for k, said in verdicts(found, pair).items() if said != {"equal"}] == list(range(1, DEPTH + 1))


def test_a_cache_that_stands_still(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Decoding alone is wrong: the export is what was trained."""
    original = Proposer.expand

    def expand(self: Proposer, length_B: Any, ids: Any, h: Any, seen: Any, depth_Q: Any, *rest: Any) -> Any:
        return original(self, length_B, ids, h, seen, torch.zeros_like(depth_Q), *rest)

    monkeypatch.setattr(Proposer, "expand", expand)
    found = compared("eagle3_1", exported("eagle3_1", tmp_path / "out"))
    wrong = [k for k, said in verdicts(found, DECODED).items() if said != {"equal"}]
    assert wrong == [2, 3]  # depth 1 is the first that is drafted, and stands where it should
    assert {row.verdict for row in found.rows if row.pair == EXPORTED} == {"equal"}


def test_the_places_are_where_drafting_begins() -> None:
    assert [text.prompt for text in texts()] == [20, 1] and DEPTH == 3
