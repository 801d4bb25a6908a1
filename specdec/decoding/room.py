"""Rounds at work: as they are, or as compiled graphs."""

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.decoding.compiled import Compiled
from specdec.decoding.round import PlainRound
from specdec.decoding.tree import DraftTree

STEP = 32  # graphs look at a multiple of so many key slots


class Room:
    """A round with room for texts of some length."""

    def __init__(self, round_: PlainRound) -> None:
        self.round = round_
        self.draft: Callable[[], DraftTree] = round_.draft
        self.verify: Callable[[DraftTree], Tensor] = round_.verify

    def check(self) -> None:
        """Raise ValueError if it cannot be used any more."""


class Slots:
    """The first key slots of a cache, as many as the longest sequence needs now; all on a GPU, whose graphs are fixed.

    Given as a vector of so many numbers, which nobody reads.

    Args:
        length_B: of the sequences, updated in place.
        beyond: slots that may be in use behind each.
    """

    def __init__(self, length_B: Tensor, capacity: int, beyond: int) -> None:
        self.length_B, self.capacity, self.beyond = length_B, capacity, beyond
        self.varying = length_B.device.type == "cpu"
        self._all_S = torch.arange(capacity, device=length_B.device)

    def __call__(self, first: bool = False) -> Tensor:
        """Those of now; for the call that compiles nearly all, since torch takes all for a case of its own."""
        if not (self.varying and self.capacity):  # plain decoding has no drafter's
            return self._all_S
        needed = max(int(self.length_B.max()), 1) + self.beyond  # a sequence that has ended counts from a first slot
        return self._all_S[: self.capacity - 1 if first else min(self.capacity, -(-needed // STEP) * STEP)]


class CompiledRoom(Room):
    """The same as graphs, compiled when it is made. A tree's keys are tidied by a graph of their own.

    On a CPU they look only at key slots that a sequence has come to.
    """

    def __init__(self, round_: PlainRound) -> None:
        super().__init__(round_)
        self._weights = self._versions()
        device, batch = round_.target.device, len(round_.sequences.live_B)
        where = f"for {batch} x {round_.capacity} tokens"
        round_.prefill(0, [0, 0], 0)  # makes the cache's buffers; a second token for the drafter
        round_.sequences.end(0)
        for tensor in round_.tensors if device.type == "cuda" else ():  # no CUDA graph writes to other inputs
            torch._dynamo.mark_static_address(tensor, guard=False)
        of_target = Slots(round_.sequences.length_B, round_.capacity, round_.nodes)
        of_drafter = Slots(round_.sequences.length_B, *round_.drafter_slots)
        propose: Callable[[Tensor], DraftTree] = lambda slots_S: round_.draft(len(slots_S))  # noqa: E731
        if round_.drafts_fixed:
            propose = Compiled(propose, f"drafting {where}", device, varying=of_drafter.varying)
        judge = Compiled(
            lambda tree, slots_S: round_.judge(tree, len(slots_S)), f"verification {where}", device, of_target.varying
        )
        tidy = round_.tidy if round_.in_order else Compiled(lambda: round_.tidy(), f"tidying {where}", device)

        def draft(first: bool = False) -> DraftTree:
            if device.type == "cuda":
                torch.compiler.cudagraph_mark_step_begin()  # until the next, graphs leave each other's results alone
            return propose(of_drafter(first))

        def verify(tree: DraftTree, first: bool = False) -> Tensor:
            report = judge(tree.padded(round_.nodes), of_target(first))
            tidy()
            return report

        self.draft, self.verify = draft, verify
        for first in (True, False):  # the second must find all compiled
            verify(draft(first), first)

    def check(self) -> None:
        """Raise ValueError if weights have changed: the graphs hold copies of them."""
        if self._versions() != self._weights:
            raise ValueError("the weights have changed since decoding was compiled: make a new decoder for them")

    def _versions(self) -> list[tuple[int, int]]:
        modules = self.round.modules
        weights = (weight for module in modules for weight in (*module.parameters(), *module.buffers()))
        return [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in weights]
