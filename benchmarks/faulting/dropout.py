"""Noise that draws from torch's global generator, as a part of a user's may."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from specdec.training.noise import Noise


@dataclass(frozen=True)
class Dropout(Noise):
    """Drops a tenth of the channels."""

    p: float = 0.1

    def __call__(self, aux_BTNH: Tensor, documents_BT: Tensor, generator: Generator) -> Tensor:
        """The features, some of them zero."""
        return torch.nn.functional.dropout(aux_BTNH, self.p)
