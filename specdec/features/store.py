"""A cache on disk, mapped into memory.

Legend: M tokens of a row's pieces, N stored boundaries, H hidden.
"""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specdec.features.index import INDEX, JOURNAL, Index
from specdec.features.pieces import PackedRow
from specdec.features.shard import REMEDY, Contents, check_finite, open_shard, verify_shard
from specdec.values import pairs, words


class Span(NamedTuple):
    """Where the states of a piece, or of a whole row, stand."""

    shard: int
    start: int
    tokens: int


class Store:
    """Features by row. A shard's hash and numbers are checked when it is first read from.

    Args:
        data: what reads it, as :func:`specdec.features.contract.described` tells; for messages.

    Raises:
        ValueError: there is no cache, it is not finished, or a shard is gone or damaged.
    """

    def __init__(self, directory: Path, data: Mapping[str, Any]) -> None:
        self.directory, self.data = directory, data
        if not directory.is_dir():
            raise ValueError(f"{directory}: no such directory: make it with specdec cache --out {directory}")
        if not (directory / INDEX).exists() and (directory / JOURNAL).exists():
            raise ValueError(f"{directory}: the cache is not finished: run the same specdec cache command again")
        self.index = Index.read(directory / INDEX)
        self.contract = self.index.contract
        self._found: dict[bytes, Span] = {}
        self._shards: list[Contents] = []
        self._verified: set[int] = set()
        self._verifying = threading.Lock()
        for number, entry in enumerate(self.index.shards):
            contents = open_shard(directory / entry.file, entry, self.contract)
            self._shards.append(contents)
            for key, (start, tokens) in zip(contents.keys.numpy(), contents.spans.tolist(), strict=True):
                self._found.setdefault(bytes(key), Span(number, start, tokens))

    def holds(self, row: PackedRow) -> bool:
        """Whether :meth:`find` finds it."""
        return row.key in self._found or all(key in self._found for key in row.piece_keys)

    def find(self, row: PackedRow) -> list[Span]:
        """Where a row stands: as a whole, as it was packed when the cache was made, or piece by piece.

        Raises:
            ValueError: a piece of it is not there; the message says what the cache was made from.
        """
        if row.key in self._found:
            return [self._found[row.key]]
        return [self._piece(key, end - start) for key, (start, end) in zip(row.piece_keys, row.spans, strict=True)]

    def _piece(self, key: bytes, tokens: int) -> Span:
        if key not in self._found:
            self.verify()  # it may be the cache that is damaged
            made, now = self.contract.data, self.data
            different = [f"{name} was {words(a)}, is {words(b)}" for name, a, b in pairs(dict(made), dict(now))]
            reason = "; ".join(different) or "its files or the tokenizer have changed since"
            if (first := self.contract.first_rows) is not None:
                reason += f"; of training the first {first:,} rows alone"
            raise ValueError(
                f"{self.directory}: no features of a piece of {tokens} tokens: the cache was made from other data "
                f"({reason}); run specdec cache with the present data"
            )
        return self._found[key]

    def shard(self, number: int) -> Contents:
        """A shard whose every byte has been checked, once."""
        if number not in self._verified:
            with self._verifying:
                if number not in self._verified:
                    self._verify(number)
        return self._shards[number]

    def _verify(self, number: int) -> None:
        entry = self.index.shards[number]
        path = self.directory / entry.file
        verify_shard(path, entry)
        check_finite(str(path), self._shards[number], self.contract)
        contents = self._shards[number]
        if bool((contents.spans < 0).any()) or int(contents.spans.sum(1).max()) > entry.tokens:
            raise ValueError(f"{path}: its spans lie outside its {entry.tokens} tokens: {REMEDY}")
        self._verified.add(number)

    def verify(self) -> None:
        """Check every byte of every shard.

        Raises:
            ValueError: one is gone or damaged; the message names it.
        """
        for number in range(len(self._shards)):
            self.shard(number)

    def read(self, row: PackedRow, taps: list[int], aux: torch.Tensor, final: torch.Tensor) -> None:
        """Copy a row's states to ``aux`` (T, N, H), of the stored boundaries numbered ``taps``, and ``final`` (T, H).

        Raises:
            ValueError: a piece is not there, or its shard is damaged.
        """
        spans = self.find(row)
        if len(spans) == 1 and len(row.spans) > 1:  # found whole: its pieces stand one after another
            number, start, _ = spans[0]
            spans = []
            for begin, end in row.spans:
                spans.append(Span(number, start, end - begin))
                start += end - begin
        for (begin, end), (number, start, tokens) in zip(row.spans, spans, strict=True):
            contents, stop = self.shard(number), start + tokens
            if not torch.equal(contents.ids_P[start:stop], row.ids_R[begin:end]):
                raise ValueError(f"{self.directory / self.index.shards[number].file}: holds other tokens than it says")
            for n, tap in enumerate(taps):
                aux[begin:end, n] = contents.aux_PNH[start:stop, tap]
            final[begin:end] = contents.final_PH[start:stop]
