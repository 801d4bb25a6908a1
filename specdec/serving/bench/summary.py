"""A level in numbers, JSON-ready."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from specdec.serving.bench.load import Level


def told(level: Level) -> dict[str, Any]:
    """Speed, latency and acceptance; docs/serve.md says what each is."""
    answers = level.answers
    return {
        "requests": len(answers),
        "tokens": _tokens(level),
        "seconds": level.seconds,
        "tokens_per_second": _speeds(level),
        "first_token_seconds": _spread([one.first for one in answers]),
        "inter_token_seconds": _spread(
            [(one.seconds - one.first) / (one.tokens - 1) for one in answers if one.tokens > 1]
        ),
        "acceptance": level.counted.told(),
        "answers": [
            {"prompt_id": one.prompt_id, "tokens": one.tokens, "first": one.first, "seconds": one.seconds}
            for one in answers
        ],
    }


def against(level: Level, baseline: Level, same_text: bool) -> dict[str, Any]:
    """What a drafter brings: ratios to the same requests without it, above 1 where it is better.

    Args:
        same_text: whether both must give the same answers, as they must where nothing is drawn.
    """
    ours, theirs = _speeds(level), _speeds(baseline)
    pairs = list(zip(level.answers, baseline.answers, strict=True)) if same_text else []
    return {
        **{name: ours[name] / theirs[name] for name in ours},
        "identical_outputs": sum(a.text == b.text for a, b in pairs),
        "compared_outputs": len(pairs),
    }


def _tokens(level: Level) -> int:
    return sum(one.tokens for one in level.answers)


def _speeds(level: Level) -> dict[str, float]:
    tokens, waited = _tokens(level), sum(one.seconds for one in level.answers)
    return {"user": tokens / waited, "total": tokens / level.seconds}


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    median, high = np.quantile(values, (0.5, 0.95))
    return {"median": float(median), "p95": float(high)}
