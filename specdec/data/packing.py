"""Documents into rows of one length. No token is lost, repeated or moved out of its document's order.

Each function returns all R rows stacked, as a `Batch`. Legend: R rows, N documents, T tokens of a row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.data.batch import PAD_DOCUMENT, Batch, Document


def _check(documents: Sequence[Document], seq_len: int, whole: bool) -> list[int]:
    """The documents' lengths, once they are known to fit."""
    if seq_len < 1:
        raise ValueError(f"seq_len is {seq_len}: it must be at least 1")
    lengths = [len(document.ids_T) for document in documents]
    if not any(lengths):
        raise ValueError(f"nothing to pack: {len(lengths)} documents without a token")
    if whole and max(lengths) > seq_len:
        raise ValueError(
            f"document {lengths.index(max(lengths))} has {max(lengths)} tokens and a row holds {seq_len}: "
            "truncate the documents or raise seq_len"
        )
    return lengths


def _blank(rows: int, seq_len: int) -> Batch:
    shape = (rows, seq_len)
    return Batch(
        torch.zeros(shape, dtype=torch.long),
        torch.zeros(shape, dtype=torch.bool),
        torch.full(shape, PAD_DOCUMENT, dtype=torch.long),
    )


def _place(documents: Sequence[Document], bins: Sequence[Sequence[int]], seq_len: int) -> Batch:
    """Rows that hold the documents of each bin, one after another."""
    batch = _blank(len(bins), seq_len)
    for row, members in enumerate(bins):
        start = 0
        for number, member in enumerate(members):
            ids_T, loss_mask_T = documents[member]
            here = slice(start, start + len(ids_T))
            batch.ids_BT[row, here] = ids_T
            batch.loss_mask_BT[row, here] = loss_mask_T
            batch.documents_BT[row, here] = number
            start = here.stop
    return batch


def pack_stream(documents: Sequence[Document], seq_len: int) -> Batch:
    """Documents one after another, cut wherever a row is full; only the last row is padded.

    A document that goes on in the next row counts as a new document there.

    Raises:
        ValueError: there is no token, or ``seq_len`` is below 1.
    """
    lengths = [length for length in _check(documents, seq_len, whole=False) if length]
    rows = -(-sum(lengths) // seq_len)
    number_N = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    batch = _blank(rows, seq_len)
    for column, stream in zip(
        batch,
        (
            torch.cat([document.ids_T for document in documents]),
            torch.cat([document.loss_mask_T for document in documents]),
            number_N,
        ),
        strict=True,
    ):
        column.view(-1)[: len(stream)] = stream
    padding_RT = batch.documents_BT == PAD_DOCUMENT
    batch.documents_BT.sub_(batch.documents_BT[:, :1].clone()).masked_fill_(padding_RT, PAD_DOCUMENT)
    return batch


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of item numbers: longest item first, each into the first bin with room; ties keep their order.

    A tree over the bins holds the most room below each node, so that finding a bin takes log(N) steps.
    """
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    room = [capacity] * (2 * leaves)
    bins: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= lengths[item] else 2 * node + 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(item)
        room[node] -= lengths[item]
        while node := node // 2:
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def pack_whole(documents: Sequence[Document], seq_len: int) -> Batch:
    """Whole documents, as many to a row as fit: first-fit decreasing.

    Raises:
        ValueError: there is no token, a document is longer than a row, or ``seq_len`` is below 1.
    """
    lengths = _check(documents, seq_len, whole=True)
    return _place(documents, first_fit_decreasing(lengths, seq_len), seq_len)


def pad(documents: Sequence[Document], seq_len: int) -> Batch:
    """One document a row, in the order given, padded to ``seq_len``.

    Raises:
        ValueError: there is no token, a document is longer than a row, or ``seq_len`` is below 1.
    """
    _check(documents, seq_len, whole=True)
    return _place(documents, [[i] for i in range(len(documents))], seq_len)


def pad_to_longest(documents: Sequence[Document], seq_len: int) -> Batch:
    """One document a row, in the order given, padded to the longest of them.

    Raises:
        ValueError: as of :func:`pad`.
    """
    lengths = _check(documents, seq_len, whole=True)
    return pad(documents, max(lengths))


def check_ids(rows: Batch, vocab_size: int, split: str) -> None:
    """Refuse ids that the embedding has no row for.

    Raises:
        ValueError: an id is negative or not below ``vocab_size``.
    """
    wrong_RT: Tensor = (rows.ids_BT < 0) | (rows.ids_BT >= vocab_size)
    if wrong_RT.any():
        first = int(rows.ids_BT[wrong_RT][0])
        raise ValueError(
            f"the {split} data holds token id {first} ({int(wrong_RT.sum())} such tokens), but the vocabulary has "
            f"{vocab_size} ids: the tokenizer does not belong to this target"
        )
