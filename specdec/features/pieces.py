"""What features are kept of: pieces of documents, and the packed rows that they stand in.

A piece is a run of one document number in a row. Positions restart there and attention ends at its borders, so its
features depend on its ids alone, up to rounding. To the last bit they also depend on the row around it, since kernels
sum in an order of their own for every shape; so a row has a key, too.

Legend: T tokens of a row, R of them up to the last that is no padding.
"""

import hashlib
from typing import NamedTuple, Self

import torch
from torch import Tensor

from specdec.data.batch import Batch

KEY = 16  # bytes of a key


class PackedRow(NamedTuple):
    """A row without the padding at its end."""

    ids_R: Tensor  # int64
    documents_R: Tensor  # int64
    spans: tuple[tuple[int, int], ...]  # (start, end) of its pieces
    key: bytes
    piece_keys: tuple[bytes, ...]

    @classmethod
    def of(cls, ids_T: Tensor, documents_T: Tensor) -> Self:
        """The row of these tokens, on the CPU."""
        R = length(documents_T)
        ids_R, documents_R = ids_T[:R], documents_T[:R]
        spans = runs(documents_R)
        keys = tuple(_hash(ids_R[start:end].contiguous().numpy().tobytes()) for start, end in spans)
        where = torch.tensor(spans, dtype=torch.int64).numpy().tobytes()
        return cls(ids_R, documents_R, spans, _hash(b"row", where, *keys), keys)

    @property
    def tokens(self) -> int:
        """Tokens that features are kept of."""
        return sum(end - start for start, end in self.spans)


def length(documents_T: Tensor) -> int:
    """R: tokens up to the last that is no padding."""
    real_R = (documents_T >= 0).nonzero()[:, 0]
    return int(real_R[-1]) + 1 if len(real_R) else 0


def runs(documents_R: Tensor) -> tuple[tuple[int, int], ...]:
    """(start, end) of each run of equal document numbers, padding left out."""
    if not len(documents_R):
        return ()
    borders = (documents_R[1:] != documents_R[:-1]).nonzero()[:, 0].add(1).tolist()
    starts = [0, *borders]
    numbers = documents_R[starts].tolist()
    ends = [*borders, len(documents_R)]
    return tuple((s, e) for s, e, number in zip(starts, ends, numbers, strict=True) if number >= 0)


def packed_rows(batch: Batch) -> list[PackedRow]:
    """The rows of a batch, wherever it lies."""
    ids_BT, documents_BT = batch.ids_BT.cpu(), batch.documents_BT.cpu()
    return [PackedRow.of(ids_T, documents_T) for ids_T, documents_T in zip(ids_BT, documents_BT, strict=True)]


def _hash(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=KEY).digest()
