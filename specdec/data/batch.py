"""What training reads: documents, the fixed-length rows they are packed into, and batches of rows.

Legend: B rows, T tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PAD_DOCUMENT = -1  # the document number of padding


class Document(NamedTuple):
    """One tokenised text or conversation."""

    ids_T: Tensor  # int64
    loss_mask_T: Tensor  # bool, True where token x_j is supervised


class Row(NamedTuple):
    """A fixed number of tokens: whole or cut documents, then padding."""

    ids_T: Tensor  # int64, 0 in padding
    loss_mask_T: Tensor  # bool, True where token x_j is supervised; False in padding
    documents_T: Tensor  # int64, number of the document within the row, -1 in padding


class Batch(NamedTuple):
    """Rows of one length, stacked."""

    ids_BT: Tensor  # int64
    loss_mask_BT: Tensor  # bool
    documents_BT: Tensor  # int64


def collate(rows: Sequence[Row]) -> Batch:
    """Stack rows.

    Raises:
        ValueError: there are no rows, or they differ in length.
    """
    lengths = sorted({len(row.ids_T) for row in rows})
    if len(lengths) != 1:
        raise ValueError(f"a batch needs rows of one length, got lengths {lengths}: pack the documents first")
    return Batch(*(torch.stack(column) for column in zip(*rows, strict=True)))
