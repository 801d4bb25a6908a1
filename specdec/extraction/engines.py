"""What works out features: the target itself, row by row, as training does on the fly.

Legend: R tokens of a row, M of them in its pieces, N stored boundaries, H hidden.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
import transformers
from torch import Tensor

from specdec.features.pieces import PackedRow
from specdec.nn.view import View
from specdec.target import Target


class RowStates(NamedTuple):
    """A row's states, its pieces one after another."""

    row: PackedRow
    aux_MNH: Tensor
    final_MH: Tensor


class Engine(Protocol):
    """Works out rows in the order given."""

    name: str

    def states(self, rows: Iterable[PackedRow]) -> Iterator[RowStates]:
        """The states of each row."""
        ...


class TransformersEngine:
    """The very forward of :class:`specdec.features.OnTheFly`, so that a cache holds its numbers to the last bit."""

    def __init__(self, target: Target, layers: Sequence[int], products: str) -> None:
        self.target, self.layers = target, layers
        on = f"{target.device.type}, products {products}"
        self.name = f"transformers {transformers.__version__}, torch {torch.__version__}, {on}"

    def states(self, rows: Iterable[PackedRow]) -> Iterator[RowStates]:
        """One forward a row."""
        for row in rows:
            ids_1R, documents_1R = (x[None].to(self.target.device) for x in (row.ids_R, row.documents_R))
            out = self.target.forward(ids_1R, View.packed(documents_1R), self.layers)
            aux_RNH, final_RH = out.aux_BTNH[0].cpu(), out.final_BTH[0].cpu()
            real_R = row.documents_R >= 0
            if not real_R.all():
                aux_RNH, final_RH = aux_RNH[real_R], final_RH[real_R]
            yield RowStates(row, aux_RNH, final_RH)
