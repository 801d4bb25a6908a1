"""What a compiled round does outside the two models: acceptance and commit, as a graph of their own.

Inside a decoder all but the moving of a tree's keys is part of the target's graph and cannot be timed there. So rounds
are recorded eagerly and then replayed by the round's own ``judge`` and ``tidy``, compiled, with a target that returns
what was recorded. They look at all key slots, a decoder's only at those in use.

Legend: B sequences, T nodes, N asked boundaries, H hidden, V vocabulary, S key columns.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.decoding.compiled import Compiled
from specdec.decoding.decoder import GREEDY, room_for
from specdec.decoding.growth import Growth
from specdec.decoding.round import DraftedRound, PlainRound
from specdec.decoding.tree import DraftTree
from specdec.drafter import Drafter
from specdec.nn.few_queries import additive
from specdec.nn.view import View
from specdec.target import Target, TargetOutput

REPLAYS = 7


class Recorded(NamedTuple):
    """A verification."""

    tree: DraftTree
    out: TargetOutput
    logits_BTV: Tensor
    report: Tensor


class Recorder:
    """A target that remembers its last answer."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def forward(self, *args: Any) -> TargetOutput:
        """The target's."""
        self.out = self.target.forward(*args)
        return self.out

    def logits(self, final_BTH: Tensor) -> Tensor:
        """The target's."""
        self.logits_BTV = self.target.logits(final_BTH)
        return self.logits_BTV


class Stand:
    """A target that answers from memory; it takes the mask and the places as the model would, so that they are made."""

    def __init__(self, like: Recorded, view: View) -> None:
        self.out = TargetOutput(like.out.aux_BTNH.clone(), like.out.final_BTH.clone())
        self.logits_BTV = like.logits_BTV.clone()
        self.bias_B1TS, self.positions_BT = self._bias(view), view.positions_BT.clone()

    def say(self, recorded: Recorded) -> None:
        """What comes next."""
        self.out.aux_BTNH.copy_(recorded.out.aux_BTNH)
        self.logits_BTV.copy_(recorded.logits_BTV)

    def forward(self, ids_BT: Tensor, view: View, *args: Any) -> TargetOutput:
        """From memory."""
        self.bias_B1TS.copy_(self._bias(view))
        self.positions_BT.copy_(view.positions_BT)
        return self.out

    def logits(self, final_BTH: Tensor) -> Tensor:
        """From memory."""
        return self.logits_BTV

    def _bias(self, view: View) -> Tensor:
        return additive(view.mask_B1TS, self.logits_BTV.dtype)


@torch.inference_mode()
def outside(
    target: Target, drafter: Drafter | None, growth: Growth | None, prompt: list[int], tokens: int
) -> dict[str, float]:
    """Milliseconds a round: ``accept_ms``, the call of its graph included, and ``call_ms``, a graph that does nothing.

    Raises:
        ValueError: the replay commits other tokens than the recorded rounds did.
    """
    round_ = _round(target, drafter, growth, len(prompt) + tokens)
    recorded = _record(round_, prompt, tokens)
    round_.target = stand = Stand(recorded[0], _a_view(round_, recorded[0]))
    judge = Compiled(lambda tree: round_.judge(tree), "acceptance", target.device)
    tidy = Compiled(lambda: round_.tidy(), "tidying", target.device)
    draft = round_.draft
    if round_.drafts_fixed:
        draft = Compiled(lambda: round_.draft(), "drafting", target.device)
    times: list[list[float]] = []
    for _ in range(REPLAYS + 1):
        times.append([])
        _begin(round_, recorded, prompt)
        for one in recorded:
            draft()  # so that caches are no warmer than in a decoder
            stand.say(one)
            begin = time.perf_counter()
            report = judge(one.tree)
            if not round_.in_order:
                tidy()
            times[-1].append(time.perf_counter() - begin)
            if not torch.equal(report, one.report):
                raise ValueError("acceptance measured alone commits other tokens than it did in the round")
    counter = torch.zeros(1)
    nothing = Compiled(lambda x: x.add_(1), "nothing", target.device)
    calls = []
    for _ in range(200):
        begin = time.perf_counter()
        nothing(counter)
        calls.append(time.perf_counter() - begin)
    accept = statistics.fmean(map(statistics.median, zip(*times[1:], strict=True)))  # the first compiles
    return {"accept_ms": 1e3 * accept, "call_ms": 1e3 * statistics.median(calls)}


def _round(target: Target, drafter: Drafter | None, growth: Growth | None, longest: int) -> Any:
    """A round with as many slots as a compiled decoder would have."""
    nodes = 1 if growth is None else growth.nodes_drafted + 1
    capacity = room_for(target, longest + nodes)
    if drafter is None or growth is None:
        return PlainRound(target, GREEDY, capacity - nodes)
    return DraftedRound(target, drafter, growth, GREEDY, capacity - nodes)


def _record(round_: Any, prompt: list[int], tokens: int) -> list[Recorded]:
    round_.prefill(0, prompt, 0)
    round_.target = recorder = Recorder(round_.target)
    found, made = [], 1
    while made < tokens and len(found) < 64:
        tree = round_.draft().padded(round_.nodes)
        tree = DraftTree(tree.tokens_BN.clone(), tree.parents_BN.clone(), None)
        report = round_.verify(tree)
        found.append(Recorded(tree, recorder.out, recorder.logits_BTV, report))
        made += int(report[0, 0])
    return found


def _begin(round_: Any, recorded: Sequence[Recorded], prompt: list[int]) -> None:
    """As after the prompt; what the caches hold does not matter to acceptance."""
    first = recorded[0]
    round_.sequences.begin(0, len(prompt), first.tree.tokens_BN[0, :1], first.out.aux_BTNH[0, -1:])


def _a_view(round_: Any, one: Recorded) -> View:
    nodes, device = one.tree.tokens_BN.shape[1], one.tree.tokens_BN.device
    eye_1NN = torch.eye(nodes, dtype=torch.bool, device=device)[None]
    sequences = round_.sequences
    return View.append(sequences.length_B, eye_1NN, eye_1NN.sum(-1) - 1, round_.capacity, sequences.cache)
