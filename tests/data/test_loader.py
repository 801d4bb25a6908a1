"""The order of rows: every row once an epoch, shared by processes, the same in every run, and resumable anywhere."""

import io
import random
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.data.loader import BLANK, Batch, ResumableLoader, generator, order, split

LENGTHS = random.Random(0).choices([3, 30, 90, 150, 240], k=53)


def rows(count: int = 53) -> Batch:
    """Row i holds the number i + 1 as often as its length says."""
    real_BT = torch.arange(240) < torch.tensor(LENGTHS[:count])[:, None]
    ids_BT = torch.arange(1, count + 1)[:, None] * real_BT
    return Batch(ids_BT, real_BT, real_BT.long() - 1)


def seen(loader: ResumableLoader) -> list[list[int]]:
    return [batch.ids_BT[:, 0].tolist() for batch in loader]


@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 3), st.booleans())
def test_processes_share_every_row_once_and_evenly(
    count: int, world: int, epoch: int, shuffle: bool
) -> None:
    loaders = [ResumableLoader(rows(count), 1, 7, shuffle, rank, world) for rank in range(world)]
    shares = [loader.numbers(epoch).tolist() for loader in loaders]
    assert {len(share) for share in shares} == {len(loaders[0])} == {-(-count // world)}
    assert sorted(row for share in shares for row in share if row != BLANK) == list(range(count))
    assert shuffle or shares[0] == list(range(0, count, world))


def test_order_depends_on_seed_and_epoch_alone() -> None:
    orders = {
        (seed, epoch): tuple(order(50, seed, epoch).tolist()) for seed in (0, 1) for epoch in (0, 1)
    }
    assert len(set(orders.values())) == 4
    # one process of one sees what two of two see together
    halves = zip(
        *(ResumableLoader(rows(50), 1, 1, True, rank, 2).numbers(1).tolist() for rank in (0, 1)),
        strict=True,
    )
    assert orders[1, 1] == tuple(row for pair in halves for row in pair)
    torch.manual_seed(0)
    first = torch.rand(3, generator=generator(1, 2))
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(3, generator=generator(1, 2)))
    assert not torch.equal(first, torch.rand(3, generator=generator(2, 1)))


def test_batches_cover_the_rows_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    first = ResumableLoader(rows(), 4, seed=5)
    epochs = [seen(first), seen(first)]
    assert torch.equal(torch.rand(2), expected)
    assert [len(batch) for batch in epochs[0]] == [4] * 13 + [1] and len(first) == 14
    assert [sorted(chain(*epoch)) for epoch in epochs] == [list(range(1, 54))] * 2
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("taken", [0, 5, 14])
def test_a_resumed_loader_goes_on_exactly(taken: int) -> None:
    whole = ResumableLoader(rows(), 4, seed=5)
    expected = [seen(whole) for _ in range(4)]
    stopped = ResumableLoader(rows(), 4, seed=5)
    assert seen(stopped) == expected[0]
    iterator = iter(stopped)
    assert [next(iterator).ids_BT[:, 0].tolist() for _ in range(taken)] == expected[1][:taken]
    file = io.BytesIO()
    torch.save(stopped.state_dict(), file)  # a checkpoint that may hold no code
    file.seek(0)
    iterator.close()

    resumed = ResumableLoader(rows(), 4, seed=5)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    # no empty epoch after a whole one
    left = [*([expected[1][taken:]] if taken < 14 else []), *expected[2:]]
    assert [seen(resumed) for _ in left] == left


def test_an_epoch_is_left_by_drawing_only() -> None:
    whole = ResumableLoader(rows(), 4, seed=5)
    expected = [seen(whole) for _ in range(3)]
    loader = ResumableLoader(rows(), 4, seed=5)
    iter(loader)
    assert next(iter(loader)).ids_BT[:, 0].tolist() == expected[0][0]
    assert seen(loader) == expected[1]
    place = loader.state_dict()
    iter(loader)
    assert loader.state_dict() == place
    assert seen(loader) == expected[2]


def changed(column: int) -> Batch:
    """One token, its mask or its document is another."""
    columns = [each.clone() for each in rows(11)]
    columns[column][3, 1] = 0 if column < 2 else 1
    return Batch(*columns)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 2}, "seed was 1 in the checkpoint and is 2 now"),
        ({"shuffle": False}, "shuffle was True"),
        ({"world_size": 2}, "processes was 1"),
        ({"batch_size": 3}, "batch_size was 2"),
        ({"rows": rows(10)}, "rows was 11"),
        ({"rows": changed(0)}, "content was "),
        ({"rows": changed(1)}, "content was "),
        ({"rows": changed(2)}, "content was "),
    ],
)
def test_another_order_cannot_be_resumed(other: dict[str, Any], message: str) -> None:
    same = {"rows": rows(11), "batch_size": 2, "seed": 1}
    state = ResumableLoader(**same).state_dict()
    with pytest.raises(ValueError, match=message):
        ResumableLoader(**same | other).load_state_dict(state)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_processes_draw_blank_rows_when_rows_do_not_come_out_even(world_size: int) -> None:
    loaders = [
        ResumableLoader(rows(), 4, 5, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    batches = [list(loader) for loader in loaders]
    assert len({len(share) for share in batches}) == 1
    drawn = [row for share in batches for batch in share for row in zip(*batch, strict=True)]
    blank = [row for row in drawn if (row[2] == -1).all()]
    assert len(drawn) == 53 + len(blank) and len(blank) == -53 % world_size
    assert not any(row[1].any() or row[0].any() for row in blank)
    assert sorted(int(row[0][0]) for row in drawn if row[2][0] == 0) == list(range(1, 54))


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_size is 0"):
        ResumableLoader(rows(), 0)
    with pytest.raises(ValueError, match="of 0 rows"):
        ResumableLoader(Batch(*(column[:0] for column in rows())), 1)


def test_a_split_is_a_partition_that_depends_on_the_seed() -> None:
    items = list(range(100))
    train, val = split(items, 0.05, seed=3)
    assert len(val) == 5 and sorted(train + val) == items and train == sorted(train)
    assert split(items, 0.05, seed=3) == (train, val)
    assert split(items, 0.05, seed=4)[1] != val
    assert [len(part) for part in split("abc", 0.05, seed=0)] == [2, 1]


@pytest.mark.parametrize(
    ("count", "fraction"), [(1, 0.05), (4, 0.9), (10, 0.0), (10, 1.0), (10, float("nan"))]
)
def test_an_impossible_split_is_refused(count: int, fraction: float) -> None:
    with pytest.raises(ValueError, match=r"val_fraction .*give validation files"):
        split(range(count), fraction, seed=0)
