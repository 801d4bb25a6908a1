"""Compiled rounds: the same tokens, and not one graph more than were announced."""

import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.ir import ChoiceCaller
from torch._inductor.select_algorithm import ExternKernelCaller
from torch._inductor.utils import fresh_inductor_cache, run_and_get_cpp_code

from specdec.decoding import (
    Chain,
    ConfidentChain,
    DynamicTree,
    Growth,
    PlainDecoder,
    Request,
    Sampling,
    SpeculativeDecoder,
)  # fmt: skip
from specdec.decoding.compiled import Compiled
from specdec.decoding.decoder import room_for
from specdec.decoding.inductor import MOST, MOST_PAIRS, _pairs, choose
from specdec.drafter import Drafter
from specdec.nn.cache import write
from specdec.nn.products import fast_products
from specdec.target import Target
from tests.perfect import SHALLOW, TAPPED, astray, disturb, markov_target, perfect_drafter, worst_drafter
from tests.tiny import presets

pytestmark = pytest.mark.usefixtures("no_graphs")

PROMPTS = [[3, 4, 5], [17], list(range(40)), [9, 9, 2], [30, 1]]
"""Of a target so small that a graph takes seconds."""

LIMITS = MOST | ({torch.bfloat16: MOST_PAIRS} if _pairs() else {})


@pytest.fixture(scope="module")
def pair() -> tuple[Target, Drafter]:
    """Their tokens depend on the keys, and drafts are taken now and then, also off a tree's first branch."""
    target = markov_target(context=0.65, **SHALLOW)
    return target, disturb(perfect_drafter(target, replace(presets()["eagle3_1"], **TAPPED), sharpness=2.0), 0.8)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("growth", "sampling", "batch", "count"),
    [
        (Chain(3), Sampling(), 2, 2),
        (Chain(3), Sampling(), 1, 3),  # one reads prompts
        (
            DynamicTree(depth=3, top_k=2, nodes=6),
            Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.2),
            2,
            3,
        ),  # a tree's keys are tidied
        (DynamicTree(depth=3, top_k=2, nodes=6), Sampling(), 1, 4),
        (ConfidentChain(4, 0.9), Sampling(), 2, 1),  # drafting has no fixed shape
    ],
    ids=["chain", "chain alone", "tree", "tree alone", "confident"],
)
def test_no_text_needs_another_graph(
    pair: tuple[Target, Drafter],
    growth: Growth,
    sampling: Sampling,
    batch: int,
    count: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Graphs carry no guards: what a graph wrongly went on serving would show in the tokens."""
    target, drafter = pair
    monkeypatch.setattr("specdec.decoding.room.PART", 4)
    decoder = SpeculativeDecoder(target, drafter, growth, sampling, batch=batch, compiled=True)
    with caplog.at_level(logging.INFO, "specdec"):
        decoder.prepare(100)
    assert graphs() == count
    announced = [record.getMessage() for record in caplog.records]
    assert [text.split()[0] for text in announced] == ["compiling", "compiled"] * count
    requests = [Request(prompt, (1, 30, 60)[seed % 3], seed) for seed, prompt in enumerate(PROMPTS)]
    plain = PlainDecoder(target, sampling)
    wanted = [plain.generate(prompt, most, {7}, seed).ids for prompt, most, seed in requests]
    left = decoder.generate_all(requests[1:], {7})
    next(left)
    left.close()  # in the middle of others
    made = dict(decoder.generate_all(requests, {7}))
    assert [made[number].ids for number in range(len(requests))] == wanted
    texts = [[prompt[-1], *ids] for (prompt, _, _), ids in zip(requests, wanted, strict=True)]
    assert sum(map(astray, texts)) > 0.1 * sum(map(len, wanted))
    accepted = {taken for one in made.values() for taken in one.accepted}
    assert {0, 1} < accepted
    assert graphs() == count


def test_of_the_worst_drafter_compiled_rounds_take_nothing_and_lose_nothing() -> None:
    target = markov_target(**SHALLOW)
    drafter = worst_drafter(target, **TAPPED)
    decoder = SpeculativeDecoder(target, drafter, DynamicTree(depth=3, top_k=2, nodes=6), compiled=True)
    made = decoder.generate(PROMPTS[0], 20)
    assert made.ids == PlainDecoder(target).generate(PROMPTS[0], 20).ids and made.accepted == (0,) * 19


def test_longer_texts_get_graphs_of_their_own(pair: tuple[Target, Drafter], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.decoding.decoder.ROOM", 8)
    target, _ = pair
    decoder, plain = PlainDecoder(target, compiled=True), PlainDecoder(target)
    for most, count in ((9, 2), (20, 4), (9, 4), (29, 4)):  # one slot is for the root
        assert decoder.generate([3, 4], most).ids == plain.generate([3, 4], most).ids
        assert graphs() == count
    with torch.no_grad():
        target.final_norm.weight.mul_(2)
    with pytest.raises(ValueError, match="weights have changed"):
        decoder.generate([3, 4], 9)
    with torch.no_grad():
        target.final_norm.weight.div_(2)


def test_what_cannot_be_compiled_is_said() -> None:
    waits = Compiled(lambda x: x * 2 if bool(x.sum() > 0) else x, "this", torch.device("cpu"))
    with pytest.raises(ValueError, match=r"this cannot be compiled: .*; use --compile off"):
        waits(torch.ones(3))


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (torch.ones(4, 2), r"\[4, 2\], \(2, 1\), torch.float32, .*cpu"),
        (torch.ones(2, 3).T, r"\[3, 2\], \(1, 3\), torch.float32, .*cpu"),
        (torch.ones(3, 2, dtype=torch.float64), r"\[3, 2\], \(2, 1\), torch.float64, .*cpu"),
        (torch.ones(3, 2, device="meta"), r"\[3, 2\], \(2, 1\), torch.float32, .*meta"),
    ],
    ids=["shape", "strides", "dtype", "device"],
)
def test_another_form_is_refused(other: Tensor, told: str) -> None:
    twice = Compiled(lambda pair: pair[0] * 2, "doubling", torch.device("cpu"))
    with torch.inference_mode():
        for _ in range(2):
            assert twice((torch.ones(3, 2), None)).eq(2).all()
        with pytest.raises(
            ValueError, match=rf"doubling was compiled for .*\[3, 2\], \(2, 1\), .*float32.*, not .*{told}"
        ):
            twice((other, None))


@pytest.mark.parametrize(
    ("dtype", "rows", "template"),
    [
        *((dtype, rows, rows <= most) for dtype, most in LIMITS.items() for rows in (1, most, most + 1)),
        (torch.float64, 1, False),
    ],
)
def test_few_rows_take_the_template(
    dtype: torch.dtype, rows: int, template: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[ChoiceCaller] = []

    def watched(choices: list[ChoiceCaller]) -> list[ChoiceCaller]:
        chosen.extend(choose(choices))
        return chosen[-1:]

    monkeypatch.setattr("specdec.decoding.inductor.choose", watched)
    layer = nn.Linear(64, 96, dtype=dtype)
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).to(dtype)
    with torch.inference_mode(), fresh_inductor_cache():
        torch.testing.assert_close(Compiled(lambda x: layer(x), "a layer", x.device)(x), layer(x))
    assert [not isinstance(choice, ExternKernelCaller) for choice in chosen] == [template] * len(chosen)
    assert chosen or not template


def test_a_length_that_cannot_vary_is_said_in_a_line() -> None:
    """Where torch would compile for one length alone."""
    compiled = Compiled(lambda x, slots_S: x + x[: len(slots_S)], "a sum", torch.device("cpu"), varying=True)
    with torch.inference_mode(), pytest.raises(ValueError, match=r"a sum cannot be compiled: .*--compile off"):
        compiled(torch.ones(8), torch.arange(8))


def test_what_a_graph_leaves_to_the_library_takes_the_one_for_small_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled with the library that is fast for large ones, whose packed weights it then holds."""
    monkeypatch.setattr("specdec.nn.products._choose", lambda: True)
    settings: list[str] = []

    def call(x: Tensor) -> Tensor:
        settings.append(torch.get_float32_matmul_precision())
        return x

    compiled = Compiled(lambda x: x, "nothing", torch.device("cpu"))
    compiled._call = call
    with fast_products():
        for _ in range(2):
            compiled(torch.ones(1))
        assert torch.get_float32_matmul_precision() == "medium"
    compiled(torch.ones(1))
    assert settings == ["medium", "highest", "highest"]


def _scatter(buffer_BgSd: Tensor, new_BgTd: Tensor, slots_BT: Tensor) -> None:
    buffer_BgSd.scatter_(2, slots_BT[:, None, :, None].expand_as(new_BgTd), new_BgTd)


@pytest.mark.parametrize(("put", "copies"), [(write, False), (_scatter, True)], ids=["write", "scatter"])
def test_writing_keys_copies_no_cache(put: Callable[[Tensor, Tensor, Tensor], None], copies: bool) -> None:
    """Written twice and read in between, as drafting does; the second case shows that a copy would be seen."""
    cache, new, slots = torch.zeros(1, 2, 1031, 8), torch.ones(1, 2, 3, 8), torch.tensor([[4, 7, 1030]])

    def twice(new: Tensor, slots: Tensor) -> Tensor:
        put(cache, new, slots)
        put(cache, new + cache[:, :, 7:8], slots - 1)
        return cache[:, :, 6].sum()

    compiled = Compiled(lambda new, slots: twice(new, slots), "writing", cache.device)
    with torch.inference_mode(), fresh_inductor_cache():
        got, code = run_and_get_cpp_code(compiled, new, slots)
    want = torch.zeros_like(cache)
    want[:, :, slots[0]] = 1
    want[:, :, slots[0] - 1] = 2
    assert torch.equal(cache, want) and got == 32
    assert (f"x0<static_cast<int64_t>({cache.numel()}L)" in code) == copies


@pytest.mark.parametrize(
    ("slots", "before", "most", "room"),
    [(1, 0, None, 64), (64, 0, None, 64), (65, 0, None, 128), (70, 128, None, 256), (65, 0, 100, 100), (65, 64, 65, 65),
     (300, 0, 200, 300)],
)  # fmt: skip
def test_room_is_made_in_steps_and_at_least_doubled(slots: int, before: int, most: int | None, room: int) -> None:
    assert room_for(cast(Target, SimpleNamespace(most_slots=most)), slots, before) == room
