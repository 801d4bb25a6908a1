"""Noise: how large, on whom, and the same for the same generator.

Legend: B rows, T tokens, N aux layers, H hidden.
"""

import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
import torch
import yaml
from torch import Generator, Tensor

from specdec.cli import main
from specdec.data import Batch
from specdec.training.noise import (
    GaussianNoise,
    LengthScaledNoise,
    Noise,
    NoNoise,
    UniformNoise,
    batch_generator,
    try_noise,
)

NOISES = [UniformNoise(), LengthScaledNoise(), GaussianNoise()]
ONE = torch.zeros(2, 40, dtype=torch.int64)


def features(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 40, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)


def added(noise: Noise, documents_BT: Tensor = ONE, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """What is added, with no feature below it that would round it."""
    zeros = torch.zeros(*documents_BT.shape, 3, 16, dtype=dtype)
    return noise(zeros, documents_BT, torch.Generator().manual_seed(seed))


def test_uniform_fills_its_bounds_and_leaves_none() -> None:
    noise = added(UniformNoise(0.1))
    assert 0.099 < float(noise.max()) <= 0.1 and -0.1 <= float(noise.min()) < -0.099
    assert abs(float(noise.mean())) < 0.005 and math.isclose(float(noise.std()), 0.1 / math.sqrt(3), rel_tol=0.03)


def test_gaussian_has_its_deviation() -> None:
    noise = added(GaussianNoise(0.05))
    assert abs(float(noise.mean())) < 0.005 and math.isclose(float(noise.std()), 0.05, rel_tol=0.03)
    assert float(noise.abs().max()) > 0.12  # and tails


def test_length_scaled_is_the_published_amplitude() -> None:
    """EAGLE-1's code adds ``(rand - 0.5) * 0.2 * 512 / T``."""
    for T in (32, 128, 512, 1024):
        most = float(added(LengthScaledNoise(), torch.zeros(1, T, dtype=torch.int64)).abs().max())
        assert 0.99 * 0.1 * 512 / T < most <= 0.1 * 512 / T
    assert float(added(LengthScaledNoise(0.2, 64), ONE).abs().max()) == pytest.approx(0.2 * 64 / 40, rel=0.01)


def test_length_is_the_documents_and_not_the_rows() -> None:
    """A packed document is as noisy as it would be alone."""
    documents = torch.tensor([[0] * 4 + [1] * 30 + [2] * 4 + [-1] * 2])
    noise = added(LengthScaledNoise(0.1, 10), documents).abs()[0].amax((1, 2))
    bounds = [0.1 * 10 / length for length in [4] * 4 + [30] * 30 + [4] * 4 + [2] * 2]
    assert all(0.8 * bound < float(most) <= bound for most, bound in zip(noise, bounds, strict=True))


@pytest.mark.parametrize("noise", NOISES, ids=str)
def test_the_same_generator_gives_the_same_noise(noise: Noise) -> None:
    """Whatever the global one has drawn; another seed gives another; every channel its own."""
    first = added(noise)
    state = torch.get_rng_state()
    assert torch.equal(added(noise), first) and not torch.equal(added(noise, seed=2), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.unique().numel() > 0.99 * first.numel()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("noise", NOISES, ids=str)
def test_shape_and_dtype_are_kept_and_the_features_too(noise: Noise, dtype: torch.dtype) -> None:
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
        return tuple(torch.rand(3, generator=batch_generator(batch, step, rank)).tolist())

    torch.manual_seed(7)
    first = drawn(one, 3, 1)
    torch.rand(5)  # the global generator may be anywhere
    assert drawn(one, 3, 1) == first
    different = {first, drawn(other, 3, 1), drawn(one, 4, 1), drawn(one, 3, 0)}
    torch.manual_seed(8)
    assert len(different | {drawn(one, 3, 1)}) == 5


def test_no_noise_is_none() -> None:
    aux = features()
    assert NoNoise()(aux, ONE, torch.Generator()) is aux


@pytest.mark.parametrize("value", [0.0, -0.1, math.inf, math.nan])
@pytest.mark.parametrize(
    ("kind", "name"),
    [(UniformNoise, "amplitude"), (LengthScaledNoise, "amplitude"), (LengthScaledNoise, "length"),
     (GaussianNoise, "std")],
)  # fmt: skip
def test_a_size_without_meaning_is_refused(kind: type, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{kind.__name__}\.{name} must be positive.*NoNoise"):
        kind(**{name: value})


def test_a_base_adds_nothing_of_its_own() -> None:
    with pytest.raises(TypeError, match="Noise must say what it adds"):
        Noise()(features(), ONE, torch.Generator())


def test_from_yaml() -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--noise", type=Noise, default=NoNoise())
    assert parser.instantiate(parser.parse_args([])).noise == NoNoise()
    given = parser.parse_object(yaml.safe_load("noise: {class_path: LengthScaledNoise, init_args: {amplitude: 0.2}}"))
    assert parser.instantiate(given).noise == LengthScaledNoise(0.2)
    assert parser.instantiate(parser.parse_object({"noise": "GaussianNoise"})).noise == GaussianNoise()


@pytest.mark.parametrize("noise", [*NOISES, NoNoise()], ids=str)
def test_every_noise_of_ours_passes_its_trial_which_leaves_no_trace(noise: Noise) -> None:
    state = torch.get_rng_state()
    try_noise(noise, 3, 4)
    assert torch.equal(torch.get_rng_state(), state)


class Own(Noise):
    """A noise that is one function."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        self.function = function

    def __call__(self, aux_BTNH: Tensor, documents_BT: Tensor, generator: Generator) -> Any:
        torch.rand(1)
        return self.function(aux_BTNH)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda aux: aux.mean(2), r"returned \(2, 5, 4\), torch.float32 for features of shape \(2, 5, 3, 4\), torch.f"),
        (lambda aux: aux.double(), r"returned \(2, 5, 3, 4\), torch.float64 for .*torch.float32: keep shape and dtype"),
        (lambda aux: aux + torch.ones(4), r"returned \(2, 5, 3, 4\), torch.float32 for .*torch.bfloat16: keep"),
        (lambda aux: None, "returned a NoneType for features of shape"),
        (lambda aux: (aux - aux[0, 0, 0, 0]).log(), "returned NaN or infinity"),
        (lambda aux: aux.mul_(2), "changed the target's features in place"),
        (lambda aux: aux + torch.ones(7), r"fails on features of shape \(2, 5, 3, 4\), torch.float32: The size"),
        (lambda: None, r"fails on features of shape .*takes 0 positional arguments"),
    ],
)
def test_a_noise_that_does_not_fit_is_named(function: Callable[[Tensor], Any], told: str) -> None:
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=rf"^noise {re.escape(__name__)}\.Own {told}[^\n]*$"):
        try_noise(Own(function), 3, 4)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_noise_may_have_a_parameter_for_every_layer_and_channel() -> None:
    """Those of the drafter that it trains."""
    noise = Own(lambda aux: aux + torch.ones(2, 7, dtype=aux.dtype))
    try_noise(noise, 2, 7)
    with pytest.raises(ValueError, match=r"fails on features of shape \(2, 5, 2, 8\)"):
        try_noise(noise, 2, 8)


@pytest.mark.parametrize("channels", [32, 33])
def test_a_run_tries_the_noise_on_its_own_shape(
    channels: int,
    target_directory: Path,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before its first step, in one line, and without a directory."""

    class PerChannel(Noise):
        def __call__(self, aux_BTNH: Tensor, documents_BT: Tensor, generator: Generator) -> Tensor:
            return aux_BTNH + 0.01 * torch.ones(channels, dtype=aux_BTNH.dtype)

    monkeypatch.setattr(sys, "argv", ["specdec"])
    monkeypatch.setattr(UniformNoise, "__call__", PerChannel.__call__)
    monkeypatch.setenv("SPECDEC_RUNS", str(tmp_path / "runs"))
    given = {
        "model.target.source": target_directory,
        "model.drafter.draft_vocab_size": 200,
        "model.noise": "UniformNoise",
        "data": "TextData",
        "data.train": text_file,
        "data.val": text_file,
        "data.seq_len": 32,
        "trainer.max_steps": 1,
        "trainer.log_every_n_steps": 1,
        "trainer.limit_val_batches": 0,
        "trainer.accelerator": "cpu",
        "trainer.enable_model_summary": "false",
    }
    status = main(["fit", *(f"--{name}={value}" for name, value in given.items())])
    runs = list((tmp_path / "runs").glob("*"))
    if channels == 32:
        assert status == 0 and len(runs) == 1 and (runs[0] / "DONE.json").exists()
    else:
        error = capsys.readouterr().err.splitlines()[-1]
        assert status == 2 and not runs
        assert "UniformNoise fails on features of shape (2, 5, 3, 32), torch.float32: The size" in error
