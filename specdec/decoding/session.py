"""A decode session: a round with memory for texts up to some length, run eagerly or as two compiled graphs."""

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.decoding.accept import DraftTree
from specdec.decoding.round import PlainRound, SpeculativeRound
from specdec.decoding.shapes import Chain, DraftShape
from specdec.drafting.mode import Frontier
from specdec.nn.backend import own_graphs
from specdec.nn.few_rows import sum_few_rows
from specdec.target import Target
from specdec.utils.text import duration, how_many

log = logging.getLogger(__name__)

STEP = 256  # key slots of compiled sessions are a multiple: few lengths, so few graphs


def slots_for(target: Target, needed: int, before: int = 0) -> int:
    """Key slots of a new compiled session that needs this many, where ``before`` have become too few."""
    slots = -(-max(needed, 2 * before) // STEP) * STEP
    return slots if target.most_slots is None else max(needed, min(slots, target.most_slots))


def graphs_of(sizes: Sequence[int]) -> int:
    """What a compiled session compiles for trees of these sizes: drafting, if there is any, and each size's
    verification."""
    return len(sizes) + (max(sizes) > 1)


class Compilation:
    """Graphs that are compiled one after another, and how far they are; ``graphs`` is how many there are in all."""

    def __init__(self, graphs: int) -> None:
        self.graphs = graphs
        self.seconds: list[float] = []  # that each has taken

    def run(self, what: str, compiling: Callable[[], Any]) -> Any:
        """Call a graph for the first time, which compiles it; the time left is judged by those before."""
        done = len(self.seconds)
        left = (self.graphs - done) * sum(self.seconds) / max(done, 1)
        about = f"about {duration(left)} left" if done else "which may take a minute"
        log.info("compiling graph %d of %d, %s, %s", done + 1, self.graphs, what, about)
        begin = time.perf_counter()
        result = compiling()
        self.seconds.append(time.perf_counter() - begin)
        if done + 1 == self.graphs:
            log.info(
                "compiled %s in %s", how_many(self.graphs, "graph"), duration(sum(self.seconds))
            )
        return result


class DecodeSession:
    """The state of B sequences and the two calls of a round; a prompt's own pass, of any length, is never compiled.

    Compiled, drafting and verification are one graph each, of fixed shapes: they always look at all key slots. For a
    draft shape that reads from the device how long it grows, each level of drafting is a graph, and so is the
    verification of each size.

    Args:
        round_: made for this session alone.
        compiled: compile now, which takes a minute.
        compilation: of which these graphs are some; by default they are all of it.

    Raises:
        ValueError: a round cannot be compiled.
    """

    def __init__(
        self, round_: PlainRound, compiled: bool = False, compilation: Compilation | None = None
    ) -> None:
        self.round = round_
        self.draft: Callable[[], DraftTree] = round_.draft
        self.verify: Callable[[DraftTree], Tensor] = round_.verify
        if compiled:
            self._compile(compilation or Compilation(graphs_of(round_.sizes)))

    def _compile(self, compilation: Compilation) -> None:
        round_ = self.round
        device = self.round.target.device
        options: dict[str, Any] = {
            "triton.cudagraphs": device.type == "cuda",
            # nothing a graph relies on changes in a session but numbers in place, and checking takes a tenth of a round
            "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
        }

        def graph(function: Callable[..., Any]) -> Any:
            # no other session's graph of the same function is taken for it
            return own_graphs(function, dynamic=False, options=options)

        # makes the target's key buffers; of two tokens, so that the drafter reads one too
        round_.prefill(0, [0, 0], 0)
        round_.end(0)
        sum_few_rows(*round_.models)
        what = round_.name
        verify = {nodes: graph(round_.verify) for nodes in round_.sizes}
        try:
            if isinstance(round_, SpeculativeRound):
                drafting = _Drafting(round_, graph)
                tree = compilation.run(f"drafting, {what}", drafting.compile)
                self.draft = drafting.draft
                what = f"verification, {what}"
            else:
                tree = round_.draft()
            for nodes, verify_size in verify.items():
                example = tree if len(verify) == 1 else tree.resized(nodes)
                size = "" if len(verify) == 1 else f", {how_many(nodes, 'node')}"
                compilation.run(what + size, functools.partial(verify_size, example))
        except RuntimeError as error:  # all of the compiler's errors are
            reason = " ".join(str(error).split("\n\n")[0].split())
            size = f"{len(round_.live_B)} x {round_.capacity} tokens"
            raise ValueError(
                f"{round_.name} of {size} cannot be compiled: {reason}; use --compile off"
            ) from error
        self.verify = lambda tree: verify[tree.tokens_BN.shape[1]](tree)


class _Drafting:
    """Compiled drafting: one graph; or one for each call of the drafter, if the shape reads from the device, between
    the calls, whether to continue."""

    def __init__(
        self, round_: SpeculativeRound, graph: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self.round = round_
        self.shape = round_.proposer.shape
        self.whole = graph(round_.draft)
        self.extend = graph(round_.extend)
        self.levels = [graph(round_.expand) for _ in range(self.shape.depth - 1)]

    def compile(self) -> DraftTree:
        """Draft for the first time, and so that every graph is called."""
        return self.draft() if len(self.shape.sizes) == 1 else self._grow(Chain(self.shape.depth))

    def draft(self) -> DraftTree:
        """Draft as the round does."""
        if self.round.target.device.type == "cuda":
            # until the next, graphs leave each other's results alone
            torch.compiler.cudagraph_mark_step_begin()
        return self.whole() if len(self.shape.sizes) == 1 else self._grow(self.shape)

    def _grow(self, shape: DraftShape) -> DraftTree:
        start = self.extend()
        levels = iter(self.levels)

        def expand(*level: Tensor) -> Frontier:
            frontier: Frontier = next(levels)(start, *level)
            return frontier

        round_ = self.round
        return round_.proposer.grow(shape, round_.root_B, start, expand, round_.child_sampling())
