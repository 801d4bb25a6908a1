"""Rounds at work."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specdec.decoding import Chain, DynamicTree, Growth, Sampling
from specdec.decoding.room import MANY, CompiledRoom
from specdec.decoding.round import DraftedRound
from tests.perfect import markov_target, perfect_drafter
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


@torch.inference_mode()
def test_graphs_look_at_the_slots_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the longest sequence; and draft what all slots would have them draft."""
    target = markov_target(context=0.45)
    drafter = perfect_drafter(target, presets()["eagle3_1"], sharpness=2.0)
    alone, round_ = (DraftedRound(target, drafter, Chain(3), Sampling(), 120, batch=2) for _ in range(2))
    looked: list[int] = []

    def compiled(function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            looked.append(len(args[-1]))
            return function(*args)

        return call

    monkeypatch.setattr("specdec.decoding.room.Compiled", compiled)
    room = CompiledRoom(round_)
    assert looked == [round_.proposer.capacity - 1, round_.capacity - 1, MANY, MANY]
    for each in (alone, round_):
        each.prefill(0, [3, 4, 5], 1)
        each.prefill(1, [5] * 40, 2)
    while (length := int(round_.sequences.length_B.max())) < 120:
        looked.clear()
        tree, wanted = room.draft(), alone.draft()
        assert torch.equal(tree.tokens_BN, wanted.tokens_BN)
        assert torch.equal(room.verify(tree), alone.verify(wanted))
        whole = [round_.proposer.capacity, round_.capacity]
        assert looked == [min(-(-(length + n) // MANY) * MANY, most) for n, most in zip((3, 4), whole, strict=True)]
    assert looked[1] == round_.capacity


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
