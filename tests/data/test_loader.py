import io
from itertools import chain
from typing import Any

import pytest
import torch

from specdec.data.batch import Batch, Document
from specdec.data.loader import ResumableLoader
from specdec.data.packing import pad

ROWS = 11


def rows() -> Batch:
    return pad([Document(torch.full((2,), i), torch.ones(2, dtype=torch.bool)) for i in range(ROWS)], 4)


def seen(loader: ResumableLoader) -> list[list[int]]:
    return [batch.ids_BT[:, 0].tolist() for batch in loader]


def saved(state: dict) -> dict:
    """The state after a trip through a checkpoint that may hold no code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_batches_cover_the_rows_and_are_the_same_in_every_run() -> None:
    first = ResumableLoader(rows(), 4, seed=5)
    epochs = [seen(first), seen(first)]
    assert [len(batch) for batch in epochs[0]] == [4, 4, 3]
    assert [sorted(chain(*epoch)) for epoch in epochs] == [list(range(ROWS))] * 2
    assert epochs[0] != epochs[1]
    torch.manual_seed(99)
    second = ResumableLoader(rows(), 4, seed=5)
    assert [seen(second), seen(second)] == epochs
    assert len(first) == 3


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    seen(ResumableLoader(rows(), 4))
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("taken", [0, 2, 5, 6])
def test_a_resumed_loader_goes_on_exactly(num_workers: int, taken: int) -> None:
    whole = ResumableLoader(rows(), 2, seed=5)
    expected = [seen(whole) for _ in range(4)]

    stopped = ResumableLoader(rows(), 2, seed=5, num_workers=num_workers)
    assert seen(stopped) == expected[0]
    iterator = iter(stopped)
    assert [next(iterator).ids_BT[:, 0].tolist() for _ in range(taken)] == expected[1][:taken]
    state = saved(stopped.state_dict())
    iterator.close()

    resumed = ResumableLoader(rows(), 2, seed=5, num_workers=num_workers)
    resumed.load_state_dict(state)
    left = [*([expected[1][taken:]] if taken < 6 else []), *expected[2:]]  # no empty epoch after a whole one
    assert [seen(resumed) for _ in left] == left


def test_an_epoch_is_left_by_drawing_only() -> None:
    expected = [seen(loader) for loader in [ResumableLoader(rows(), 2, seed=5)] for _ in range(3)]
    loader = ResumableLoader(rows(), 2, seed=5)
    iter(loader)
    assert next(iter(loader)).ids_BT[:, 0].tolist() == expected[0][0]
    assert seen(loader) == expected[1]
    place = loader.state_dict()
    iter(loader)
    assert loader.state_dict() == place
    assert seen(loader) == expected[2]


def other(column: int) -> Batch:
    """One token, its mask or its document is another."""
    columns = [each.clone() for each in rows()]
    columns[column][3, 1] = 0 if column < 2 else 1
    return Batch(*columns)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 2}, "seed was 1 in the checkpoint and is 2 now"),
        ({"shuffle": False}, "shuffle was True"),
        ({"world_size": 2}, "processes was 1"),
        ({"batch_size": 3}, "batch_size was 2"),
        ({"rows": pad([Document(torch.ones(2, dtype=torch.long), torch.ones(2, dtype=torch.bool))], 4)}, "rows was 11"),
        ({"rows": other(0)}, "content was "),
        ({"rows": other(1)}, "content was "),
        ({"rows": other(2)}, "content was "),
    ],
)
def test_another_order_cannot_be_resumed(other: dict[str, Any], message: str) -> None:
    same = {"rows": rows(), "batch_size": 2, "seed": 1}
    state = ResumableLoader(**same).state_dict()
    with pytest.raises(ValueError, match=message):
        ResumableLoader(**same | other).load_state_dict(state)


def test_processes_draw_blank_rows_when_rows_do_not_come_out_even() -> None:
    loaders = [ResumableLoader(rows(), 2, seed=5, rank=rank, world_size=2) for rank in range(2)]
    batches = [list(loader) for loader in loaders]
    assert [len(share) for share in batches] == [3, 3]
    drawn = [row for share in batches for batch in share for row in zip(*batch, strict=True)]
    blank = [row for row in drawn if (row[2] == -1).all()]
    assert len(drawn) == 12 and len(blank) == 1
    assert not blank[0][1].any()
    assert sorted(int(row[0][0]) for row in drawn if row[2][0] == 0) == list(range(ROWS))


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_size is 0"):
        ResumableLoader(rows(), 0)
    with pytest.raises(ValueError, match="num_workers is -1"):
        ResumableLoader(rows(), 1, num_workers=-1)
