"""Noise: how large, on whom, and the same for the same generator; the learning rate over a run.

Legend: B rows, T tokens, N aux layers, H hidden.
"""

import math

import pytest
import torch
from torch import Tensor

from specdec.data import Batch
from specdec.training.noise import FeatureNoise, LengthScaledNoise, UniformNoise, noisy
from specdec.training.schedule import WarmupCosine

NOISES = [UniformNoise(), LengthScaledNoise()]
ONE = torch.zeros(2, 40, dtype=torch.int64)


def features(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        2, 40, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).to(dtype)


def added(
    noise: FeatureNoise,
    documents_BT: Tensor = ONE,
    seed: int = 1,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """What is added, with no feature below it that would round it."""
    zeros = torch.zeros(*documents_BT.shape, 3, 16, dtype=dtype)
    return noise(zeros, documents_BT, torch.Generator().manual_seed(seed))


def test_uniform_fills_its_bounds_and_leaves_none() -> None:
    noise = added(UniformNoise(0.1))
    assert 0.099 < float(noise.max()) <= 0.1 and -0.1 <= float(noise.min()) < -0.099
    assert abs(float(noise.mean())) < 0.005 and math.isclose(
        float(noise.std()), 0.1 / math.sqrt(3), rel_tol=0.03
    )


def test_length_scaled_is_the_published_amplitude() -> None:
    """EAGLE-1's code adds ``(rand - 0.5) * 0.2 * 512 / T``."""
    for T in (32, 128, 512, 1024):
        most = float(added(LengthScaledNoise(), torch.zeros(1, T, dtype=torch.int64)).abs().max())
        assert 0.99 * 0.1 * 512 / T < most <= 0.1 * 512 / T
    assert float(added(LengthScaledNoise(0.2, 64), ONE).abs().max()) == pytest.approx(
        0.2 * 64 / 40, rel=0.01
    )


def test_length_is_the_documents_and_not_the_rows() -> None:
    """A packed document is as noisy as it would be alone."""
    documents = torch.tensor([[0] * 4 + [1] * 30 + [2] * 4 + [-1] * 2])
    noise = added(LengthScaledNoise(0.1, 10), documents).abs()[0].amax((1, 2))
    bounds = [0.1 * 10 / length for length in [4] * 4 + [30] * 30 + [4] * 4 + [2] * 2]
    assert all(
        0.8 * bound < float(most) <= bound for most, bound in zip(noise, bounds, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("noise", NOISES, ids=str)
def test_shape_and_dtype_are_kept_and_the_features_too(
    noise: FeatureNoise, dtype: torch.dtype
) -> None:
    aux, clean = features(dtype), features(dtype)
    noisy = noise(aux, ONE, torch.Generator().manual_seed(1))
    assert noisy.dtype == dtype and noisy.shape == aux.shape and torch.equal(aux, clean)
    torch.testing.assert_close(noisy - aux, added(noise, dtype=dtype), rtol=0, atol=0.05)
    assert not torch.equal(noisy, aux)


def test_a_batchs_generator_depends_on_run_step_rank_and_batch_alone() -> None:
    """So that a resumed run draws what the uninterrupted one would, and no two batches or ranks the same."""
    ids = torch.arange(80).view(2, 40)
    one, other = (Batch(x, torch.ones_like(x, dtype=torch.bool), ONE) for x in (ids, ids + 1))

    def drawn(batch: Batch, step: int, rank: int) -> tuple[float, ...]:
        features_BTNH = torch.zeros(*batch.ids_BT.shape, 1, 1)
        return tuple(noisy(UniformNoise(), features_BTNH, batch, step, rank).flatten()[:3].tolist())

    torch.manual_seed(7)
    first = drawn(one, 3, 1)
    torch.rand(5)  # the global generator may be anywhere
    assert drawn(one, 3, 1) == first
    different = {first, drawn(other, 3, 1), drawn(one, 4, 1), drawn(one, 3, 0)}
    torch.manual_seed(8)
    assert len(different | {drawn(one, 3, 1)}) == 5


@pytest.mark.parametrize("value", [0.0, -0.1, math.inf, math.nan])
@pytest.mark.parametrize(
    ("kind", "name"),
    [(UniformNoise, "amplitude"), (LengthScaledNoise, "amplitude"), (LengthScaledNoise, "length")],
)
def test_a_size_without_meaning_is_refused(kind: type, name: str, value: float) -> None:
    with pytest.raises(
        ValueError, match=rf"{kind.__name__}\.{name} must be (above|finite|at least|a whole number)"
    ):
        kind(**{name: value})


def test_then_half_a_cosine() -> None:
    schedule = WarmupCosine(warmup=0.1, floor=0.2)
    assert schedule.factor(4, 40) == 1.0
    # halfway, halfway between one and the floor
    assert schedule.factor(22, 40) == pytest.approx(0.6)
    assert schedule.factor(13, 40) == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert schedule.factor(40, 40) == pytest.approx(0.2)
    # it does not rise again
    assert [schedule.factor(step, 40) for step in (58, 76, 400)] == pytest.approx([0.2] * 3)
    falling = [schedule.factor(step, 40) for step in range(4, 41)]
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize(
    ("values", "range_"),
    [({"warmup": -0.1}, "at least 0"), ({"warmup": 1.0}, "below 1"), ({"floor": -0.1}, "at least 0"),
     ({"floor": 1.1}, "at most 1")],
)  # fmt: skip
def test_shares_out_of_range_are_refused(values: dict[str, float], range_: str) -> None:
    with pytest.raises(ValueError, match=rf"^schedule\.{next(iter(values))} must be {range_}, not"):
        WarmupCosine(**values)
