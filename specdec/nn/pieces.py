"""Attention over long runs of keys, in pieces: no tensor of all pairs of nodes and keys is ever made.

A document, or a prompt from its first token on, needs no mask at all: it is plain causal attention. What is left
(windows, short documents, what is appended to a long prefix) goes by tiles of nodes, each with a mask of the keys in
its sight.

Legend: B batch, h query heads, g key heads, T nodes, S key columns, d head width.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Self, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.nn.few_queries import MOST
from specdec.nn.sight import Sight, Spans

PAIRS = 2048**2  # of nodes and keys in a sequence, up to which a mask of all is made
ROWS = 512  # nodes of a tile; a document as long goes by itself

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Attention of q (1, h, T, d), k, v under a boolean mask, or causal and square for None."""


class Piece(NamedTuple):
    """Some nodes of one sequence, and the keys that any of them sees."""

    sequence: int
    rows: slice
    keys: slice
    causal: bool  # node i sees exactly the first i + 1 of the keys, which are as many as the nodes


def is_long(sight: Sight) -> TypeGuard[Spans]:
    """Whether attention goes by pieces: many nodes, too many pairs, runs of keys; never in a compiled graph."""
    if not isinstance(sight, Spans) or torch.compiler.is_compiling():
        return False
    T = sight.first_BT.shape[1]
    return T > MOST and T * sight.columns > PAIRS


class Cut(NamedTuple):
    """A long sight in pieces, which goes where its mask would."""

    spans: Spans
    pieces: list[Piece]

    @classmethod
    def of(cls, spans: Spans) -> Self:
        """Every node that sees a key is in one piece, and every key that it sees among the piece's."""
        return cls(spans, [piece for b in range(len(spans.first_BT)) for piece in _of_sequence(b, spans)])

    def tiled(self) -> Self:
        """The same without causal pieces, for attention that has no such kernel."""
        return self._replace(pieces=[tile for piece in self.pieces for tile in _in_tiles(piece)])


def _of_sequence(b: int, spans: Spans) -> Iterator[Piece]:
    first_T, last_T = spans.first_BT[b].cpu(), spans.last_BT[b].cpu()
    T = len(first_T)
    goes_on_T = torch.zeros(T, dtype=torch.bool)  # sees one key more than the node before
    goes_on_T[1:] = (first_T[1:] == first_T[:-1]) & (last_T[1:] == last_T[:-1] + 1)
    starts = (~goes_on_T).nonzero()[:, 0]
    lengths = torch.cat([starts[1:], starts.new_tensor([T])]) - starts
    square = (lengths >= ROWS) & (first_T[starts] == last_T[starts])
    done = 0
    for start, length in zip(starts[square].tolist(), lengths[square].tolist(), strict=True):
        yield from _tiles(b, done, start, first_T, last_T)
        first, done = int(first_T[start]), start + length
        yield Piece(b, slice(start, done), slice(first, first + length), True)
    yield from _tiles(b, done, T, first_T, last_T)


def _tiles(b: int, start: int, stop: int, first_T: Tensor, last_T: Tensor) -> Iterator[Piece]:
    for a in range(start, stop, ROWS):
        rows = slice(a, min(a + ROWS, stop))
        first, last = first_T[rows], last_T[rows]
        sees = first <= last
        if sees.any():
            yield Piece(b, rows, slice(int(first[sees].min()), int(last[sees].max()) + 1), False)


def _in_tiles(piece: Piece) -> Iterator[Piece]:
    if not piece.causal:
        yield piece
        return
    first = piece.keys.start - piece.rows.start
    for a in range(piece.rows.start, piece.rows.stop, ROWS):
        stop = min(a + ROWS, piece.rows.stop)
        yield Piece(piece.sequence, slice(a, stop), slice(piece.keys.start, first + stop), False)


def attend_pieces(attend: Attend, q_BhTd: Tensor, k_BgSd: Tensor, v_BgSd: Tensor, cut: Cut) -> Tensor:
    """Attention of what is in sight, (B, h, T, d); zero for a node that sees nothing.

    Args:
        attend: one piece at a time.
    """
    d, narrow = q_BhTd.shape[-1], v_BgSd.shape[-1]
    if narrow < d:  # the kernels that make no weights of all pairs want one width
        v_BgSd = F.pad(v_BgSd, (0, d - narrow))
    out = q_BhTd.new_zeros(*q_BhTd.shape[:3], narrow)
    for b, rows, keys, causal in cut.pieces:
        one = slice(b, b + 1)
        mask_11RK = None if causal else cut.spans.row(b).part(rows, keys)
        got = attend(q_BhTd[one, :, rows], k_BgSd[one, :, keys], v_BgSd[one, :, keys], mask_11RK)
        out[one, :, rows] = got[..., :narrow]
    return out
