"""Pieces and rows, and what their keys depend on."""

import torch

from specdec.data.packing import pack_stream
from specdec.features.pieces import PackedRow, length, packed_rows, runs
from tests.features.made import Texts


def row(ids: list[int], documents: list[int]) -> PackedRow:
    return PackedRow.of(torch.tensor(ids), torch.tensor(documents))


def test_a_piece_is_a_run_of_one_document() -> None:
    assert runs(torch.tensor([0, 0, 1, -1, 1, 1])) == ((0, 2), (2, 3), (4, 6))
    assert runs(torch.tensor([], dtype=torch.long)) == ()
    assert length(torch.tensor([0, 0, -1, 1, -1, -1])) == 4 and length(torch.tensor([-1, -1])) == 0


def test_a_key_is_of_ids_and_borders_alone() -> None:
    one = row([5, 6, 7, 8, 0, 0], [0, 0, 1, 1, -1, -1])
    assert one.spans == ((0, 2), (2, 4)) and one.tokens == 4
    assert one.key == row([5, 6, 7, 8], [3, 3, 9, 9]).key  # other numbers, no padding
    assert one.key != row([5, 6, 7, 8], [0, 0, 0, 0]).key != row([5, 6, 7, 8], [0, 1, 1, 1]).key
    assert one.piece_keys[1] == row([7, 8], [0, 0]).piece_keys[0]
    assert row([7, 8], [0, 0]).key != row([7, 8], [0, 0]).piece_keys[0]
    assert row([0, 0], [-1, -1]).spans == ()


def test_every_token_of_packed_data_is_in_one_piece() -> None:
    documents, _ = Texts().documents(None)
    batch = pack_stream(documents, 32)
    rows = packed_rows(batch)
    assert sum(one.tokens for one in rows) == sum(len(document.ids_T) for document in documents)
    assert any(len(one.spans) > 2 for one in rows)
