"""Where training gets the target's features from.

Legend: B batch, T tokens, N aux layers, H hidden, R tokens up to the last that is no padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specdec.data import Batch, TokenData
from specdec.data.loader import Companion
from specdec.features.pieces import length
from specdec.nn.view import View
from specdec.target import Target, TargetOutput


class Source(Companion):
    """Features of batches, in the target's dtype on its device; what stands in padding says nothing."""

    first_rows: int | None = None
    """How many training rows it has, those that an epoch draws first; None if all."""

    def __call__(self, target: Target, batch: Batch, layers: Sequence[int], final_norm: bool) -> TargetOutput:
        """As :meth:`specdec.target.Target.forward` of ``View.packed``, for rows of packed documents."""
        raise TypeError(f"{type(self).__name__} must say what the features are")

    def close(self) -> None:
        """Let go of what is not needed between runs; it may be asked again."""


class Features:
    """Base of the ways to features: a frozen spec."""

    def open(self, target: Target, data: TokenData, layers: Sequence[int], final_norm: bool) -> Source:
        """The source of a run that reads these boundaries of this data.

        Raises:
            ValueError: it has no features of this target, these boundaries or this data.
        """
        raise TypeError(f"{type(self).__name__} must say where features come from")


@dataclass(frozen=True)
class OnTheFly(Features, Source):
    """The target runs in the training step, without gradient.

    Args:
        rows: rows that it reads together: those of the ``batch``, or so many. One makes a row's features independent
            of the rows beside it whatever the kernels do, hence those of a cache to the last bit.
    """

    rows: int | Literal["batch"] = "batch"

    def __post_init__(self) -> None:
        if self.rows != "batch" and self.rows < 1:
            raise ValueError(f"model.features.rows must be batch or at least 1, not {self.rows}")

    def open(self, target: Target, data: TokenData, layers: Sequence[int], final_norm: bool) -> Source:
        """Itself: there is nothing to open."""
        return self

    def __call__(self, target: Target, batch: Batch, layers: Sequence[int], final_norm: bool) -> TargetOutput:
        """The whole batch, or some rows after others, each group up to its last token that is no padding."""
        if self.rows == "batch":
            return target.forward(batch.ids_BT, View.packed(batch.documents_BT), layers, final_norm)
        B, T = batch.ids_BT.shape
        weight = target.embedding_weight()
        aux_BTNH = weight.new_zeros(B, T, len(layers), target.hidden_size)
        final_BTH = weight.new_zeros(B, T, target.hidden_size)
        for start in range(0, B, self.rows):
            group = slice(start, start + self.rows)
            ids_GT, documents_GT = batch.ids_BT[group], batch.documents_BT[group]
            R = length((documents_GT >= 0).any(0).long() - 1)
            if R:
                out = target.forward(ids_GT[:, :R], View.packed(documents_GT[:, :R]), layers, final_norm)
                aux_BTNH[group, :R], final_BTH[group, :R] = out
        return TargetOutput(aux_BTNH, final_BTH)
