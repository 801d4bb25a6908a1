import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.data.sampler import BLANK, EpochSampler


@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 3), st.booleans())
def test_processes_share_every_row_once_and_evenly(count: int, world: int, epoch: int, shuffle: bool) -> None:
    samplers = [EpochSampler(count, 7, shuffle, rank, world) for rank in range(world)]
    shares = [sampler.order(epoch) for sampler in samplers]
    assert {len(share) for share in shares} == {len(sampler) for sampler in samplers}
    assert len(shares[0]) == -(-count // world)
    rows = [row for share in shares for row in share if row != BLANK]
    assert sorted(rows) == list(range(count))


def test_order_depends_on_seed_and_epoch_alone() -> None:
    orders = {(seed, epoch): tuple(EpochSampler(50, seed).order(epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(set(orders.values())) == 4
    assert orders[1, 1] == tuple(EpochSampler(50, 1).order(1))
    assert EpochSampler(5, 1, shuffle=False).order(3) == [0, 1, 2, 3, 4]
    # one process of one sees what two of two see together
    halves = zip(*(EpochSampler(50, 1, True, rank, 2).order(1) for rank in (0, 1)), strict=True)
    assert orders[1, 1] == tuple(row for pair in halves for row in pair)


def test_iterating_gives_the_epoch_s_order_from_the_start_on() -> None:
    sampler = EpochSampler(20, 1)
    assert list(sampler) == list(sampler) == sampler.order(0)
    sampler.epoch, sampler.start = 2, 7
    assert list(sampler) == sampler.order(2)[7:]
    assert len(sampler) == 20


def test_impossible_samplers_are_refused() -> None:
    with pytest.raises(ValueError, match="no rows"):
        EpochSampler(0)
    with pytest.raises(ValueError, match="rank 2 does not exist among 2"):
        EpochSampler(5, rank=2, world_size=2)
