"""Faults in decoding that training does not have: the comparison of their logits finds each."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.decoding import Proposer
from specdec.drafting import markov
from specdec.drafting.chained import Chained, FeedNormed, FeedRaw
from specdec.drafting.markov import MarkovHead
from specdec.drafting.mode import DrafterMemory, Expand, Frontier
from specdec.nn.cache import StaticCache
from specdec.nn.view import Pairs, View
from tests.parity.unrolled import worst_gap
from tests.tiny import presets, variants

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]
CLOSE = 1e-12
LONG = [0] * 40
SHORT = [0] * 8
DESIGNS = presets() | variants()
DESIGNS["sinks"] = dataclasses.replace(DESIGNS["sliding_window"], attention_sinks=3)


def chain(**changes: Callable[[Any], Any]) -> Plant:
    """Committed tokens are placed otherwise."""

    def plant(patch: Patch) -> None:
        right = View.chain

        def wrong(*of: Any) -> View:
            view = right(*of)
            return view._replace(
                **{name: change(getattr(view, name)) for name, change in changes.items()}
            )

        patch.setattr(View, "chain", wrong)

    return plant


def append(change: Callable[[View], View]) -> Plant:
    """Drafts are placed otherwise."""

    def plant(patch: Patch) -> None:
        right = View.append
        patch.setattr(View, "append", lambda *of: change(right(*of)))

    return plant


def unseen(column: Callable[[View], Tensor]) -> Plant:
    """A draft does not see one key."""

    def change(view: View) -> View:
        assert isinstance(view.visibility, Pairs)
        mask = view.visibility.mask_B1TS.clone()
        mask[..., column(view)] = False
        return view._replace(visibility=view.visibility._replace(mask_B1TS=mask))

    return append(change)


def window(patch: Patch) -> None:
    """Drafts see one position more."""
    right = Pairs.within
    patch.setattr(
        Pairs,
        "within",
        lambda self, at, keys, size, sinks=0: right(self, at, keys, size + 1, sinks),
    )


def no_sinks(patch: Patch) -> None:
    """Drafts do not see the sinks."""
    right = Pairs.within
    patch.setattr(
        Pairs, "within", lambda self, at, keys, size, sinks=0: right(self, at, keys, size)
    )


def other_feedback(patch: Patch) -> None:
    """A draft reads the other of the two outputs, raw or normed; in decoding alone."""
    raw, normed = FeedRaw.forward, FeedNormed.forward
    right = DrafterMemory.append

    def wrong(self: DrafterMemory, *of: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(FeedRaw, "forward", lambda module, *outputs: normed(module, *outputs))
            inner.setattr(FeedNormed, "forward", lambda module, *outputs: raw(module, *outputs))
            return right(self, *of)

    patch.setattr(DrafterMemory, "append", wrong)


def committed(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Plant:
    """Tokens or features that a round hands to the drafter are others."""

    def plant(patch: Patch) -> None:
        right = Proposer.extend

        def wrong(self: Proposer, length: Tensor, ids: Tensor, aux: Tensor, count: Tensor) -> Any:
            return right(self, length, *change(ids, aux), count)

        patch.setattr(Proposer, "extend", wrong)

    return plant


def drafted(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Plant:
    """A draft reads another token or feature than the one before it."""

    def plant(patch: Patch) -> None:
        right = DrafterMemory.append

        def wrong(self: DrafterMemory, length: Tensor, ids: Tensor, h: Tensor, *of: Any) -> Any:
            return right(self, length, *change(ids, h), *of)

        patch.setattr(DrafterMemory, "append", wrong)

    return plant


def unwritten(patch: Patch) -> None:
    """The keys of drafts are written over the last committed one's."""
    right = StaticCache.attend

    def wrong(
        self: StaticCache, layer: int, q: Tensor, k: Tensor, v: Tensor, visible: Any, slots: Any
    ) -> Tensor:
        if isinstance(visible, Pairs):
            slots = slots - 1
        return right(self, layer, q, k, v, visible, slots)

    patch.setattr(StaticCache, "attend", wrong)


def first_start_only(patch: Patch) -> None:
    """The first draft is made from the first committed token, not from the last."""
    right = Chained.start

    def wrong(
        self: Chained, memory: Any, length: Tensor, ids: Tensor, h: Tensor, count: Tensor
    ) -> Any:
        return right(self, memory, length, ids, h, torch.ones_like(count))

    patch.setattr(Chained, "start", wrong)


def other_token_before(patch: Patch) -> None:
    """DSpark's Markov head reads another token than the one before the draft."""
    right = MarkovHead.after

    def wrong(self: MarkovHead, said: Frontier, previous: Tensor) -> Frontier:
        return right(self, said, (previous + 1) % 61)

    patch.setattr(MarkovHead, "after", wrong)


def level_before(patch: Patch) -> None:
    """A block's drafts behind the first are made by the node before their own."""
    right = markov.levels_of

    def wrong(start: Frontier) -> Expand:
        level_of = right(start)
        return lambda ids, h, seen, depth: level_of(ids, h, seen, depth - 1)

    patch.setattr(markov, "levels_of", wrong)


FAULTS: dict[str, tuple[str, list[int], Plant]] = {
    "committed tokens one position late": (
        "eagle3_1",
        SHORT,
        chain(positions_BT=lambda at: at + (at > 2).long()),
    ),
    "drafts one position late": (
        "eagle3_1",
        SHORT,
        append(lambda v: v._replace(positions_BT=v.positions_BT + 1)),
    ),
    "all drafts at one position": (
        "eagle3_1",
        SHORT,
        append(
            lambda v: v._replace(
                positions_BT=v.slots_BT[:, :1].expand_as(v.positions_BT).clamp_max(3)
            )
        ),  # type: ignore[index]
    ),
    "a draft that does not see the first token": (
        "eagle1",
        SHORT,
        unseen(lambda v: torch.tensor([0])),
    ),
    "a draft that does not see the last token": (
        "eagle3_1",
        SHORT,
        unseen(lambda v: v.slots_BT[0, :1] - 1),
    ),  # type: ignore[index]
    "a window of drafts one position wider": ("sliding_window", LONG, window),
    "drafts that do not see the sinks": ("sinks", LONG, no_sinks),
    "the other feedback of raw and normed, EAGLE-3.1": ("eagle3_1", SHORT, other_feedback),
    "the other feedback of raw and normed, EAGLE-3": ("eagle3", SHORT, other_feedback),
    "features of the token before": (
        "eagle3_1",
        SHORT,
        committed(lambda ids, aux: (ids, aux.roll(1, 1))),
    ),
    "boundaries in another order": (
        "eagle3_1",
        SHORT,
        committed(lambda ids, aux: (ids, aux.flip(2))),
    ),
    "tokens of the feature's own place": (
        "eagle1",
        SHORT,
        committed(lambda ids, aux: (ids.roll(1, 1), aux)),
    ),
    "a draft that reads another token": (
        "eagle3_1",
        SHORT,
        drafted(lambda ids, h: ((ids + 1) % 61, h)),
    ),
    "a draft that reads no feature": (
        "eagle3",
        SHORT,
        drafted(lambda ids, h: (ids, torch.zeros_like(h))),
    ),
    "keys of drafts in the wrong slot": ("eagle3_1", SHORT, unwritten),
    "the first draft behind the wrong token": ("eagle3_1", SHORT, first_start_only),
    "a Markov head that reads another token": ("dspark", SHORT, other_token_before),
    "a block's drafts by the node before": ("dspark", SHORT, level_before),
}


@pytest.mark.parametrize("design", sorted({design for design, _, _ in FAULTS.values()}))
def test_without_a_fault_they_are_equal(design: str) -> None:
    assert worst_gap(DESIGNS[design], SHORT) < CLOSE


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: Patch) -> None:
    design, documents, plant = FAULTS[fault]
    plant(monkeypatch)
    assert worst_gap(DESIGNS[design], documents) > 1e6 * CLOSE
