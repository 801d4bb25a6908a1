"""What a compiled round does outside the two models: acceptance and commit, as a graph of their own.

Inside a decoder all but the moving of a tree's keys is part of the target's graph and cannot be timed there. So rounds
are recorded eagerly and then replayed by the round's own ``judge`` and ``tidy``, compiled, with a target that returns
what was recorded, and look at the key slots in use, as a decoder does.

Legend: B sequences, T nodes, N asked boundaries, H hidden, V vocabulary, S key columns.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.decoding.compiled import Compiled
from specdec.decoding.decoder import GREEDY, room_for
from specdec.decoding.growth import Growth
from specdec.decoding.room import Slots
from specdec.decoding.round import DraftedRound, PlainRound
from specdec.decoding.tree import DraftTree
from specdec.drafter import Drafter
from specdec.nn.few_queries import additive
from specdec.nn.view import View
from specdec.target import Target, TargetOutput

REPLAYS = 3


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
        self.bias_B1TS[..., : view.columns].copy_(self._bias(view))
        self.positions_BT.copy_(view.positions_BT)
        return self.out

    def logits(self, final_BTH: Tensor) -> Tensor:
        """From memory."""
        return self.logits_BTV

    def _bias(self, view: View) -> Tensor:
        return additive(view.mask_B1TS, self.logits_BTV.dtype)


class Outside:
    """The rounds of one text, to be replayed whenever the machine is as it was for the decoder.

    Args:
        prompt: of the text, which ends after so many tokens or 64 rounds.
    """

    @torch.inference_mode()
    def __init__(
        self, target: Target, drafter: Drafter | None, growth: Growth | None, prompt: list[int], tokens: int
    ) -> None:
        self.prompt, device = prompt, target.device
        self.round = _round(target, drafter, growth, len(prompt) + tokens)
        self.recorded = _record(self.round, prompt, tokens)
        self.round.target = self.stand = Stand(self.recorded[0], _a_view(self.round, self.recorded[0]))
        length_B = self.round.sequences.length_B
        self.of_target = Slots(length_B, self.round.capacity, self.round.nodes)
        self.of_drafter = Slots(length_B, *self.round.drafter_slots)
        judge: Callable[[DraftTree, Tensor], Tensor] = lambda tree, slots_S: self.round.judge(tree, len(slots_S))  # noqa: E731
        draft: Callable[[Tensor], DraftTree] = lambda slots_S: self.round.draft(len(slots_S))  # noqa: E731
        self.judge = Compiled(judge, "acceptance", device, self.of_target.varying)
        self.tidy = Compiled(lambda: self.round.tidy(), "tidying", device)
        self.draft = Compiled(draft, "drafting", device, self.of_drafter.varying) if self.round.drafts_fixed else draft
        self.nothing = Compiled(lambda *args: self._touch(*args), "nothing", device, self.of_target.varying)
        self._replay(first=True)

    @torch.inference_mode()
    def measure(self) -> dict[str, float]:
        """Milliseconds a round: ``accept_ms``, without the call of its graph, which a decoder does not make, and
        ``call_ms`` of a graph of the same tensors that does nothing.

        Raises:
            ValueError: the replay commits other tokens than the recorded rounds did.
        """
        rounds = list(zip(*(self._replay() for _ in range(REPLAYS)), strict=True))
        accept = statistics.fmean(statistics.median(judging - call for judging, call in times) for times in rounds)
        return {
            "accept_ms": 1e3 * accept,
            "call_ms": 1e3 * statistics.median(call for times in rounds for _, call in times),
        }

    def _touch(self, tree: DraftTree, slots_S: Tensor) -> Tensor:
        """A number of each tensor that acceptance reads or writes."""
        sequences, stand = self.round.sequences, self.stand
        of_round = (sequences.length_B, sequences.live_B, sequences.root_B, sequences.count_B, sequences.fresh_BP)
        of_path = (sequences.path_BP, sequences.aux_BPNH, tree.tokens_BN, tree.parents_BN)
        of_stand = (stand.out.aux_BTNH, stand.logits_BTV, stand.bias_B1TS, stand.positions_BT)
        some = [x.flatten()[:1].sum(dtype=torch.float32) for x in (*of_round, *of_path, *of_stand)]
        return torch.stack(some) + len(slots_S)

    def _replay(self, first: bool = False) -> list[tuple[float, float]]:
        """Seconds of every round, and of a call of nothing after it; the first time it compiles."""
        times = []
        _begin(self.round, self.recorded, self.prompt)
        for one in self.recorded:
            self.draft(self.of_drafter(first))  # so that caches are no warmer than in a decoder
            self.stand.say(one)
            slots_S = self.of_target(first)
            begin = time.perf_counter()
            report = self.judge(one.tree, slots_S)
            if not self.round.in_order:
                self.tidy()
            judged = time.perf_counter()
            self.nothing(one.tree, slots_S)
            times.append((judged - begin, time.perf_counter() - judged))
            if not torch.equal(report, one.report):
                raise ValueError("acceptance measured alone commits other tokens than it did in the round")
        return times


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
