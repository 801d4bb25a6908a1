"""Measures a drafter with another attention window and other sinks than its own, without training."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

OVERRIDABLE = ("attention_window", "attention_sinks")  # of a drafter's config


class Override(NamedTuple):
    """Attention window and sinks that a measurement puts in place of a drafter's own; None keeps the drafter's."""

    window: int | Literal["full"] | None = None
    sinks: int | None = None


AS_SAVED = Override()


def override_notes(drafters: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say of every drafter that was measured with another attention window than its own, from its facts."""
    notes = [
        f"{facts['label']}: measured with {_attention(facts)}, in place of its own ({_attention(facts['overridden'])})."
        for facts in drafters
        if facts.get("overridden")
    ]
    return list(dict.fromkeys(notes))


def _attention(values: Mapping[str, Any]) -> str:
    return " and ".join(f"{name} {values[name]}" for name in OVERRIDABLE)
