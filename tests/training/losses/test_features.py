import dataclasses
import math

import pytest
import torch

from specdec.drafter import Concat, DrafterSpec, LastLayer, Norms
from specdec.training.losses import SmoothL1
from tests.tiny import presets

EAGLE1 = presets()["eagle1"]


@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_it_is_its_definition(beta: float) -> None:
    generator = torch.Generator().manual_seed(0)
    state_RH, target_RH = (2 * torch.randn(4, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    got_R = SmoothL1(beta)(state_RH, target_RH)
    gaps_RH = (state_RH - target_RH).abs()
    assert gaps_RH.min() < beta < gaps_RH.max()  # both branches
    for r in range(4):
        gaps = [abs(a - b) for a, b in zip(state_RH[r].tolist(), target_RH[r].tolist(), strict=True)]
        want = sum(x * x / (2 * beta) if x < beta else x - beta / 2 for x in gaps) / 6
        assert float(got_R[r]) == pytest.approx(want, rel=1e-12)


def test_the_gradient_goes_to_the_state_in_its_own_dtype() -> None:
    state_RH = torch.tensor([[3.0, 0.5], [-4.0, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    loss_R = SmoothL1()(state_RH, torch.zeros(2, 2, dtype=torch.bfloat16))
    assert loss_R.dtype == torch.float32
    (grad_RH,) = torch.autograd.grad(loss_R.sum(), state_RH)
    assert torch.equal(grad_RH, torch.tensor([[0.5, 0.25], [-0.5, 0.0]], dtype=torch.bfloat16))


def test_no_rows() -> None:
    assert SmoothL1()(torch.zeros(0, 4), torch.zeros(0, 4)).shape == (0,)


@pytest.mark.parametrize("beta", [0.0, -1.0, math.nan, math.inf])
def test_beta_is_a_distance(beta: float) -> None:
    with pytest.raises(ValueError, match=r"SmoothL1\.beta must be positive and finite"):
        SmoothL1(beta)


def test_eagle1_has_the_targets_space() -> None:
    SmoothL1().check(EAGLE1)


class Tapped(LastLayer):
    """One state as it is, but before the target's final norm."""

    final_norm = False


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"fusion": Concat()}, "set fusion LastLayer"),
        ({"fusion": Tapped()}, "set fusion LastLayer"),
        ({"norms": Norms(embed=False, hidden=False, output=True)}, "set norms.output=false"),
        ({"head": "own"}, "set head=target"),
    ],
)
def test_a_space_of_its_own_is_refused_with_what_to_change(changes: dict[str, object], advice: str) -> None:
    with pytest.raises(ValueError, match="another space") as error:
        SmoothL1().check(dataclasses.replace(EAGLE1, **changes))
    message = str(error.value)
    assert advice in message and message.count("(set ") == 1 and "\n" not in message


def test_every_reason_is_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"set fusion LastLayer.*set norms\.output=false.*set head=target"):
        SmoothL1().check(DrafterSpec())
