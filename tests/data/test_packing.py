from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.data.loader import Batch, Document
from specdec.data.packing import first_fit_decreasing, pack_stream, pack_whole

SEQ = 6


def make(lengths: list[int]) -> list[Document]:
    """Documents whose every token is another id, from 1 on; a third of the tokens is supervised."""
    ids = torch.arange(1, sum(lengths) + 1)
    return [Document(part, part % 3 == 0) for part in ids.split(lengths)]


def content(rows: Batch) -> list[list[int]]:
    """The packed documents as lists of ids; checks what must hold of any row."""
    padding_RT = rows.documents_BT == -1
    assert not rows.loss_mask_BT[padding_RT].any()
    assert not rows.ids_BT[padding_RT].any()
    assert torch.equal(rows.loss_mask_BT[~padding_RT], rows.ids_BT[~padding_RT] % 3 == 0)
    documents = []
    for ids, numbers in zip(rows.ids_BT.tolist(), rows.documents_BT.tolist(), strict=True):
        real = [n for n in numbers if n >= 0]
        assert numbers == real + [-1] * (len(numbers) - len(real)), "padding stands at the end"
        assert real[0] == 0 and all(b - a in (0, 1) for a, b in pairwise(real))
        documents += [
            [i for i, n in zip(ids, numbers, strict=True) if n == number]
            for number in range(real[-1] + 1)
        ]
    return documents


some_token = st.lists(st.integers(0, 15), min_size=1, max_size=12).filter(any)
fitting = st.lists(st.integers(1, SEQ), min_size=1, max_size=12)


@given(some_token, st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_stream_loses_nothing_and_cuts_only_at_row_ends(lengths: list[int], seq_len: int) -> None:
    documents = make(lengths)
    rows = pack_stream(documents, seq_len)
    pieces = content(rows)
    assert [i for piece in pieces for i in piece] == list(range(1, sum(lengths) + 1))
    ends = set(torch.tensor(lengths).cumsum(0).tolist())
    row_ends = set(range(seq_len, sum(lengths) + 1, seq_len))
    assert {piece[-1] for piece in pieces} == ends - {0} | row_ends
    assert len(rows.ids_BT) == -(-sum(lengths) // seq_len)


@given(fitting)
@settings(max_examples=60, deadline=None)
def test_whole_keeps_every_document_whole_and_once(lengths: list[int]) -> None:
    documents = make(lengths)
    rows = pack_whole(documents, SEQ)
    assert sorted(content(rows)) == [document.ids_T.tolist() for document in documents]
    assert all(torch.equal(a, b) for a, b in zip(rows, pack_whole(documents, SEQ), strict=True))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_first_fit_decreasing_equals_the_plain_loop(lengths: list[int]) -> None:
    bins: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        for members in bins:
            if sum(lengths[i] for i in members) + lengths[item] <= 20:
                members.append(item)
                break
        else:
            bins.append([item])
    items_N, starts = first_fit_decreasing(np.array(lengths), 20)
    assert [part.tolist() for part in np.split(items_N, starts[1:])] == bins


def test_stream_by_hand() -> None:
    rows = pack_stream(make([2, 0, 3, 4]), 4)
    assert rows.ids_BT.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 0, 0, 0]]
    assert rows.documents_BT.tolist() == [[0, 0, 1, 1], [0, 1, 1, 1], [0, -1, -1, -1]]
    assert [column.dtype for column in rows] == [torch.int32, torch.bool, torch.int32]  # at rest
    assert [column.dtype for column in rows.int64()] == [torch.int64, torch.bool, torch.int64]


@pytest.mark.parametrize("pack", [pack_stream, pack_whole])
def test_nothing_to_pack_is_refused(pack) -> None:
    for documents in ([], make([0, 0])):
        with pytest.raises(ValueError, match="nothing to pack"):
            pack(documents, 4)


def test_a_document_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="document 1 has 5 tokens and a row holds 4"):
        pack_whole(make([2, 5]), 4)


@given(fitting, st.integers(3, 9), st.integers(1, 2))
@settings(max_examples=60, deadline=None)
def test_all_pieces_of_a_text_begin_with_the_prefix(
    lengths: list[int], seq_len: int, size: int
) -> None:
    prefix = list(range(-size, 0))
    documents = []
    for ids_T, _ in make(lengths):
        ids_T = torch.cat([torch.tensor(prefix), ids_T])
        documents.append(Document(ids_T, torch.ones_like(ids_T, dtype=torch.bool)))
    rows = pack_stream(documents, seq_len, prefix)
    said: list[int] = []
    for ids_T, mask_T, documents_T in zip(*rows, strict=True):
        for number in range(int(documents_T.max()) + 1):
            ids, mask = (
                ids_T[documents_T == number].tolist(),
                mask_T[documents_T == number].tolist(),
            )
            assert ids[:size] == prefix and len(ids) > size
            goes_on = bool(said) and said[-1] not in ends(lengths)
            assert mask == [not goes_on] * size + [True] * (len(ids) - size)
            said += ids[size:]
        assert int((documents_T < 0).sum()) <= size or said[-1] == sum(lengths)
    assert said == list(range(1, sum(lengths) + 1))


def ends(lengths: list[int]) -> set[int]:
    return set(torch.tensor(lengths).cumsum(0).tolist())


def test_a_prefix_by_hand() -> None:
    rows = pack_stream(
        [Document(torch.tensor(ids), torch.ones(len(ids)) > 0) for ids in ([9, 1, 2, 3], [9, 4])],
        3,
        [9],
    )
    assert rows.ids_BT.tolist() == [[9, 1, 2], [9, 3, 0], [9, 4, 0]]
    assert rows.loss_mask_BT.tolist() == [[True] * 3, [False, True, False], [True, True, False]]
    assert rows.documents_BT.tolist() == [[0, 0, 0], [0, 0, -1], [0, 0, -1]]
    with pytest.raises(
        ValueError,
        match=r"data.seq_len is 3, and the tokenizer puts 3 tokens in front of every text",
    ):
        pack_stream(make([2]), 3, [7, 8, 9])
