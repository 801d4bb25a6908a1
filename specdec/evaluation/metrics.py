"""Decoded answers and what they say: the figures of ``metrics.json``, which ``docs/metrics.md`` defines.

A figure is a function of answers. Where it has an interval it is a statistic of sums over prompts, in an order that
depends on the prompts' ids alone; times are summed in whole nanoseconds, so that the order of answers changes nothing.

Legend: P prompts, F sums of each.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specdec.data.rows import read_text
from specdec.report.statistics import LENGTH, POSITIVE, SHARE, Array, Interval, Range, interval
from specdec.report.tables import LOOPING_SHARE
from specdec.utils.files import write_text


class Answer(NamedTuple):
    """One turn of one prompt, decoded with one draft shape and, for comparison, plainly.

    Each target pass commits ``accepted + 1`` tokens: the accepted drafts and the target's own (bonus) token. The
    last pass may commit more than was kept, so ``tokens`` can be smaller than the sum over the passes.
    """

    prompt_id: str
    category: str | None
    tokens: int  # new ones, kept
    accepted: tuple[int, ...]  # drafts per target pass, the bonus token excluded
    drafted: tuple[int, ...]  # longest path of what was proposed, per target pass
    seconds: float
    plain_seconds: float  # 0 where plain decoding was not measured
    plain_tokens: int
    # whether both outputs are the same tokens; None where that was not compared
    identical: bool | None
    # milliseconds of drafting for each target pass; empty where not recorded
    draft_ms: tuple[float, ...] = ()
    verify_ms: tuple[float, ...] = ()  # of each target pass with its acceptance; likewise
    loops: bool = False  # whether the answer repeats itself, see :func:`loops`
    # where each target pass begins: in a thought, a tool call, code or other text; empty if all is text
    regions: tuple[str, ...] = ()

    @classmethod
    def read(cls, columns: Mapping[str, Any]) -> "Answer":
        """An answer from JSON, which has lists in place of tuples; TypeError if it is none."""
        values: Any = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in columns.items()
        }
        return cls(**values)


METRICS = "metrics.json"
LOOP_TOKENS = 24  # that are copies of what stood a period before, at least
LOOP_PART = 0.25  # of an answer that goes on after its loop, at least


def loops(ids: Sequence[int]) -> bool:
    """Whether a text has run into a loop: at least :data:`LOOP_TOKENS` tokens and at least two periods, each equal to
    the token one period before, up to the end of the text or over :data:`LOOP_PART` of it. Such text is easy to draft,
    which flatters acceptance. A sum of equal terms in the midst of an answer is none."""
    ids_T = np.asarray(ids)
    for period in range(1, len(ids) // 3 + 1):
        new = np.flatnonzero(ids_T[period:] != ids_T[:-period])  # between them run the copies
        copies = np.diff(new, prepend=-1, append=len(ids) - period) - 1
        least = max(LOOP_TOKENS, 2 * period)
        if copies[-1] >= least or copies.max() >= max(least, LOOP_PART * len(ids)):
            return True
    return False


def write_answers(
    path: Path | str, shapes: Sequence[str], answers: Sequence[Sequence[Answer]]
) -> None:
    """Write the answers of every draft shape, one a line, whole or not at all."""
    rows = [
        {"result": index, "shape": shape, **answer._asdict()}
        for index, (shape, of_shape) in enumerate(zip(shapes, answers, strict=True))
        for answer in of_shape
    ]
    write_text(
        path, "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    )


def read_answers(path: Path | str, shapes: int) -> list[list[Answer]]:
    """Read what :func:`write_answers` wrote: the answers of each of this many shapes, in their order.

    Raises:
        ValueError: the file cannot be read, or a line of it is no answer; the message names the line.
    """
    out: list[list[Answer]] = [[] for _ in range(shapes)]
    for number, line in enumerate(read_text(Path(path)).split("\n"), start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
            result = out[row.pop("result")]
            row.pop("shape", None)
            result.append(Answer.read(row))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number}: not an answer of specdec evaluate: {error!r}"
            ) from error
    return out


def per_prompt(
    answers: Sequence[Answer], *of: Callable[[Answer], float], prompts: Collection[str] = ()
) -> Array:
    """Sum what ``of`` give for each answer over each prompt, (P, F); ``prompts`` have a row in any case."""
    sums = {
        prompt_id: np.zeros(len(of))
        for prompt_id in {*prompts, *(answer.prompt_id for answer in answers)}
    }
    for answer in answers:
        sums[answer.prompt_id] += [number(answer) for number in of]
    # an order that has nothing to do with the answers, the same on every process
    order = sorted(
        sums,
        key=lambda name: int.from_bytes(
            hashlib.blake2b(name.encode(), digest_size=8).digest(), signed=True
        ),
    )
    return np.array([sums[name] for name in order]).reshape(-1, len(of))


def committed(answer: Answer) -> int:
    """Tokens that an answer's target passes committed, bonus tokens included."""
    return sum(answer.accepted) + len(answer.accepted)


def target_passes(answer: Answer) -> int:
    """Target passes of an answer."""
    return len(answer.accepted)


def looping(answers: Sequence[Answer]) -> dict[str, Any]:
    """How many answers repeat themselves and which share that is, with the acceptance lengths of these and of all
    others, JSON-ready."""
    flagged = [answer for answer in answers if answer.loops]
    others = [answer for answer in answers if not answer.loops]
    return {
        "looping_answers": len(flagged),
        "looping_share": len(flagged) / len(answers) if answers else None,
        "acceptance_length_looping": interval_to_json(acceptance_length(flagged)),
        "acceptance_length_without_looping": interval_to_json(acceptance_length(others)),
    }


def answer_warnings(
    what: str, figures: Mapping[str, Any], least: float = LOOPING_SHARE
) -> list[str]:
    """Return lines about ``what``: that no draft was accepted, and that many of its answers repeat themselves.

    Args:
        figures: those of :func:`looping` and ``acceptance_length`` among them.
        least: the share of answers from which on the second line is due.
    """
    accepted = figures["acceptance_length"]
    lines = []
    if accepted is not None and accepted["mean"] == 1:
        lines.append(
            f"{what}: the target accepted no draft, so this says nothing about the drafter's quality "
            "(docs/troubleshooting.md)"
        )
    if not figures["looping_answers"] or figures["looping_share"] < least:
        return lines
    names = ("acceptance_length", "acceptance_length_without_looping")
    length, without = (
        f"{figures[name]['mean']:.2f}" if figures[name] else "of no answer" for name in names
    )
    return [
        *lines,
        f"{what}: {figures['looping_share']:.0%} of the answers repeat themselves, which is easy to draft: acceptance "
        f"length {length}, without them {without}",
    ]


def _pooled(
    answers: Sequence[Answer], part: Callable[[Answer], float], of: Callable[[Answer], float], bounds: Range,
    scale: float = 1,
) -> Interval | None:  # fmt: skip
    """Return sum(part) / sum(of) over prompts, with its interval; prompts whose ``of`` is 0 are left out."""
    sums_P2 = per_prompt(answers, part, of)
    return interval(sums_P2[sums_P2[:, 1] > 0] / (scale, 1), bounds=bounds)


def acceptance_length(answers: Sequence[Answer]) -> Interval | None:
    """Tokens committed per target pass, bonus token included, pooled over passes."""
    return _pooled(answers, committed, target_passes, LENGTH)


def draft_acceptance_rate(answers: Sequence[Answer]) -> Interval | None:
    """Drafts accepted over those of every pass's longest path."""
    return _pooled(
        answers, lambda answer: sum(answer.accepted), lambda answer: sum(answer.drafted), SHARE
    )


def drafts_per_pass(answers: Sequence[Answer]) -> Interval | None:
    """Drafts of the longest path per target pass; a chain whose length is fixed has that length."""
    return _pooled(answers, lambda answer: sum(answer.drafted), target_passes, POSITIVE)


def histogram(answers: Sequence[Answer]) -> list[int]:
    """Number of target passes by accepted drafts: 0, 1, ..., the deepest draft."""
    counts = Counter(count for answer in answers for count in answer.accepted)
    deepest = max((depth for answer in answers for depth in answer.drafted), default=0)
    return [counts[k] for k in range(deepest + 1)]


def accepted_per_position(answers: Sequence[Answer]) -> dict[str, list[Any]]:
    """For draft positions k = 1, 2, ...: which share of passes accepted at least k drafts (``joint``), and which share
    of those that accepted k - 1 and whose longest path has k (``conditional``). Acceptance length is 1 plus the sum of
    the joint ones."""
    passes = sum(map(target_passes, answers))
    positions = range(1, len(histogram(answers)) if passes else 1)
    taken = [sum(map(passes_reaching(k), answers)) for k in positions]
    judged = [sum(map(_judged(k), answers)) for k in positions]
    return {
        "joint": [count / passes for count in taken],
        "conditional": [
            count / tries if tries else None for count, tries in zip(taken, judged, strict=True)
        ],
    }


def passes_reaching(k: int) -> Callable[[Answer], int]:
    """Return what counts an answer's passes that accepted at least k drafts."""
    return lambda answer: sum(count >= k for count in answer.accepted)


def _judged(k: int) -> Callable[[Answer], int]:
    """Return what counts an answer's passes that accepted k - 1 drafts at least, and whose longest path has k."""
    return lambda answer: sum(
        count >= k - 1 and depth >= k
        for count, depth in zip(answer.accepted, answer.drafted, strict=True)
    )


def position_intervals(answers: Sequence[Answer]) -> dict[str, list[dict[str, float | None]]]:
    """Return the 95 % intervals of :func:`accepted_per_position`, as ``low`` and ``high`` of every position."""
    deepest = len(histogram(answers)) - 1

    def ends(k: int, of: Callable[[Answer], int]) -> dict[str, float | None]:
        share = _pooled(answers, passes_reaching(k), of, SHARE)
        return {"low": share.low, "high": share.high} if share else {"low": None, "high": None}

    positions = range(1, deepest + 1 if any(map(target_passes, answers)) else 1)
    return {
        "joint": [ends(k, target_passes) for k in positions],
        "conditional": [ends(k, _judged(k)) for k in positions],
    }


def _both_ways(answers: Sequence[Answer]) -> Array:
    """Tokens, nanoseconds and both of plain decoding, of every prompt, (P, 4)."""
    return per_prompt(
        answers, lambda answer: answer.tokens, lambda answer: round(answer.seconds * 1e9),
        lambda answer: answer.plain_tokens, lambda answer: round(answer.plain_seconds * 1e9),
    )  # fmt: skip


def tokens_per_second(answers: Sequence[Answer]) -> dict[str, float | None]:
    """All tokens over all seconds, of speculative and of plain decoding."""
    drafted, drafted_ns, plain, plain_ns = _both_ways(answers).sum(0).tolist()
    rates = {"speculative": (drafted, drafted_ns), "plain": (plain, plain_ns)}
    return {kind: tokens / (ns / 1e9) if ns else None for kind, (tokens, ns) in rates.items()}


def rate_intervals(answers: Sequence[Answer]) -> dict[str, dict[str, float | None]]:
    """Return the 95 % intervals of :func:`tokens_per_second`, as ``low`` and ``high`` of either."""
    sums_P4 = _both_ways(answers) / (1, 1e9, 1, 1e9)
    out = {}
    for kind, sums_P2 in (("speculative", sums_P4[:, :2]), ("plain", sums_P4[:, 2:])):
        rate = interval(sums_P2[sums_P2[:, 1] > 0], bounds=POSITIVE)
        out[kind] = {"low": rate.low if rate else None, "high": rate.high if rate else None}
    return out


def speedup(answers: Sequence[Answer]) -> Interval | None:
    """Ratio of the two pooled rates, of prompts decoded both ways."""
    sums_P4 = _both_ways(answers)
    both_P4 = sums_P4[(sums_P4 > 0).all(1)]
    return interval(
        both_P4,
        lambda sums: (sums[..., 0] * sums[..., 3]) / (sums[..., 1] * sums[..., 2]),
        POSITIVE,
    )


def pass_time(answers: Sequence[Answer]) -> dict[str, Interval | None]:
    """Milliseconds of drafting and of verification per target pass, of the passes that recorded them."""

    def mean(times: Callable[[Answer], Sequence[float]]) -> Interval | None:
        def nanoseconds(answer: Answer) -> int:
            return sum(round(ms * 1e6) for ms in times(answer))

        return _pooled(answers, nanoseconds, lambda answer: len(times(answer)), POSITIVE, 1e6)

    return {
        "draft_ms": mean(lambda answer: answer.draft_ms),
        "verify_ms": mean(lambda answer: answer.verify_ms),
    }


def interval_to_json(figure: Interval | None) -> dict[str, Any] | None:
    """Return a figure's ``mean``, ``low`` and ``high``; None stays None."""
    return figure._asdict() if figure else None
