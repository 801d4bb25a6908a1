"""Noise on the target's features as they enter the drafter, against the errors that its own features will bring.

Legend: B batch, T tokens, N aux layers, H hidden.
"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from specdec.data import Batch
from specdec.utils.numbers import Positive, Tokens, check_numbers


class FeatureNoise:
    """Base of the noises, in training only: a frozen spec. The target's side of every loss stays clean."""

    def __call__(self, aux_BTNH: Tensor, documents_BT: Tensor, generator: Generator) -> Tensor:
        """The features with noise, of the same shape and dtype."""
        raise TypeError(f"{type(self).__name__} must say what it adds")


@dataclass(frozen=True)
class NoNoise(FeatureNoise):
    """Features as the target gives them, as EAGLE-3 trains."""

    def __call__(self, aux_BTNH: Tensor, documents_BT: Tensor, generator: Generator) -> Tensor:
        return aux_BTNH


def _uniform(like: Tensor, generator: Generator) -> Tensor:
    """Draw numbers of (-1, 1), of shape and dtype of ``like``."""
    uniform = torch.rand(like.shape, generator=generator, device=like.device, dtype=torch.float32)
    return uniform.to(like.dtype) * 2 - 1


@dataclass(frozen=True)
class UniformNoise(FeatureNoise):
    """``U(-amplitude, amplitude)`` on every channel: EAGLE-1's paper (https://arxiv.org/abs/2401.15077)."""

    amplitude: Positive = 0.1

    def __post_init__(self) -> None:
        check_numbers(type(self), vars(self), f"{type(self).__name__}.")

    def __call__(self, aux_BTNH: Tensor, documents_BT: Tensor, generator: Generator) -> Tensor:
        return aux_BTNH + self.amplitude * _uniform(aux_BTNH, generator)


@dataclass(frozen=True)
class LengthScaledNoise(UniformNoise):
    """Uniform noise that shrinks with the text: ``amplitude * length / T``, T the tokens of the document.

    EAGLE-1's published code: 0.1 at 512 tokens.
    """

    length: Tokens = 512

    def __call__(self, aux_BTNH: Tensor, documents_BT: Tensor, generator: Generator) -> Tensor:
        sizes_BT = (documents_BT[:, :, None] == documents_BT[:, None, :]).sum(-1)
        scale_BT11 = (self.amplitude * self.length / sizes_BT)[..., None, None].to(aux_BTNH.dtype)
        return aux_BTNH + scale_BT11 * _uniform(aux_BTNH, generator)


def noisy(noise: FeatureNoise, aux_BTNH: Tensor, batch: Batch, step: int, rank: int) -> Tensor:
    """A batch's features with noise, which depends on the run's seed, step, rank and batch alone: a resumed run draws
    what the uninterrupted one would."""
    return noise(aux_BTNH, batch.documents_BT, generator_of(batch, step, rank))


def generator_of(batch: Batch, step: int, rank: int, purpose: int = 0) -> Generator:
    """Return the generator of a batch's random numbers.

    Args:
        purpose: another one draws other numbers; 0 is the noise on features.
    """
    key = (torch.initial_seed(), step, rank, int(batch.ids_BT.sum()))
    seed = hash((*key, purpose) if purpose else key)
    return Generator(batch.ids_BT.device).manual_seed(seed % 2**63)
