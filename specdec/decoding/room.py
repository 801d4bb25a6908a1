"""Rounds at work: as they are, or as compiled graphs."""

from collections.abc import Callable

from torch import Tensor

from specdec.decoding.compiled import Compiled
from specdec.decoding.round import PlainRound
from specdec.decoding.tree import DraftTree


class Room:
    """A round with room for texts of some length, compiled or not."""

    def __init__(self, round_: PlainRound, compiled: bool) -> None:
        self.round = round_
        self.draft: Callable[[], DraftTree] = round_.draft
        self.verify: Callable[[DraftTree], Tensor] = round_.verify
        if compiled:
            self._compile()

    def _compile(self) -> None:
        round_ = self.round
        device, batch = round_.target.device, len(round_.sequences.live_B)
        where = f"for {batch} x {round_.capacity} tokens"
        if round_.drafts_fixed:
            self.draft = Compiled(lambda: round_.draft(), f"drafting {where}", device, batch * round_.path)
        verify = Compiled(lambda tree: round_.verify(tree), f"verification {where}", device, batch * round_.nodes)
        self.verify = lambda tree: verify(tree.padded(round_.nodes))
        round_.prefill(0, [0], 0)  # makes the cache's buffers
        round_.sequences.end(0)
        for _ in range(2):  # the second must find all compiled
            self.verify(self.draft())
