"""With noise on the drafter's embedding input."""

from dataclasses import dataclass
from typing import ClassVar

from specdec.drafter import Drafter
from specdec.robustness.conditions.noise_hidden import NoiseHidden
from specdec.robustness.noise import NoisyEmbedding


@dataclass(frozen=True)
class NoiseEmbedding(NoiseHidden):
    """Noise on every embedding that enters a drafter's step; see :class:`specdec.robustness.noise.NoisyEmbedding`."""

    kind: ClassVar[str] = "noise_embedding"

    @property
    def title(self) -> str:
        return f"embedding + {self.alpha:g} RMS"

    def drafter(self, drafter: Drafter, seed: int) -> Drafter:
        return NoisyEmbedding(drafter, self.alpha, seed)
