"""With noise on the drafter's hidden input."""

from dataclasses import dataclass
from typing import ClassVar

from specdec.drafter import Drafter
from specdec.robustness.conditions.condition import Condition
from specdec.robustness.noise import NoisyHidden


@dataclass(frozen=True)
class NoiseHidden(Condition):
    """Noise on every feature that enters a drafter's step; see :class:`specdec.robustness.noise.NoisyHidden`.

    Args:
        alpha: standard deviation, in units of the feature's RMS.
    """

    kind: ClassVar[str] = "noise_hidden"
    group: ClassVar[str] = "noise on the drafter's input"
    rewrites: ClassVar[bool] = False

    alpha: float

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < float("inf"):
            raise ValueError(f"{self.kind}: alpha must not be negative, it is {self.alpha}")

    @classmethod
    def usual(cls) -> tuple["NoiseHidden", ...]:
        return (cls(0.1), cls(0.5), cls(1.0))

    @property
    def title(self) -> str:
        return f"hidden + {self.alpha:g} RMS"

    def drafter(self, drafter: Drafter, seed: int) -> Drafter:
        return NoisyHidden(drafter, self.alpha, seed)
