"""Rounds at work."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specdec.decoding import (
    Chain,
    ConfidentChain,
    DynamicTree,
    Growth,
    Sampling,
    SpeculativeDecoder,
    StaticTree,
)
from specdec.decoding.room import STEP, CompiledRoom
from specdec.decoding.round import DraftedRound, PlainRound
from specdec.drafter import Drafter
from specdec.drafter.well_read import WellRead
from specdec.nn.cache import StaticCache
from specdec.nn.sight import Sight
from specdec.nn.view import View
from specdec.target import Target, TargetOutput
from specdec.target.cache import TargetCache
from tests.perfect import disturb, markov_target, perfect_drafter
from tests.tiny import presets


def reachable(x: Any, known: set[int]) -> Iterator[Tensor]:
    """Tensors that an object leads to, the weights of modules left out."""
    if isinstance(x, nn.Module | type) or id(x) in known:
        return
    known.add(id(x))
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, dict):
        for value in x.values():
            yield from reachable(value, known)
    elif isinstance(x, list | tuple):
        for value in x:
            yield from reachable(value, known)
    elif hasattr(x, "__dict__"):
        yield from reachable(vars(x), known)


@pytest.mark.parametrize("growth", [Chain(3), DynamicTree(depth=3, top_k=2, nodes=6)], ids=["chain", "tree"])
@torch.inference_mode()
def test_a_round_names_all_that_it_writes_to(growth: Growth, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does not name would keep a GPU from using CUDA graphs."""
    target = markov_target(context=0.45)
    drafter = perfect_drafter(target, presets()["eagle3_1"], sharpness=2.0)
    sampling = Sampling(temperature=0.8, repetition_penalty=1.2)
    round_ = DraftedRound(target, drafter, growth, sampling, 60)
    monkeypatch.setattr("specdec.decoding.room.Compiled", lambda function, *_, **__: function)
    room = CompiledRoom(round_)
    told = {id(x) for x in round_.tensors}  # once the room has made the target's keys
    round_.prefill(0, [3, 4, 5], 1)
    found = list(reachable(round_, {id(target.model)}))
    before = [x.clone() for x in found]
    for _ in range(6):
        room.verify(room.draft())
    changed = [x for x, old in zip(found, before, strict=True) if not torch.equal(x, old)]
    assert len(changed) > 10 and {id(x) for x in changed} <= told


@pytest.mark.parametrize("step", [1, STEP])
@pytest.mark.parametrize(
    "growth",
    [Chain(3), ConfidentChain(4, 0.3), StaticTree(((0,), (1,), (0, 0), (0, 1))), DynamicTree(4, top_k=3, nodes=6)],
    ids=lambda growth: type(growth).__name__,
)
@torch.inference_mode()
def test_graphs_look_at_the_slots_in_use(growth: Growth, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the longest sequence, with a step of one exactly; and draft and verify as those that look at all slots do."""
    target = markov_target(context=0.45)
    drafter = disturb(perfect_drafter(target, presets()["eagle3_1"], sharpness=2.0), 0.8)
    alone, round_ = (DraftedRound(target, drafter, growth, Sampling(), 120, batch=2) for _ in range(2))
    looked: set[tuple[str, int]] = set()
    attend, place = StaticCache.attend, TargetCache.place

    def attended(self: StaticCache, layer: int, q: Any, k: Any, v: Any, sight: Sight, slots: Any) -> Tensor:
        looked.add(("drafter", sight.columns))
        return attend(self, layer, q, k, v, sight, slots)

    def placed(self: TargetCache, view: View) -> int:
        looked.add(("target", view.columns))
        return place(self, view)

    monkeypatch.setattr("specdec.decoding.room.Compiled", lambda function, *_, **__: function)
    monkeypatch.setattr("specdec.decoding.room.STEP", step)
    room = CompiledRoom(round_)
    for each in (alone, round_):
        each.prefill(0, [3, 4, 5], 1)
        each.prefill(1, [5] * 40, 2)
    drafts = 0
    while (length := int(round_.sequences.length_B.max())) < 120:
        wanted = alone.draft()
        report = alone.verify(wanted)
        with monkeypatch.context() as patch:
            patch.setattr(StaticCache, "attend", attended)
            patch.setattr(TargetCache, "place", placed)
            looked.clear()
            tree = room.draft()
            assert torch.equal(tree.tokens_BN, wanted.tokens_BN)
            assert torch.equal(room.verify(tree), report)
        drafts += int(report[:, 0].sum()) - 2
        most = {"drafter": round_.proposer.capacity, "target": round_.capacity}
        beyond = {"drafter": round_.proposer.beyond, "target": round_.nodes}
        assert looked == {(x, min(-(-(length + beyond[x]) // step) * step, most[x])) for x in most}
    assert drafts > 5


@pytest.mark.parametrize("growth", [None, Chain(3), DynamicTree(4, top_k=3, nodes=30)], ids=str)
@torch.inference_mode()
def test_prompts_are_read_in_parts(growth: Growth | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one part, several, and one that is cut off or filled up, a round goes on as after the whole prompt."""
    target = markov_target(context=0.45)
    drafter = disturb(perfect_drafter(target, presets()["eagle3_1"], sharpness=2.0), 0.8)
    sampling = Sampling(temperature=0.8, repetition_penalty=1.2)

    def new_round() -> PlainRound:
        return DraftedRound(target, drafter, growth, sampling, 60) if growth else PlainRound(target, sampling, 60)

    widths = []
    forward = Target.forward

    def seen(self: Target, ids_BT: Tensor, *args: Any) -> TargetOutput:
        widths.append(ids_BT.shape[1])
        return forward(self, ids_BT, *args)

    monkeypatch.setattr("specdec.decoding.room.Compiled", lambda function, *_, **__: function)
    monkeypatch.setattr("specdec.decoding.room.PART", 8)
    room = CompiledRoom(new_round())
    text = [3 + 7 * i * i % 50 for i in range(30)]
    for length in (30, 1, 7, 8, 9, 16, 17, 2):
        alone = new_round()
        first = alone.prefill(0, text[:length], length)
        with monkeypatch.context() as patch:
            patch.setattr(Target, "forward", seen)
            widths.clear()
            assert torch.equal(room.prefill(0, text[:length], length), first)
        assert widths == [8] * -(-length // 8)
        for _ in range(5):
            assert torch.equal(room.verify(room.draft()), alone.verify(alone.draft()))


@pytest.mark.parametrize(("batch", "light", "graph"), [(1, 2**30, True), (2, 2**30, False), (1, 1000, False)])
@torch.inference_mode()
def test_who_has_a_graph_for_prompts(batch: int, light: int, graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence at a time, of a target that is no burden twice."""
    monkeypatch.setattr("specdec.decoding.room.Compiled", lambda function, *_, **__: function)
    monkeypatch.setattr("specdec.decoding.room.LIGHT", light)
    round_ = PlainRound(markov_target(), Sampling(), 60, batch)
    assert (CompiledRoom(round_).read != round_.read_whole) is graph


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.usefixtures("no_graphs")
def test_a_gpu_runs_cuda_graphs() -> None:
    from torch._dynamo.utils import counters
    from torch._inductor.cudagraph_trees import get_container

    from specdec.decoding import PlainDecoder, SpeculativeDecoder

    target = markov_target(context=0.45)
    drafter = perfect_drafter(target, presets()["eagle3_1"], sharpness=2.0).cuda()
    target.model.cuda()
    wanted = PlainDecoder(target).generate([3, 4, 5], 60).ids
    for growth in (Chain(3), DynamicTree(depth=3, top_k=2, nodes=6)):
        assert SpeculativeDecoder(target, drafter, growth, compiled=True).generate([3, 4, 5], 60).ids == wanted
    assert counters["inductor"]["cudagraph_skips"] == 0
    manager = get_container(0).tree_manager
    assert manager is not None and any(manager.get_roots())


@torch.inference_mode()
def test_a_room_sees_every_change_of_weights_and_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.decoding.room.Compiled", lambda function, *_, **__: function)
    target = markov_target(context=0.45)

    def scaled(drafter: Drafter) -> None:
        drafter.embed_tokens.weight.data = drafter.embed_tokens.weight * 2

    def replaced(drafter: Drafter) -> None:
        drafter.lm_head.weight = nn.Parameter(drafter.lm_head.weight.clone())

    def swapped(drafter: Drafter) -> None:
        drafter.norms.output = nn.Identity()

    def grown(drafter: Drafter) -> None:
        drafter.norms.register_buffer("further", torch.zeros(1))

    for change in (scaled, replaced, swapped, grown):
        drafter = perfect_drafter(target, presets()["eagle3_1"], sharpness=2.0)
        room = CompiledRoom(DraftedRound(target, drafter, Chain(2), Sampling(), 20))
        room.check()
        change(drafter)
        with pytest.raises(ValueError, match="weights have changed"):
            room.check()


def test_compiled_decoders_alone_look_up_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.decoding.room.Compiled", lambda function, *_, **__: function)
    target = markov_target(context=0.45)
    drafter = perfect_drafter(target, presets()["eagle3_1"], sharpness=2.0)
    made = {}
    for compiled in (False, True):
        decoder = SpeculativeDecoder(target, drafter, Chain(3), compiled=compiled)
        made[compiled] = decoder.generate([3, 4, 5], 20)
        assert decoder.drafter is drafter
        round_ = decoder._new_round(30)
        assert isinstance(round_, DraftedRound) and isinstance(round_.proposer.drafter, WellRead) == compiled
    assert made[True].ids == made[False].ids and made[True].accepted == made[False].accepted
