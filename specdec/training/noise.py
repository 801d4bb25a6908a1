"""Noise on the drafter's input features in training, against the errors that its own features will bring.

Legend: B batch, T tokens, N aux layers, H hidden.
"""

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from specdec.data.batch import PAD_DOCUMENT, Batch
from specdec.drafter.parts import class_path


class Noise:
    """Base of the noises: a frozen spec. The target's side of every loss stays clean."""

    def __call__(self, aux_BTNH: Tensor, documents_BT: Tensor, generator: Generator) -> Tensor:
        """The features with noise, of the same shape and dtype."""
        raise TypeError(f"{type(self).__name__} must say what it adds")


@dataclass(frozen=True)
class NoNoise(Noise):
    """Features as the target gives them, as EAGLE-3 trains."""

    def __call__(self, aux_BTNH: Tensor, documents_BT: Tensor, generator: Generator) -> Tensor:
        """The features themselves."""
        return aux_BTNH


def _uniform(like: Tensor, generator: Generator) -> Tensor:
    """Of (-1, 1), as ``like``."""
    return torch.rand(like.shape, generator=generator, device=like.device, dtype=torch.float32).to(like.dtype) * 2 - 1


@dataclass(frozen=True)
class UniformNoise(Noise):
    """``U(-amplitude, amplitude)`` on every channel: EAGLE-1's paper (https://arxiv.org/abs/2401.15077)."""

    amplitude: float = 0.1

    def __post_init__(self) -> None:
        _positive("UniformNoise.amplitude", self.amplitude)

    def __call__(self, aux_BTNH: Tensor, documents_BT: Tensor, generator: Generator) -> Tensor:
        """Features plus noise."""
        return aux_BTNH + self.amplitude * _uniform(aux_BTNH, generator)


@dataclass(frozen=True)
class LengthScaledNoise(Noise):
    """Uniform noise that shrinks with the text: ``amplitude * length / T``, T the tokens of the document.

    EAGLE-1's published code: 0.1 at 512 tokens.
    """

    amplitude: float = 0.1
    length: int = 512

    def __post_init__(self) -> None:
        _positive("LengthScaledNoise.amplitude", self.amplitude)
        _positive("LengthScaledNoise.length", self.length)

    def __call__(self, aux_BTNH: Tensor, documents_BT: Tensor, generator: Generator) -> Tensor:
        """Features plus noise."""
        sizes_BT = (documents_BT[:, :, None] == documents_BT[:, None, :]).sum(-1)
        scale_BT11 = (self.amplitude * self.length / sizes_BT)[..., None, None].to(aux_BTNH.dtype)
        return aux_BTNH + scale_BT11 * _uniform(aux_BTNH, generator)


@dataclass(frozen=True)
class GaussianNoise(Noise):
    """Normal noise of one standard deviation on every channel."""

    std: float = 0.05

    def __post_init__(self) -> None:
        _positive("GaussianNoise.std", self.std)

    def __call__(self, aux_BTNH: Tensor, documents_BT: Tensor, generator: Generator) -> Tensor:
        """Features plus noise."""
        normal = torch.randn(aux_BTNH.shape, generator=generator, device=aux_BTNH.device, dtype=torch.float32)
        return aux_BTNH + self.std * normal.to(aux_BTNH.dtype)


@torch.no_grad()
def try_noise(noise: Noise, N: int, H: int) -> None:
    """Add it to the features of a few tokens, with padding beside them and in two dtypes, before anything is trained.

    Args:
        N: the drafter's aux layers.
        H: the target's hidden size.

    Raises:
        ValueError: it fails, changes the features themselves, or does not return finite ones of the same shape and
            dtype; the message names it.
    """
    name = f"noise {class_path(noise)}"
    documents_BT = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, PAD_DOCUMENT, PAD_DOCUMENT]])
    for dtype in (torch.float32, torch.bfloat16):
        aux_BTNH = torch.linspace(-1, 1, 2 * 5 * N * H).view(2, 5, N, H).to(dtype)
        given = aux_BTNH.clone()
        try:
            with torch.random.fork_rng(devices=[]):
                noisy = noise(given, documents_BT, Generator().manual_seed(0))
        except (RuntimeError, TypeError, IndexError, AttributeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(f"{name} fails on features of shape {tuple(given.shape)}, {dtype}: {reason}") from error
        found = f"{tuple(noisy.shape)}, {noisy.dtype}" if isinstance(noisy, Tensor) else f"a {type(noisy).__name__}"
        if not isinstance(noisy, Tensor) or noisy.shape != given.shape or noisy.dtype != dtype:
            raise ValueError(
                f"{name} returned {found} for features of shape {tuple(given.shape)}, {dtype}: keep shape and dtype"
            )
        if not noisy.isfinite().all():
            raise ValueError(f"{name} returned NaN or infinity for ordinary features")
        if not torch.equal(given, aux_BTNH):
            raise ValueError(f"{name} changed the target's features in place: return new ones")


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, not {value}; for none at all use NoNoise")


def batch_generator(batch: Batch, step: int, rank: int) -> Generator:
    """Randomness of one batch of one step on one rank: a resumed run draws what the uninterrupted one would."""
    seed = hash((torch.initial_seed(), step, rank, int(batch.ids_BT.sum())))
    return Generator(batch.ids_BT.device).manual_seed(seed % 2**63)
