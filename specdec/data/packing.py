"""Packing: documents as rows of one length, in memory, or in a file of specdec's cache that is mapped.

Documents that lie in a file of tokens are packed piece by piece into a file, so that the memory of a process does not
grow with them; any others are packed in memory. No token of a document is lost, repeated or moved out of its order.

Legend: B rows, T tokens of a row, N documents.
"""

import contextlib
import itertools
import logging
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from specdec.data.loader import PAD_DOCUMENT, Batch, Document
from specdec.data.token_cache import entry, sound
from specdec.data.tokens import Encoded
from specdec.utils.files import cache_place, write_json
from specdec.utils.reading import read_json
from specdec.utils.text import how_many

log = logging.getLogger(__name__)

VERSION = 1  # of packed rows on disk
PIECE = 1 << 20  # tokens that are packed at once
COUNTS = "counts.json"  # rows of each source
# of a batch at rest, by file
DTYPES = {"ids": torch.int32, "loss_mask": torch.bool, "documents": torch.int32}


class Packed(NamedTuple):
    """Rows of several sources, one source after another."""

    rows: Batch
    counts: list[int]  # of each source


def pack_stream(documents: Sequence[Document], seq_len: int, prefix: Sequence[int] = ()) -> Batch:
    """The rows of :func:`stream_rows`."""
    return packed([documents], partial(stream_rows, seq_len=seq_len, prefix=prefix)).rows


def pack_whole(documents: Sequence[Document], seq_len: int) -> Batch:
    """The rows of :func:`whole_rows`."""
    return packed([documents], partial(whole_rows, seq_len=seq_len)).rows


def first_fit_decreasing(lengths_N: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Longest item first, each into the first bin with room; ties keep their order.

    A tree over the bins holds the most room below each node, so that finding a bin takes log(N) steps.

    Returns:
        The numbers of the items, bin by bin, and where each bin starts among them.
    """
    leaves = 1 << max(0, len(lengths_N) - 1).bit_length()
    room = array("i", [capacity]) * (2 * leaves)
    longest_first_N = np.argsort(-lengths_N, kind="stable")
    bin_N = array("i", bytes(4 * len(lengths_N)))
    for place, item in enumerate(longest_first_N):
        length = int(lengths_N[item])
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        bin_N[place] = node - leaves
        room[node] -= length
        while node := node // 2:
            room[node] = max(room[2 * node], room[2 * node + 1])
    bins_N = np.frombuffer(bin_N, np.int32)
    by_bin_N = np.argsort(bins_N, kind="stable")
    return longest_first_N[by_bin_N], np.flatnonzero(np.diff(bins_N[by_bin_N], prepend=-1))


def _sizes(documents: Sequence[Document]) -> np.ndarray:
    """Tokens of each document, int64; ValueError if there is none."""
    if isinstance(documents, Encoded):
        sizes = documents.column("sizes").numpy()
    else:
        sizes = np.array([len(document.ids_T) for document in documents], np.int64)
    if not sizes.any():
        raise ValueError(f"nothing to pack: {how_many(len(sizes), 'document')} without a token")
    return sizes


def _arrays(documents: Sequence[Document], index: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids, loss mask) of a document."""
    if isinstance(documents, Encoded):
        return documents.arrays(index)
    document = documents[index]
    return document.ids_T.numpy(), document.loss_mask_T.numpy()


class _Rows:
    """Rows under way: filled from the first on, and handed out by pieces."""

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len
        # of the row, of the next token in it, of the next document in it
        self.row = self.place = self.number = 0
        self._begin()

    def _begin(self) -> None:
        shape = (max(1, PIECE // self.seq_len), self.seq_len)
        ids_BT = torch.zeros(shape, dtype=torch.int32)
        loss_mask_BT = torch.zeros(shape, dtype=torch.bool)
        self._piece = Batch(
            ids_BT, loss_mask_BT, torch.full(shape, PAD_DOCUMENT, dtype=torch.int32)
        )
        self._arrays = [column.numpy() for column in self._piece]

    @property
    def room(self) -> int:
        """The tokens that still fit into the row under way."""
        return self.seq_len - self.place

    def add(self, ids: np.ndarray, loss_mask: np.ndarray, prefix: Sequence[int] = ()) -> None:
        """Add the next document of the row, behind the prefix, which is not supervised."""
        begin = self.place + len(prefix)
        end = begin + len(ids)
        ids_BT, loss_mask_BT, documents_BT = self._arrays
        ids_BT[self.row, self.place : begin] = prefix
        ids_BT[self.row, begin:end] = ids
        loss_mask_BT[self.row, begin:end] = loss_mask
        documents_BT[self.row, self.place : end] = self.number
        self.place = end
        self.number = self.number + 1

    def close(self) -> Iterator[Batch]:
        """End the row; yields the piece that it completes, if it does."""
        self.row += 1
        self.place = self.number = 0
        if self.row == len(self._piece.ids_BT):
            yield from self.rest()

    def rest(self) -> Iterator[Batch]:
        """The rows that have not been handed out, if there are any."""
        if self.row:
            yield Batch(*(column[: self.row] for column in self._piece))
            self.row = 0
            self._begin()


def stream_rows(
    documents: Sequence[Document], seq_len: int, prefix: Sequence[int] = ()
) -> Iterator[Batch]:
    """Documents one after another, cut wherever a row is full; pieces of the rows.

    A document that continues in the next row counts as a new document there, and has the prefix in front, which is not
    supervised. Only the last row is padded; with a prefix also one that has no room for it and a token behind.

    Args:
        prefix: with which the tokenizer begins a text, BOS as a rule; the documents begin with it themselves.

    Raises:
        ValueError: there is no token, or a row has no room behind the prefix.
    """
    if seq_len <= len(prefix):
        raise ValueError(
            f"data.seq_len is {seq_len}, and the tokenizer puts {how_many(len(prefix), 'token')} in front of every "
            "text: raise it"
        )
    _sizes(documents)
    rows = _Rows(seq_len)
    for index in range(len(documents)):
        ids, loss_mask = _arrays(documents, index)
        taken = 0
        while taken < len(ids):
            front = prefix if taken else ()
            if rows.room < len(front) + min(len(ids) - taken, 1 if taken else 1 + len(prefix)):
                yield from rows.close()
                continue
            end = taken + rows.room - len(front)
            rows.add(ids[taken:end], loss_mask[taken:end], front)
            taken = min(end, len(ids))
            if not rows.room:
                yield from rows.close()
    if rows.place:
        yield from rows.close()
    yield from rows.rest()


def whole_rows(documents: Sequence[Document], seq_len: int) -> Iterator[Batch]:
    """Whole documents, as many to a row as fit: first-fit decreasing; pieces of the rows.

    Raises:
        ValueError: there is no token, or a document is longer than a row.
    """
    sizes = _sizes(documents)
    if sizes.max() > seq_len:
        raise ValueError(
            f"document {sizes.argmax()} has {sizes.max()} tokens and a row holds {seq_len}: "
            "truncate the documents or raise seq_len"
        )
    rows = _Rows(seq_len)
    items_N, starts = first_fit_decreasing(sizes, seq_len)
    for start, end in itertools.pairwise([*starts, len(items_N)]):
        for item in items_N[start:end]:
            rows.add(*_arrays(documents, int(item)))
        yield from rows.close()
    yield from rows.rest()


def packed(sources: Sequence[Sequence[Document]], rows_of: partial[Iterator[Batch]]) -> Packed:
    """All rows of the sources: in a file where the documents lie in files, else in memory.

    Args:
        rows_of: one of the functions above, and its settings, which a source's documents are passed to.
    """
    files = [documents.key for documents in sources if isinstance(documents, Encoded)]
    if len(files) < len(sources):
        pieces = [list(rows_of(documents)) for documents in sources]
        columns = [torch.cat(column) for column in zip(*itertools.chain(*pieces), strict=True)]
        return Packed(
            Batch(*columns), [sum(len(piece.ids_BT) for piece in part) for part in pieces]
        )
    determined_by = [VERSION, files, rows_of.func.__name__, rows_of.keywords]
    folder = cache_place("rows", determined_by)
    entry(folder, lambda temporary: _write(map(rows_of, sources), temporary))
    sound(folder)
    log.info("packed rows: %s", folder)
    columns = []
    for name, dtype in DTYPES.items():
        size = (folder / name).stat().st_size // dtype.itemsize
        # private: nobody else sees what would be written there, and a file that may only be read will do
        mapped = torch.from_file(str(folder / name), shared=False, size=size, dtype=dtype)
        columns.append(mapped.view(-1, rows_of.keywords["seq_len"]))
    return Packed(Batch(*columns), read_json(folder / COUNTS))


def _write(sources: Iterable[Iterable[Batch]], folder: Path) -> None:
    """Write the rows of sources to the folder's files as they come."""
    counts = []
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context((folder / name).open("wb")) for name in DTYPES]
        for pieces in sources:
            counts.append(0)
            for piece in pieces:
                counts[-1] += len(piece.ids_BT)
                for file, column in zip(files, piece, strict=True):
                    file.write(column.contiguous().numpy().data)
    write_json(folder / COUNTS, counts)
