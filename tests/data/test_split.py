import pytest
import torch

from specdec.data.split import generator, split


def test_split_is_a_partition_that_depends_on_the_seed() -> None:
    items = list(range(100))
    train, val = split(items, 0.05, seed=3)
    assert len(val) == 5
    assert sorted(train + val) == items
    assert train == sorted(train)
    assert split(items, 0.05, seed=3) == (train, val)
    assert split(items, 0.05, seed=4)[1] != val


def test_a_small_fraction_still_sets_one_aside() -> None:
    assert [len(part) for part in split("abc", 0.05, seed=0)] == [2, 1]


@pytest.mark.parametrize(("count", "fraction"), [(1, 0.05), (4, 0.9), (0, 0.5)])
def test_an_empty_part_is_refused(count: int, fraction: float) -> None:
    with pytest.raises(ValueError, match=r"cannot be split.*give validation files \(val\)"):
        split(range(count), fraction, seed=0)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_a_fraction_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"val_fraction is .*give validation files"):
        split(range(10), fraction, seed=0)


def test_generator_depends_on_its_numbers_alone() -> None:
    torch.manual_seed(0)
    a = torch.rand(3, generator=generator(1, 2))
    torch.manual_seed(5)
    assert torch.equal(a, torch.rand(3, generator=generator(1, 2)))
    assert not torch.equal(a, torch.rand(3, generator=generator(2, 1)))
