"""All figures of a draft shape's answers together: over all of them, by category, and by region of the answer."""

import itertools
from collections.abc import Sequence
from typing import Any

from specdec.data.regions import REGIONS, TEXT
from specdec.evaluation.metrics import (
    Answer,
    acceptance_length,
    accepted_per_position,
    committed,
    draft_acceptance_rate,
    drafts_per_pass,
    histogram,
    interval_to_json,
    looping,
    pass_time,
    position_intervals,
    rate_intervals,
    speedup,
    target_passes,
    tokens_per_second,
)


def by_category(answers: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    """Acceptance length and speed-up of every category that has an answer, JSON-ready."""
    out = {}
    for name in sorted({answer.category for answer in answers if answer.category is not None}):
        of_category = [answer for answer in answers if answer.category == name]
        out[name] = {
            **_counts(of_category),
            "acceptance_length": interval_to_json(acceptance_length(of_category)),
            **_speed(of_category),
        }
    return out


def by_region(answers: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    """Acceptance length of the passes that begin in a thought, in a tool call, in code, and in other text, with the
    share of the tokens that each has, JSON-ready; nothing where no answer has a region but text."""
    if not any(answer.regions for answer in answers):
        return {}
    tokens = sum(map(committed, answers))
    out = {}
    for name in REGIONS:
        of_region = [in_region(answer, name) for answer in answers]
        if not any(map(target_passes, of_region)):
            continue
        out[name] = {
            "prompts": len({answer.prompt_id for answer in of_region if answer.accepted}),
            "passes": sum(map(target_passes, of_region)),
            "tokens_share": sum(map(committed, of_region)) / tokens,
            "acceptance_length": interval_to_json(acceptance_length(of_region)),
        }
    return out


def in_region(answer: Answer, region: str) -> Answer:
    """Return an answer with only the passes that begin in a region."""
    regions = answer.regions or (TEXT,) * len(answer.accepted)
    inside = [place == region for place in regions]
    accepted = tuple(itertools.compress(answer.accepted, inside))
    drafted = tuple(itertools.compress(answer.drafted, inside))
    return answer._replace(accepted=accepted, drafted=drafted, regions=())


def pass_regions(accepted: Sequence[int], token_regions: Sequence[str]) -> tuple[str, ...]:
    """Return the region in which each target pass begins; nothing if all is text.

    The prompt's own pass commits the first token, so that the first pass begins at the second one. A pass that begins
    behind the last token that was kept is in that token's region.

    Args:
        accepted: drafts of each pass.
        token_regions: of every token of the answer.
    """
    if set(token_regions) <= {TEXT}:
        return ()
    last = len(token_regions) - 1
    starts = itertools.accumulate((count + 1 for count in accepted), initial=1)
    return tuple(
        token_regions[min(start, last)] for start, _ in zip(starts, accepted, strict=False)
    )


def shape_summary(name: str, config: dict[str, Any], answers: Sequence[Answer]) -> dict[str, Any]:
    """All figures of a draft shape's answers, JSON-ready; a number that was not measured is None.

    Raises:
        ValueError: the answers hold no target pass.
    """
    if not any(map(target_passes, answers)):
        raise ValueError(
            "no target pass to take statistics of: decode at least one prompt, with more new tokens"
        )
    return {
        "shape": name,
        "shape_config": config,
        **_counts(answers),
        "answers": len(answers),
        "tokens": sum(answer.tokens for answer in answers),
        "acceptance_length": interval_to_json(acceptance_length(answers)),
        "draft_acceptance_rate": interval_to_json(draft_acceptance_rate(answers)),
        "drafts_per_pass": interval_to_json(drafts_per_pass(answers)),
        "accepted_per_position": accepted_per_position(answers),
        "accepted_per_position_interval": position_intervals(answers),
        "histogram": histogram(answers),
        "tokens_per_second": tokens_per_second(answers),
        "tokens_per_second_interval": rate_intervals(answers),
        **_speed(answers),
        "pass_time": {kind: interval_to_json(times) for kind, times in pass_time(answers).items()},
        "by_category": by_category(answers),
        "by_region": by_region(answers),
        **looping(answers),
        **_identity(answers),
    }


def baseline_summary(name: str, answers: Sequence[Answer]) -> dict[str, Any]:
    """The speed of a baseline compared with plain decoding."""
    rate = tokens_per_second(answers)["speculative"]
    counts = {
        "baseline": name,
        "tokens": sum(answer.tokens for answer in answers),
        "tokens_per_second": rate,
        "tokens_per_second_interval": rate_intervals(answers)["speculative"],
    }
    return {**counts, **_speed(answers), **_identity(answers)}


def _counts(answers: Sequence[Answer]) -> dict[str, int]:
    return {
        "prompts": len({answer.prompt_id for answer in answers}),
        "passes": sum(map(target_passes, answers)),
    }


def _speed(answers: Sequence[Answer]) -> dict[str, Any]:
    ratio = speedup(answers)
    low_high = {"low": ratio.low, "high": ratio.high} if ratio else None
    return {"speedup": ratio.mean if ratio else None, "speedup_interval": low_high}


def _identity(answers: Sequence[Answer]) -> dict[str, int]:
    compared = [answer.identical for answer in answers if answer.identical is not None]
    return {"identical_outputs": sum(compared), "compared_outputs": len(compared)}
