"""What a recipe says beside loss and optimizer: the learning rate over a run, and noise on the drafter's features.

Legend: B batch, T tokens, N aux layers, H hidden.
"""

import math
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from torch import Generator, Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from specdec.data import Batch, TokenData


@dataclass(frozen=True)
class WarmupCosine:
    """Linear warm-up, then half a cosine down to a fraction of the peak.

    Args:
        warmup: share of all steps spent warming up.
        floor: last learning rate as a share of the peak.
    """

    warmup: float = 0.03
    floor: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < 1 or not 0 <= self.floor <= 1:
            raise ValueError(
                f"schedule: warmup must lie in [0, 1) and floor in [0, 1], not {self.warmup}, {self.floor}"
            )

    def factor(self, step: int, total: int) -> float:
        """Share of the peak learning rate at optimizer step ``step`` of ``total``."""
        warm = max(1, round(self.warmup * total))
        if step < warm:
            return (step + 1) / warm
        done = min(1.0, (step - warm) / max(1, total - warm))
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done))

    def build(self, optimizer: Optimizer, total: int) -> LambdaLR:
        """A torch scheduler to be stepped after every optimizer step."""
        return LambdaLR(optimizer, lambda step: self.factor(step, total))


def total_steps(trainer: pl.Trainer) -> int:
    """Optimizer steps of the whole run; ValueError if neither steps nor epochs are set."""
    # not trainer.estimated_stepping_batches, which loses the loader's state in a resumed run
    if trainer.max_steps > 0:
        return trainer.max_steps
    if not trainer.max_epochs or trainer.max_epochs < 0:
        raise ValueError("the learning rate's schedule needs the run's length: set trainer.max_steps or max_epochs")
    batches, limit = len(trainer.datamodule.train_dataloader()), trainer.limit_train_batches  # type: ignore[attr-defined]
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    return max(1, -(-batches // trainer.accumulate_grad_batches)) * trainer.max_epochs


def check_rows(trainer: pl.Trainer, data: TokenData, first_rows: int | None) -> None:
    """Refuse, before the first step, a run that draws more training rows than its features have.

    Args:
        first_rows: how many of the rows that the first epoch draws first have features; None: all.

    Raises:
        ValueError: the run draws more; the message says how many.
    """
    if first_rows is None or trainer.state.fn != "fit":
        return
    drawn = total_steps(trainer) * trainer.accumulate_grad_batches * data.batch_size * trainer.world_size
    drawn = min(drawn, len(data.splits.train.ids_BT))
    if drawn > first_rows:
        raise ValueError(
            f"the cache of features has the first {first_rows:,} training rows alone, fewer than this run draws: run "
            f"specdec cache with --first_rows {drawn}, into another directory"
        )


class FeatureNoise:
    """Base of the noises on the drafter's input features in training, against the errors that its own features will
    bring: a frozen spec. The target's side of every loss stays clean."""

    def __call__(self, aux_BTNH: Tensor, documents_BT: Tensor, generator: Generator) -> Tensor:
        """The features with noise, of the same shape and dtype."""
        raise TypeError(f"{type(self).__name__} must say what it adds")


@dataclass(frozen=True)
class NoNoise(FeatureNoise):
    """Features as the target gives them, as EAGLE-3 trains."""

    def __call__(self, aux_BTNH: Tensor, documents_BT: Tensor, generator: Generator) -> Tensor:
        return aux_BTNH


class _Positive(FeatureNoise):
    """Every number of such a noise is positive."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < math.inf:
                raise ValueError(
                    f"{type(self).__name__}.{name} must be positive and finite, not {value}; for none at all use "
                    "NoNoise"
                )


def _uniform(like: Tensor, generator: Generator) -> Tensor:
    """Of (-1, 1), as ``like``."""
    return torch.rand(like.shape, generator=generator, device=like.device, dtype=torch.float32).to(like.dtype) * 2 - 1


@dataclass(frozen=True)
class UniformNoise(_Positive):
    """``U(-amplitude, amplitude)`` on every channel: EAGLE-1's paper (https://arxiv.org/abs/2401.15077)."""

    amplitude: float = 0.1

    def __call__(self, aux_BTNH: Tensor, documents_BT: Tensor, generator: Generator) -> Tensor:
        return aux_BTNH + self.amplitude * _uniform(aux_BTNH, generator)


@dataclass(frozen=True)
class LengthScaledNoise(_Positive):
    """Uniform noise that shrinks with the text: ``amplitude * length / T``, T the tokens of the document.

    EAGLE-1's published code: 0.1 at 512 tokens.
    """

    amplitude: float = 0.1
    length: int = 512

    def __call__(self, aux_BTNH: Tensor, documents_BT: Tensor, generator: Generator) -> Tensor:
        sizes_BT = (documents_BT[:, :, None] == documents_BT[:, None, :]).sum(-1)
        scale_BT11 = (self.amplitude * self.length / sizes_BT)[..., None, None].to(aux_BTNH.dtype)
        return aux_BTNH + scale_BT11 * _uniform(aux_BTNH, generator)


def noisy(noise: FeatureNoise, aux_BTNH: Tensor, batch: Batch, step: int, rank: int) -> Tensor:
    """A batch's features with noise, which depends on the run's seed, step, rank and batch alone: a resumed run draws
    what the uninterrupted one would."""
    seed = hash((torch.initial_seed(), step, rank, int(batch.ids_BT.sum())))
    generator = Generator(batch.ids_BT.device).manual_seed(seed % 2**63)
    out_BTNH = noise(aux_BTNH, batch.documents_BT, generator)
    if out_BTNH.shape != aux_BTNH.shape or out_BTNH.dtype != aux_BTNH.dtype:
        raise ValueError(
            f"noise {type(noise).__name__} made {tuple(out_BTNH.shape)}, {out_BTNH.dtype} of features of shape "
            f"{tuple(aux_BTNH.shape)}, {aux_BTNH.dtype}: keep shape and dtype"
        )
    return out_BTNH
