"""Recurrences that hold the size of the state that is fed back, without EAGLE-3.1's norm.

A drafter adds each step's output to the state that it reads, so the raw state grows along the draft, and each step
changes it by a smaller share. EAGLE-3.1 feeds the normed state back (https://arxiv.org/abs/2605.09992), which changes
two things: the state's size, and each channel's learned weight. These recurrences change the size alone, so that an
ablation can tell which of the two matters. No engine serves them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from specdec.drafting.chained import Recurrence

if TYPE_CHECKING:
    from specdec.drafter import DrafterConfig


@dataclass(frozen=True)
class FixedSize(Recurrence):
    """Feed the un-normalized output back, rescaled for each token to a root mean square of ``rms``.

    Every step then reads a state of the same size, so its own output changes the state by a share that does not shrink.
    """

    feeds_head_input: ClassVar[bool] = False

    rms: float = 1.0

    def __post_init__(self) -> None:
        if not self.rms > 0:
            raise ValueError(f"recurrence FixedSize: rms must be positive, not {self.rms}")

    def build(self, config: "DrafterConfig") -> nn.Module:
        return FeedRescaled(self.rms, config.rms_norm_eps)


class FeedRescaled(nn.Module):
    """Returns the output before its norm, at one root mean square."""

    def __init__(self, rms: float, eps: float) -> None:
        super().__init__()
        self.rms = rms
        self.eps = eps

    def forward(self, raw_BTH: Tensor, normed_BTH: Tensor) -> Tensor:
        return self.rms * F.rms_norm(raw_BTH, raw_BTH.shape[-1:], eps=self.eps)


@dataclass(frozen=True)
class Leaky(Recurrence):
    """Feed the un-normalized output back, multiplied by ``share``: what earlier steps added fades along the draft.

    If every step adds about the same, the state's size tends to that step's size over 1 - ``share``.
    """

    feeds_head_input: ClassVar[bool] = False

    share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(
                f"recurrence Leaky: share must be above 0 and below 1, not {self.share}"
            )

    def build(self, config: "DrafterConfig") -> nn.Module:
        return FeedShare(self.share)


class FeedShare(nn.Module):
    """Returns a share of the output before its norm."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, raw_BTH: Tensor, normed_BTH: Tensor) -> Tensor:
        return self.share * raw_BTH
