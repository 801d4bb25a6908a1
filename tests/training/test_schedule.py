import math

import pytest
import torch

from specdec.training.schedule import WarmupCosine


def test_warm_up_is_linear_and_never_zero() -> None:
    schedule = WarmupCosine(warmup=0.1)
    assert [schedule.factor(step, 40) for step in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_then_half_a_cosine() -> None:
    schedule = WarmupCosine(warmup=0.1, floor=0.2)
    assert schedule.factor(4, 40) == 1.0
    assert schedule.factor(22, 40) == pytest.approx(0.6)  # halfway, halfway between one and the floor
    assert schedule.factor(13, 40) == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert schedule.factor(40, 40) == pytest.approx(0.2)
    assert [schedule.factor(step, 40) for step in (58, 76, 400)] == pytest.approx([0.2] * 3)  # it does not rise again
    falling = [schedule.factor(step, 40) for step in range(4, 41)]
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize("total", [1, 2, 3, 5])
@pytest.mark.parametrize("warmup", [0.0, 0.03, 0.5, 0.99])
def test_short_runs_still_learn(total: int, warmup: float) -> None:
    factors = [WarmupCosine(warmup).factor(step, total) for step in range(total)]
    assert all(0 < factor <= 1 for factor in factors) and max(factors) == 1.0


def test_it_drives_the_optimizer() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = WarmupCosine(warmup=0.5).build(optimizer, 4)
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([1.0, 2.0, 2.0, 1.0, 0.0])


@pytest.mark.parametrize("values", [{"warmup": -0.1}, {"warmup": 1.0}, {"floor": -0.1}, {"floor": 1.1}])
def test_shares_out_of_range_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"warmup must lie in \[0, 1\) and floor in \[0, 1\]"):
        WarmupCosine(**values)
