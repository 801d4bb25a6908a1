"""The fourth way: a real engine's passes, each beside what the drafter would have had accepted at its place.

A pass that begins with n tokens of the answer known drafts the next K. What a drafter says there does not depend on
the passes before, only on the text; so that one pass that rounding decides leaves the others comparable.

Legend: A passes, K drafts, T tokens, V target vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.decoding import PlainDecoder
from specdec.drafter import Drafter
from specdec.parity.asked import Answer
from specdec.parity.ours import cached
from specdec.parity.texts import Text
from specdec.target import Target

BY_CHANCE = 1e-4


class Position(NamedTuple):
    """All passes at one draft position."""

    position: int
    """From 1."""
    passes: int
    accepted: int
    """By the engine's counter."""
    expected: int
    """Passes at which this drafter, at the same places of the same answers, has as many drafts accepted."""
    rounding: int
    """Passes that first differ here, where its two candidates are within rounding of each other."""
    different: int
    """Passes that first differ here, where they are not."""

    @property
    def verdict(self) -> str:
        """``equal``, or what differs."""
        if self.different:
            return f"DIFFERENT in {self.different}"
        return f"equal but for rounding in {self.rounding}" if self.rounding else "equal"


class Engine(NamedTuple):
    """A real engine's answers."""

    positions: list[Position]
    tokens: int
    """Of all answers."""
    rounding: int
    """Of them, those that are not the target's best token, but within rounding of it."""
    different: int
    """Those that are neither: the engine runs another target."""
    fewer: int
    """Passes that rounding decides and in which the engine accepts fewer drafts."""

    @property
    def chance(self) -> float:
        """The p-value of so many, as chance takes close drafts either way: a sign test over these passes."""
        n = sum(one.rounding for one in self.positions)
        most = max(self.fewer, n - self.fewer)
        return min(1.0, 2 * sum(math.comb(n, k) for k in range(most, n + 1)) / 2**n)

    @property
    def holds(self) -> bool:
        """Whether the engine accepts what it should, everywhere."""
        return self.different == 0 and all(one.different == 0 for one in self.positions) and self.chance >= BY_CHANCE

    def told(self) -> dict[str, Any]:
        """JSON-ready."""
        positions = [{**one._asdict(), "verdict": one.verdict} for one in self.positions]
        return {**self._asdict(), "positions": positions, "chance": self.chance, "holds": self.holds}


@torch.no_grad()
def compare_passes(
    target: Target,
    drafter: Drafter,
    answers: Sequence[Answer],
    share: float,
    on_text: Callable[[str], None] = lambda what: None,
) -> Engine:
    """Compare every pass of every answer.

    Args:
        drafter: in the target's dtype, on its device.
        share: of a law's range, that rounding may make of one log-probability.

    Raises:
        ValueError: an answer leaves no room for the drafts behind it.
    """
    allowed = 2 * share  # each of two candidates has an error of its own
    depth = len(answers[0].accepted_at)
    expected, rounding, different = ([0] * depth for _ in range(3))
    passes = tokens = fewer = 0
    parted = torch.zeros(2, dtype=torch.int64)
    for number, answer in enumerate(answers):
        on_text(f"answer {number + 1} of {len(answers)}")
        known = [*answer.prompt, *answer.ids]
        text = Text([*known, *PlainDecoder(target).generate(known, depth).ids], len(answer.prompt))
        short, lead = _of_target(target, text)
        short = short[: len(answer.ids)]
        tokens, passes = tokens + len(answer.ids), passes + len(answer.known)
        parted += torch.stack([((short > 0) & (short <= allowed)).sum(), (short > allowed).sum()]).cpu()
        predicted, doubt_AK = _predicted(target, drafter, text, answer.known, depth)
        lead[: len(answer.ids)] = torch.inf  # what vLLM wrote is certain; behind that a target's own tie counts, too
        behind_AK = torch.tensor([[n + k for k in range(depth)] for n in answer.known], device=lead.device)
        doubt_AK = torch.minimum(doubt_AK, lead[behind_AK].to(doubt_AK))
        for ours, theirs, doubt_K in zip(predicted, answer.accepted, doubt_AK.tolist(), strict=True):
            for k in range(ours):
                expected[k] += 1
            if ours != theirs:
                k = min(ours, theirs)
                close = doubt_K[k] <= allowed
                (rounding if close else different)[k] += 1
                fewer += close and theirs < ours
    accepted = [sum(counts) for counts in zip(*(answer.accepted_at for answer in answers), strict=True)]
    columns = zip(accepted, expected, rounding, different, strict=True)
    positions = [Position(k, passes, *counts) for k, counts in enumerate(columns, 1)]
    close, wrong = parted.tolist()
    return Engine(positions, tokens, close, wrong, fewer)


def _predicted(
    target: Target, drafter: Drafter, text: Text, known: Sequence[int], depth: int
) -> tuple[list[int], Tensor]:
    """Drafts accepted in each pass; and (A, K) how far it is from accepting another number there."""
    anchors = [text.prompt + n - 2 for n in known]
    laws_AKV = cached(target, drafter, text, anchors, depth - 1).log_probs_AKV
    due = [text.ids[text.prompt + n : text.prompt + n + depth] for n in known]
    due_AK = torch.tensor(due, device=laws_AKV.device)
    two_AK2 = laws_AKV.topk(2).values
    short_AK = _share(laws_AKV, due_AK)
    hit_AK = short_AK == 0
    lead_AK = (two_AK2[..., 0] - two_AK2[..., 1]) / _range(laws_AKV)
    return hit_AK.cumprod(1).sum(1).tolist(), torch.where(hit_AK, lead_AK, short_AK)


def _of_target(target: Target, text: Text) -> tuple[Tensor, Tensor]:
    """(T,) how far each token behind the prompt is from being the target's best; and how far that is from the next."""
    ids_1T = torch.tensor([text.ids], device=target.device)
    logits_TV = target.model(input_ids=ids_1T, use_cache=False).logits[0, text.prompt - 1 : -1]
    two_T2 = logits_TV.topk(2).values
    return _share(logits_TV, ids_1T[0, text.prompt :]), (two_T2[:, 0] - two_T2[:, 1]) / _range(logits_TV)


def _share(scores: Tensor, due: Tensor) -> Tensor:
    """What a token lacks of the best one's score, as a share of the scores' range; infinite where it has none."""
    return (scores.amax(-1) - scores.gather(-1, due[..., None])[..., 0]) / _range(scores)


def _range(scores: Tensor) -> Tensor:
    known = scores.where(scores.isfinite(), scores.amax(-1, keepdim=True))
    return (known.amax(-1) - known.amin(-1)).clamp_min(1e-30)
