"""At a temperature."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from specdec.decoding import Sampling
from specdec.robustness.conditions.condition import Condition


@dataclass(frozen=True)
class Temperature(Condition):
    """The target's tokens are drawn at a temperature, the drafts stay the drafter's most likely (rule ``one_hot``).

    Args:
        value: of the target, above 0.
    """

    kind: ClassVar[str] = "temperature"
    group: ClassVar[str] = "temperature"
    rewrites: ClassVar[bool] = False

    value: float

    def __post_init__(self) -> None:
        if not 0 < self.value < float("inf"):
            raise ValueError(f"temperature: value must be above 0, which is the clean run, not {self.value}")

    @classmethod
    def usual(cls) -> tuple["Temperature", ...]:
        return (cls(0.6), cls(1.0))

    @property
    def title(self) -> str:
        return f"temperature {self.value:g}"

    def sampling(self, sampling: Sampling) -> Sampling:
        return dataclasses.replace(sampling, temperature=self.value)
