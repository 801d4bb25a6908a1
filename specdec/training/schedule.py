"""Learning-rate schedules that know the run's length."""

import math
from dataclasses import dataclass

from specdec.training import divergences  # noqa: F401  configs name its losses
from specdec.utils.numbers import Share, check_numbers


class Schedule:
    """Base of the schedules that know the run's length: a frozen dataclass."""

    def factor(self, step: int, total: int) -> float:
        """Share of the peak learning rate at optimizer step ``step`` of ``total``."""
        raise TypeError(f"{type(self).__name__} must say its factor")


@dataclass(frozen=True)
class WarmupCosine(Schedule):
    """Linear warm-up, then half a cosine down to a fraction of the peak.

    Args:
        warmup: share of all steps spent warming up.
        floor: last learning rate as a share of the peak.
    """

    warmup: Share = 0.03
    floor: Share = 0.0

    def __post_init__(self) -> None:
        check_numbers(WarmupCosine, vars(self), "schedule.")
        if self.warmup == 1:
            raise ValueError(
                "schedule.warmup must be below 1, not 1: nothing would be left to train at the full rate"
            )

    def factor(self, step: int, total: int) -> float:
        """Share of the peak learning rate at optimizer step ``step`` of ``total``."""
        warm = max(1, round(self.warmup * total))
        if step < warm:
            return (step + 1) / warm
        done = min(1.0, (step - warm) / max(1, total - warm))
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done))
