import pytest
import torch

from specdec.data.batch import Row, collate


def row(length: int, start: int) -> Row:
    ids_T = torch.arange(start, start + length)
    return Row(ids_T, ids_T % 2 == 0, torch.zeros(length, dtype=torch.long))


def test_collate_stacks_rows_in_order_and_keeps_types() -> None:
    batch = collate([row(4, 0), row(4, 10)])
    assert batch.ids_BT.tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert batch.loss_mask_BT.tolist() == [[True, False, True, False]] * 2
    assert [column.dtype for column in batch] == [torch.int64, torch.bool, torch.int64]


def test_collate_refuses_rows_that_do_not_stack() -> None:
    with pytest.raises(ValueError, match=r"one length, got lengths \[3, 4\]"):
        collate([row(4, 0), row(3, 0)])
    with pytest.raises(ValueError, match=r"got lengths \[\]"):
        collate([])
