"""How the unroll's blocked kernel cuts nodes and keys, and what it adds to the scores of a part.

Legend: B batch, T nodes, S key columns.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.nn.sight import Sight, Spans

KEPT = 2**26  # bytes of a plan's biases, up to which they are kept from their first use on


ROWS, KEYS = 256, 2048  # nodes of a tile, keys of a part


def kept_bytes(B: int, T: int) -> int:
    """Bytes of biases that a plan comes to keep, of rows that are one document each."""
    pairs = 0
    for a in range(0, T, ROWS):
        end = min(a + ROWS, T)
        first = 0 if end <= KEYS else a // KEYS * KEYS  # what comes before is seen whole
        pairs += (end - a) * (end - first)
    size = B * pairs * torch.bfloat16.itemsize
    return size if size <= KEPT else 0


class Tile(NamedTuple):
    """Some nodes, and the keys that any of them may see, in parts."""

    rows: slice
    parts: list[slice]


class Plan:
    """Tiles under one sight.

    A part that every node sees whole needs no bias. The others' are kept where they are few, as those of short rows
    are, and else made anew at each use: to keep them takes as many numbers as there are pairs.

    Args:
        rows: nodes of a tile.
        keys: keys of a part.
    """

    def __init__(self, sight: Sight, rows: int = ROWS, keys: int = KEYS) -> None:
        self.sight = sight
        spans = sight.spans()
        B, T = spans.first_BT.shape
        solid = isinstance(sight, Spans)
        self._nothing = torch.zeros(1, 1, 1, 1, 1, dtype=torch.bfloat16, device=spans.first_BT.device)
        self._biases: dict[tuple[int, int], Tensor] = {}
        self._whole: set[tuple[int, int]] = set()
        self.tiles: list[Tile] = []
        pairs = 0
        for a, (lowest, highest, first, last) in zip(range(0, T, rows), _edges(spans, rows), strict=True):
            tile = Tile(slice(a, min(a + rows, T)), list(_parts(first, last, keys)))
            self.tiles.append(tile)
            for part in tile.parts:
                if solid and lowest <= part.start and part.stop <= highest:
                    self._whole.add((a, part.start))
                else:
                    pairs += (tile.rows.stop - a) * (part.stop - part.start)
        self._keeps = B * pairs * self._nothing.itemsize <= KEPT

    def parts(self) -> Iterator[tuple[slice, slice]]:
        """Nodes and keys of every part of every tile."""
        return ((rows, keys) for rows, parts in self.tiles for keys in parts)

    def bias(self, rows: slice, keys: slice) -> Tensor:
        """Of a part, (B, 1, 1, rows, keys), or one for all: 0 where a node sees the key, else -inf."""
        place = rows.start, keys.start
        if place in self._whole:
            return self._nothing
        if place in self._biases:
            return self._biases[place]
        seen_B11RK = self.sight.part(rows, keys)[:, :, None]
        bias = torch.zeros_like(seen_B11RK, dtype=torch.bfloat16)  # exact, and half as wide
        bias.masked_fill_(~seen_B11RK, float("-inf"))
        if self._keeps:
            self._biases[place] = bias
        return bias


def _edges(spans: Spans, rows: int) -> list[list[int]]:
    """Of every tile: where the keys begin and end that all its nodes see, and where those that any sees."""
    sees_BT = spans.first_BT <= spans.last_BT
    first_BT = spans.first_BT.where(sees_BT, spans.columns)
    end_BT = spans.last_BT.where(sees_BT, -1) + 1
    found = [
        torch.stack([first_BR.amax(), end_BR.amin(), first_BR.amin(), end_BR.amax()])
        for first_BR, end_BR in zip(first_BT.split(rows, 1), end_BT.split(rows, 1), strict=True)
    ]
    return torch.stack(found).tolist()


def _parts(first: int, end: int, most: int) -> Iterator[slice]:
    """From one key to before another: in one part, or at every multiple of the most."""
    if end - first <= most:
        yield from [slice(first, end)] * (first < end)
        return
    edges = [first, *range((first // most + 1) * most, end, most), end]
    yield from map(slice, edges[:-1], edges[1:])
