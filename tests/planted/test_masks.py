"""Faults in who sees whom in training: the naive implementation, which shares no code with it, finds each."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.nn.unroll import Dense
from specdec.nn.view import Spans, View
from specdec.training.step import ObjectiveConfig
from tests.parity.test_dense_reference import check

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


def within(change: Callable[[int, int], tuple[int, int]]) -> Plant:
    """Another window, or other sinks."""

    def plant(patch: Patch) -> None:
        right = Spans.within

        def wrong(
            self: Spans, positions: Tensor, keys: Tensor, window: int, sinks: int = 0
        ) -> Spans:
            return right(self, positions, keys, *change(window, sinks))

        patch.setattr(Spans, "within", wrong)

    return plant


def packed(change: Callable[[View], View]) -> Plant:
    """Packed documents are placed otherwise."""

    def plant(patch: Patch) -> None:
        right = View.packed
        patch.setattr(View, "packed", lambda documents: change(right(documents)))

    return plant


def one_document(patch: Patch) -> None:
    """Documents of a row see each other, and their positions run on."""
    right = View.packed
    patch.setattr(View, "packed", lambda documents: right(torch.zeros_like(documents)))


def seen(by: int) -> Plant:
    """The last key that a token sees is another one."""

    def change(view: View) -> View:
        spans: Any = view.visibility
        last = (spans.last_BT + by).clamp(0, spans.columns - 1)
        return view._replace(visibility=spans._replace(last_BT=last))

    return packed(change)


def first_seen(view: View) -> View:
    """A document begins one token early."""
    spans: Any = view.visibility
    return view._replace(visibility=spans._replace(first_BT=(spans.first_BT - 1).clamp_min(0)))


def positions_run_on(view: View) -> View:
    """They do not begin again with a document."""
    order = torch.arange(view.positions_BT.shape[1]).expand_as(view.positions_BT)
    return view._replace(positions_BT=order)


def keys_of_steps(change: Callable[[list[Any]], list[Any]]) -> Plant:
    """A step sees other keys of the steps before."""

    def plant(patch: Patch) -> None:
        right = Dense.__call__

        def wrong(self: Dense, q: Tensor, steps: list[Any], spans: Spans) -> Tensor:
            return right(self, q, change(list(steps)), spans)

        patch.setattr(Dense, "__call__", wrong)

    return plant


def moved(steps: list[Any]) -> list[Any]:
    """The newest keys are those of the slot before."""
    newest = type(steps[-1])(*(part.roll(1, 2) for part in steps[-1]))
    return steps if len(steps) == 1 else [*steps[:-1], newest]


FAULTS: dict[str, tuple[str, Plant]] = {
    "a window one position wider": (
        "sliding_window",
        within(lambda window, sinks: (window + 1, sinks)),
    ),
    "a window one position narrower": (
        "sliding_window",
        within(lambda window, sinks: (window - 1, sinks)),
    ),
    "attention sinks that are not seen": ("sinks", within(lambda window, sinks: (window, 0))),
    "one attention sink too many": ("sinks", within(lambda window, sinks: (window, sinks + 1))),
    "documents of a row that see each other": ("eagle3_1", one_document),
    "a document that begins one token early": ("eagle3_1", packed(first_seen)),
    "positions that run on over documents": ("eagle3_1", packed(positions_run_on)),
    "a token that sees the next one": ("eagle3_1", seen(1)),
    "a token that does not see itself": ("eagle3_1", seen(-1)),
    "a step that does not see its own token": (
        "eagle3_1",
        keys_of_steps(lambda s: s[:-1] if s[1:] else s),
    ),
    "a step that misses the one before": (
        "eagle3_1",
        keys_of_steps(lambda s: [*s[:-2], s[-1]] if s[2:] else s),
    ),
    "a step that sees its neighbor's keys": ("eagle3_1", keys_of_steps(moved)),
}


def test_without_a_fault_it_holds() -> None:
    for design in {design for design, _ in FAULTS.values()}:
        check(design, ObjectiveConfig(steps=4, kernel=Dense()))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: Patch) -> None:
    design, plant = FAULTS[fault]
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(design, ObjectiveConfig(steps=4, kernel=Dense()))
