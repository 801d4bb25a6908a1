"""Documents into rows of one length. No token is lost, repeated or moved out of its document's order.

Legend: B rows, T tokens of a row, N documents.
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


class Batch(NamedTuple):
    """Rows of one length: whole or cut documents, then padding."""

    ids_BT: Tensor  # int64, 0 in padding
    loss_mask_BT: Tensor  # bool, True where token x_j is supervised; False in padding
    documents_BT: Tensor  # int64, number of the document within the row, -1 in padding


def blank(rows: int, seq_len: int) -> Batch:
    """Rows of nothing but padding."""
    shape = (rows, seq_len)
    ids_BT, loss_mask_BT = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
    return Batch(ids_BT, loss_mask_BT, torch.full(shape, PAD_DOCUMENT))


def pack_stream(documents: Sequence[Document], seq_len: int) -> Batch:
    """Documents one after another, cut wherever a row is full; only the last row is padded.

    A document that goes on in the next row counts as a new document there.
    """
    sizes_N = torch.tensor([length for length in _lengths(documents, seq_len, whole=False) if length])
    batch = blank(-(-int(sizes_N.sum()) // seq_len), seq_len)
    ids, masks = zip(*documents, strict=True)
    streams = (torch.cat(ids), torch.cat(masks), torch.arange(len(sizes_N)).repeat_interleave(sizes_N))
    for column, stream in zip(batch, streams, strict=True):
        column.view(-1)[: len(stream)] = stream
    padding_BT = batch.documents_BT == PAD_DOCUMENT
    batch.documents_BT.sub_(batch.documents_BT[:, :1].clone()).masked_fill_(padding_BT, PAD_DOCUMENT)
    return batch


def pack_whole(documents: Sequence[Document], seq_len: int) -> Batch:
    """Whole documents, as many to a row as fit: first-fit decreasing.

    Raises:
        ValueError: there is no token, a document is longer than a row, or ``seq_len`` is below 1.
    """
    return _placed(documents, first_fit_decreasing(_lengths(documents, seq_len), seq_len), seq_len)


def pad(documents: Sequence[Document], seq_len: int) -> Batch:
    """One document a row, in the order given, padded to ``seq_len``.

    Raises:
        ValueError: as of :func:`pack_whole`.
    """
    return _placed(documents, [[i] for i in range(len(_lengths(documents, seq_len)))], seq_len)


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


def check_ids(rows: Batch, vocab_size: int, split: str) -> None:
    """Refuse ids that the embedding has no row for.

    Raises:
        ValueError: an id is negative or not below ``vocab_size``.
    """
    wrong_BT = (rows.ids_BT < 0) | (rows.ids_BT >= vocab_size)
    if wrong_BT.any():
        raise ValueError(
            f"the {split} data holds token id {int(rows.ids_BT[wrong_BT][0])} ({int(wrong_BT.sum())} such tokens), but "
            f"the vocabulary has {vocab_size} ids: the tokenizer does not belong to this target"
        )


def _lengths(documents: Sequence[Document], seq_len: int, whole: bool = True) -> list[int]:
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


def _placed(documents: Sequence[Document], bins: Sequence[Sequence[int]], seq_len: int) -> Batch:
    """Rows that hold the documents of each bin, one after another."""
    batch = blank(len(bins), seq_len)
    for row, members in enumerate(bins):
        start = 0
        for number, member in enumerate(members):
            ids_T, loss_mask_T = documents[member]
            here = slice(start, start := start + len(ids_T))
            batch.ids_BT[row, here] = ids_T
            batch.loss_mask_BT[row, here] = loss_mask_T
            batch.documents_BT[row, here] = number
    return batch
