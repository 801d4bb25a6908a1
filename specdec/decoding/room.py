"""Rounds at work: as they are, or as compiled graphs."""

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec.decoding.compiled import Compiled
from specdec.decoding.prompt import parts
from specdec.decoding.round import PlainRound
from specdec.decoding.tree import DraftTree
from specdec.nn.versions import versions

STEP = 32  # graphs look at a multiple of so many key slots
PART = 64  # tokens of a prompt that a graph reads at once: as many rows as the kernels of few rows serve
LIGHT = (
    2**30
)  # bytes of weights up to which prompts have a graph: it holds them once more, and its gain is in the calls


class Room:
    """A round with room for texts of some length."""

    def __init__(self, round_: PlainRound) -> None:
        self.round = round_
        self.draft: Callable[[], DraftTree] = round_.draft
        self.verify: Callable[[DraftTree], Tensor] = round_.verify
        self.read: Callable[[int, list[int]], tuple[Tensor, Tensor]] = round_.read_whole

    def prefill(self, b: int, prompt: list[int], seed: int) -> Tensor:
        """Start sequence ``b`` on a prompt; returns its first new token, (1,)."""
        return self.round.begin(b, prompt, seed, *self.read(b, prompt))

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
        if first:
            return self._all_S[: self.capacity - 1]
        return self.up_to(max(int(self.length_B.max()), 1) + self.beyond)  # one that has ended counts from a first slot

    def up_to(self, needed: int) -> Tensor:
        """At least the first so many."""
        return self._all_S[: min(self.capacity, -(-needed // STEP) * STEP)]


class CompiledRoom(Room):
    """The same as graphs, compiled when it is made. A tree's keys are tidied by a graph of their own.

    On a CPU they look only at key slots that a sequence has come to, and where sequences are decoded one at a time a
    graph reads their prompts too, unless the models are large.
    """

    def __init__(self, round_: PlainRound) -> None:
        super().__init__(round_)
        modules = [module for each in round_.modules for module in each.modules()]
        dicts: list[dict[str, Any]] = [some for x in modules for some in (x._parameters, x._buffers, x._modules)]
        self._dicts, self._empty = [some for some in dicts if some], [some for some in dicts if not some]
        self._known = self._held()
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
        if device.type == "cpu" and batch == 1 and self._bytes() <= LIGHT:
            self.read = self._reading(f"prompts {where}")

    def _reading(self, what: str) -> Callable[[int, list[int]], tuple[Tensor, Tensor]]:
        """:meth:`PlainRound.read_whole` of the only sequence, in parts of one length."""
        round_ = self.round
        most = min(capacity for capacity in (round_.capacity, round_.drafter_slots[0]) if capacity)
        length = min(PART, most - 1, round_.target.config.max_position_embeddings)
        slots = Slots(round_.sequences.length_B, most, 0)
        graph = Compiled(
            lambda part, slots_S: round_.read(0, part, len(slots_S)), what, round_.target.device, slots.varying
        )

        def read(b: int, prompt: list[int], first: bool = False) -> tuple[Tensor, Tensor]:
            for part, end in parts(prompt, length, round_.target.device):
                said = graph(part, slots(first) if first else slots.up_to(end))
            return said

        for first in (True, False):
            read(0, [0], first)
        return read

    def check(self) -> None:
        """Raise ValueError if weights have changed: the graphs hold copies of them."""
        held = self._held()
        same = len(held) == len(self._known) and all(map(operator.is_, held, self._known))
        if not same or any(self._empty) or self._versions() != self._weights:
            raise ValueError("the weights have changed since decoding was compiled: make a new decoder for them")

    def _held(self) -> list[Any]:
        """What the modules consist of, their parts too.

        It is asked for before every text, so without a walk: another dictionary of parameters or parts goes unseen.
        """
        return list(itertools.chain.from_iterable(map(dict.values, self._dicts)))

    def _versions(self) -> list[tuple[int, int]]:
        return versions(x for x in self._known if isinstance(x, Tensor))

    def _bytes(self) -> int:
        kept = (x for module in self.round.modules for x in module.state_dict().values())
        return sum({x.data_ptr(): x.nbytes for x in kept}.values())
