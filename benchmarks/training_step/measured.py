"""One measurement and its figures."""

import statistics
from dataclasses import dataclass, field
from typing import Any

from benchmarks.serving import OTHERS
from benchmarks.training_step.systems import Entry


@dataclass
class Measured:
    """What a worker said."""

    entry: Entry
    about: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)  # of the first step
    warm_up: list[dict[str, float]] = field(default_factory=list)
    steps: list[dict[str, float]] = field(default_factory=list)

    @property
    def trainable(self) -> int:
        """Parameters trained."""
        return self.about["trainable"]

    @property
    def digest(self) -> list[float]:
        """Of weights and data."""
        return self.about["digest"]

    @property
    def seconds(self) -> list[float]:
        """Wall time of the measured steps."""
        return [step["seconds"] for step in self.steps]

    @property
    def median(self) -> float:
        """Of the seconds."""
        return statistics.median(self.seconds)

    @property
    def growth(self) -> float:
        """Peak resident set of all steps, warm-up included, less the resident set before the first; MB."""
        return max(step["peak_mb"] for step in self.warm_up + self.steps) - self.warm_up[0]["before_mb"]

    @property
    def growth_after(self) -> float:
        """The same without the peaks of warm-up, in which some compile."""
        return max(step["peak_mb"] for step in self.steps) - self.warm_up[0]["before_mb"]

    @property
    def disturbed(self) -> int:
        """Measured steps during which others used more than ``OTHERS`` of the machine."""
        return sum(step["others"] > OTHERS for step in self.steps)

    def to_json(self) -> dict[str, Any]:
        """Everything, with raw step times."""
        about = {name: value for name, value in self.about.items() if name != "digest"}
        return {
            **self.entry._asdict(),
            **about,
            "median_seconds": self.median,
            "growth_mb": self.growth,
            "growth_after_warm_up_mb": self.growth_after,
            "losses": self.losses,
            "warm_up": self.warm_up,
            "steps": self.steps,
        }
