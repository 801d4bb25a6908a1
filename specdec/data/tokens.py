"""Tokens at rest: documents are written to files as they come, and mapped from there.

What is mapped takes no memory of the process's own, and processes that map one file share it.

Legend: N documents, T tokens of one.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from specdec.data.loader import Document
from specdec.utils.reading import explained
from specdec.utils.text import how_many

log = logging.getLogger(__name__)

Item = TypeVar("Item")

GROUP = 1024  # documents that are written together, at most
GROUP_TOKENS = 1 << 22  # and tokens, from which on a group is full
MUCH = 0.05  # a loss that deserves a warning
# int32, a number of each document
COLUMNS = ("sizes", "lengths", "supervised", "kept", "conversations")


class MaskError(ValueError):
    """The loss mask holds no token, or every token."""


class EncodedDocument(NamedTuple):
    """A document to be kept: of a conversation, or of a part of one."""

    ids_T: Tensor  # int32, cut to a row's length
    loss_mask_T: Tensor  # bool, True where token x_j is supervised
    length: int  # tokens before the cut
    supervised: int  # supervised tokens before the cut
    # number of its conversation, ascending; all documents of one are trained on, or none
    conversation: int


class _Group(NamedTuple):
    """Documents that were written together, as the file has them."""

    starts: np.ndarray  # int64, one more than documents
    ids: np.ndarray  # int32
    loss_mask: np.ndarray  # bool


class Encoded(Sequence[Document]):
    """N documents of files of tokens, which are mapped: a document is read where it is asked for.

    Args:
        file: of all documents.
        numbers_N: of these documents, int64.
    """

    def __init__(self, file: "TokenFiles", numbers_N: Tensor) -> None:
        self.file = file
        self.numbers_N = numbers_N

    def __len__(self) -> int:
        return len(self.numbers_N)

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> "Encoded": ...
    def __getitem__(self, index: int | slice) -> "Document | Encoded":
        if isinstance(index, slice):
            return Encoded(self.file, self.numbers_N[index])
        ids, loss_mask = self.arrays(index)
        return Document(torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(loss_mask.copy()))

    def arrays(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, loss mask) of a document, where they are mapped: int32 and bool, not to be written to."""
        return self.file.arrays(int(self.numbers_N[index]))

    def take(self, numbers_M: Tensor) -> "Encoded":
        """Some of the documents."""
        return Encoded(self.file, self.numbers_N[numbers_M])

    def column(self, name: str) -> Tensor:
        """One of :data:`COLUMNS` of these documents, int64."""
        return self.file.columns[name][self.numbers_N].long()

    @property
    def about(self) -> dict[str, Any]:
        """The facts that were recorded of all documents of the file when they were made."""
        return self.file.about

    @property
    def key(self) -> str:
        """A hash of the documents' tokens and masks."""
        return hashlib.sha256(
            self.file.digest.encode() + self.numbers_N.numpy().tobytes()
        ).hexdigest()

    def split(self, part_of: Callable[[int], Tensor]) -> tuple["Encoded", "Encoded"]:
        """(training, validation) documents; all of a conversation are in the same part.

        Args:
            part_of: a mask of the conversations that are set aside, of how many there are.
        """
        _, conversation_N = self.column("conversations").unique(return_inverse=True)
        held_N = part_of(int(conversation_N.max()) + 1)[conversation_N]
        return self.take(~held_N), self.take(held_N)

    @property
    def lost(self) -> dict[str, int]:
        """The counts of what truncation and missing answers cost, by name."""
        sizes_N, kept_N, lengths_N, supervised_N = map(
            self.column, ("sizes", "kept", "lengths", "supervised")
        )
        return {
            "conversations": len(self.column("conversations").unique()),
            "documents": len(self),
            "cut": int((sizes_N < lengths_N).sum()),  # documents longer than a row
            "tokens_lost": int((lengths_N - sizes_N).sum()),
            "supervised_lost": int((supervised_N - kept_N).sum()),
            # documents without a supervised token, before the cut
            "silent": int((supervised_N == 0).sum()),
            # that lost all supervised tokens to it
            "cut_away": int(((supervised_N > 0) & (kept_N == 0)).sum()),
        }

    def usable(self, max_length: int, name: str) -> "Encoded":
        """The documents that have a supervised token; what was lost is logged, with a warning if it is much.

        Raises:
            MaskError: no token is supervised, or every one.
        """
        lost = self.lost
        supervised = int(self.column("supervised").sum())
        conversations = lost["conversations"]
        cut = lost["cut"]
        share = lost["supervised_lost"] / max(supervised, 1)
        parts = f" in {how_many(len(self), 'document')}" if len(self) != conversations else ""
        log.log(
            logging.WARNING if max(share, cut / len(self)) > MUCH else logging.INFO,
            "%s: %s%s, %d cut to %d tokens: %d of %d tokens lost, %d of %d supervised (%.1f %%)",
            name, how_many(conversations, "conversation"), parts, cut, max_length, lost["tokens_lost"],
            int(self.column("lengths").sum()), lost["supervised_lost"], supervised, 100 * share,
        )  # fmt: skip
        documents = self.take(self.column("kept") > 0)
        if len(documents) < len(self):
            log.warning(
                "%s: dropped %d of %s, without a supervised token",
                name, len(self) - len(documents), how_many(len(self), "row"),
            )  # fmt: skip
        if not len(documents):
            raise MaskError(
                f"{name}: of {how_many(conversations, 'conversation')} none has a supervised token ({cut} were cut to "
                f"{max_length} tokens): they need assistant turns that begin within seq_len"
            )
        if torch.equal(documents.column("kept"), documents.column("sizes")):
            raise MaskError(
                f"{name}: every token is supervised, prompts included: the chat template marks no assistant turns; "
                "check its {% generation %} tags"
            )
        return documents


class TokenFiles:
    """Files of tokens, mapped: the documents of one behind those of the other.

    Args:
        paths: of files that :func:`write_tokens` has written, and that are as they were written.
        digest: of the files' content.
        about: what was said of the documents when they were made.
    """

    def __init__(
        self, paths: Sequence[Path], digest: str, about: dict[str, Any] | None = None
    ) -> None:
        self.digest = digest
        self.about = about or {}
        self.groups: list[_Group] = []
        columns: dict[str, list[np.ndarray]] = {name: [] for name in COLUMNS}
        for batch in chain.from_iterable(map(_batches, paths)):
            ids = batch.column("ids")
            loss_mask = batch.column("loss_mask")
            self.groups.append(_Group(
                ids.offsets.to_numpy(), ids.values.to_numpy(), loss_mask.values.to_numpy().view(np.bool_)
            ))  # fmt: skip
            for name, parts in columns.items():
                parts.append(batch.column(name).to_numpy())
        self.columns = {
            name: torch.from_numpy(np.concatenate(parts)) for name, parts in columns.items()
        }
        # documents of the groups
        self._firsts = np.cumsum([0, *(len(group.starts) - 1 for group in self.groups)])

    def arrays(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, loss mask) of a document, where they are mapped."""
        at = int(np.searchsorted(self._firsts, number, side="right")) - 1
        group = self.groups[at]
        place = number - int(self._firsts[at])
        inside = slice(int(group.starts[place]), int(group.starts[place + 1]))
        return group.ids[inside], group.loss_mask[inside]

    def all(self) -> Encoded:
        """Every document."""
        return Encoded(self, torch.arange(len(self.columns["sizes"])))


def _batches(path: Path) -> Iterator[Any]:
    """Yield the record batches of a file, which is mapped."""
    from pyarrow import ipc, memory_map

    with explained(path):
        reader = ipc.open_file(memory_map(str(path)))
    yield from map(reader.get_batch, range(reader.num_record_batches))


def write_tokens(documents: Iterable[EncodedDocument], path: Path) -> int:
    """Write documents to a file as they come, and return how many; no more than a group of them is in memory.

    Raises:
        ValueError: the file cannot be written.
    """
    import pyarrow as pa

    kinds = {"ids": pa.large_list(pa.int32()), "loss_mask": pa.large_list(pa.uint8())}
    schema = pa.schema(kinds | dict.fromkeys(COLUMNS, pa.int32()))
    written = 0
    with (
        explained(path),
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_file(sink, schema) as writer,
    ):
        for group in groups(documents, lambda document: len(document.ids_T), GROUP, GROUP_TOKENS):
            written += len(group)
            sizes = [len(document.ids_T) for document in group]
            starts = np.cumsum([0, *sizes])
            ids = torch.cat([document.ids_T for document in group]).int().numpy()
            loss_mask = (
                torch.cat([document.loss_mask_T for document in group]).numpy().view(np.uint8)
            )
            numbers = {
                "sizes": sizes,
                "lengths": [document.length for document in group],
                "supervised": [document.supervised for document in group],
                "kept": [int(document.loss_mask_T.sum()) for document in group],
                "conversations": [document.conversation for document in group],
            }
            lists = [
                pa.LargeListArray.from_arrays(pa.array(starts), pa.array(values))
                for values in (ids, loss_mask)
            ]
            columns = [pa.array(np.asarray(numbers[name], np.int32)) for name in COLUMNS]
            writer.write_batch(pa.record_batch([*lists, *columns], schema=schema))
    return written


def groups(
    items: Iterable[Item], size_of: Callable[[Item], int], count: int, size: int
) -> Iterator[list[Item]]:
    """Items as they come, in groups that end with this many items, or with the item that brings them to a size."""
    group: list[Item] = []
    total = 0
    for item in items:
        group.append(item)
        total += size_of(item)
        if len(group) == count or total >= size:
            yield group
            group = []
            total = 0
    if group:
        yield group
