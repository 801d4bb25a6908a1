"""Rounds at work: as they are, or as compiled graphs."""

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.decoding.compiled import Compiled
from specdec.decoding.round import PlainRound
from specdec.decoding.tree import DraftTree


class Room:
    """A round with room for texts of some length."""

    def __init__(self, round_: PlainRound) -> None:
        self.round = round_
        self.draft: Callable[[], DraftTree] = round_.draft
        self.verify: Callable[[DraftTree], Tensor] = round_.verify

    def check(self) -> None:
        """Raise ValueError if it cannot be used any more."""


class CompiledRoom(Room):
    """The same as graphs, compiled when it is made. A tree's keys are tidied by a graph of their own."""

    def __init__(self, round_: PlainRound) -> None:
        super().__init__(round_)
        self._weights = self._versions()
        device, batch = round_.target.device, len(round_.sequences.live_B)
        where = f"for {batch} x {round_.capacity} tokens"
        round_.prefill(0, [0, 0], 0)  # makes the cache's buffers; a second token for the drafter
        round_.sequences.end(0)
        for tensor in round_.tensors if device.type == "cuda" else ():  # no CUDA graph writes to other inputs
            torch._dynamo.mark_static_address(tensor, guard=False)
        draft = round_.draft
        if round_.drafts_fixed:
            draft = Compiled(lambda: round_.draft(), f"drafting {where}", device)
        judge = Compiled(lambda tree: round_.judge(tree), f"verification {where}", device)
        tidy = round_.tidy if round_.in_order else Compiled(lambda: round_.tidy(), f"tidying {where}", device)

        def begin() -> DraftTree:
            torch.compiler.cudagraph_mark_step_begin()  # until the next, graphs leave each other's results alone
            return draft()

        def verify(tree: DraftTree) -> Tensor:
            report = judge(tree.padded(round_.nodes))
            tidy()
            return report

        self.draft, self.verify = begin if device.type == "cuda" else draft, verify
        for _ in range(2):  # the second must find all compiled
            self.verify(self.draft())

    def check(self) -> None:
        """Raise ValueError if weights have changed: the graphs hold copies of them."""
        if self._versions() != self._weights:
            raise ValueError("the weights have changed since decoding was compiled: make a new decoder for them")

    def _versions(self) -> list[tuple[int, int]]:
        modules = self.round.modules
        weights = (weight for module in modules for weight in (*module.parameters(), *module.buffers()))
        return [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in weights]
