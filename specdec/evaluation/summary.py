"""All statistics of one growth or baseline, JSON-ready; a number that was not measured is None."""

from collections.abc import Sequence
from typing import Any

from specdec.evaluation.metrics import Group, decoding_metrics
from specdec.evaluation.record import Answer
from specdec.evaluation.statistics import Interval


def summary(growth_name: str, growth_config: dict[str, Any], answers: Sequence[Answer]) -> dict[str, Any]:
    """What the answers of a growth say.

    Raises:
        ValueError: the answers hold no target pass.
    """
    metrics = decoding_metrics(sorted({answer.category for answer in answers if answer.category is not None}))
    metrics.update(answers)
    found = metrics.compute()
    if found["acceptance_length"] is None:
        raise ValueError("no target pass to take statistics of: decode at least one prompt, with more new tokens")
    return {
        "growth": growth_name,
        "growth_config": growth_config,
        "prompts": len({answer.prompt_id for answer in answers}),
        "answers": len(answers),
        "tokens": sum(answer.tokens for answer in answers),
        "passes": sum(len(answer.accepted) for answer in answers),
        **{name: _json(found[name]) for name in _AS_FOUND},
        **_speedup(found["speedup"]),
        "speedup_per_prompt": _json(found["speedup_per_prompt"]),
        "pass_time": _json(found["pass_time"]),
        "identical_outputs": sum(answer.identical is True for answer in answers),
        "compared_outputs": sum(answer.identical is not None for answer in answers),
        "by_category": {group.name: _group(group) | _speedup(group.speedup) for group in found["by_category"]},
        "by_context": {group.name: _group(group) for group in found["by_context"]},
    }


def baseline_summary(name: str, answers: Sequence[Answer]) -> dict[str, Any]:
    """The speed of a baseline beside plain decoding."""
    metrics = decoding_metrics(only=["tokens_per_second", "speedup", "speedup_per_prompt"])
    metrics.update(answers)
    found = metrics.compute()
    return {
        "baseline": name,
        "tokens": sum(answer.tokens for answer in answers),
        "tokens_per_second": found["tokens_per_second"].speculative,
        **_speedup(found["speedup"]),
        "speedup_per_prompt": _json(found["speedup_per_prompt"]),
        "identical_outputs": sum(answer.identical is True for answer in answers),
        "compared_outputs": sum(answer.identical is not None for answer in answers),
    }


_AS_FOUND = (
    "acceptance_length", "accepted_drafts", "draft_acceptance_rate", "accepted_per_position", "histogram",
    "tokens_per_second",
)  # fmt: skip


def _json(value: Any) -> Any:
    """Named tuples as objects, and what is in them."""
    return {name: _json(item) for name, item in value._asdict().items()} if hasattr(value, "_asdict") else value


def _speedup(found: Interval | None) -> dict[str, Any]:
    low_high = {"low": found.low, "high": found.high} if found else None
    return {"speedup": found.mean if found else None, "speedup_interval": low_high}


def _group(group: Group) -> dict[str, Any]:
    return {"prompts": group.prompts, "passes": group.passes, "acceptance_length": _json(group.acceptance_length)}
