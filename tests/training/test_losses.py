import itertools
import math

import pytest
import torch

from specdec.training.losses import Loss, SoftCrossEntropy, step_weights


def random(seed: int) -> torch.Tensor:
    return 3 * torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_soft_cross_entropy_is_its_definition() -> None:
    draft, teacher = random(0), random(1)
    got = SoftCrossEntropy()(draft, teacher)
    for r in range(4):
        p, q = ([math.exp(x) for x in rows[r].tolist()] for rows in (teacher, draft))
        want = -sum(a / sum(p) * math.log(b / sum(q)) for a, b in zip(p, q, strict=True))
        assert math.isclose(float(got[r]), want, rel_tol=1e-12)


def test_its_floor_is_the_teachers_entropy_and_its_gradient_there_is_zero() -> None:
    teacher = random(1)
    draft = (teacher + 5.0).requires_grad_()  # a shift changes no law
    loss = SoftCrossEntropy()(draft, teacher)
    torch.testing.assert_close(loss, torch.distributions.Categorical(logits=teacher).entropy(), rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(loss.sum(), draft)
    assert float(gradient.abs().max()) < 1e-14
    assert bool((SoftCrossEntropy()(random(0), teacher) > loss.detach()).all())


def test_far_logits_stay_finite() -> None:
    draft, teacher = torch.tensor([[500.0, -500.0]]), torch.tensor([[-500.0, 500.0]])
    assert float(SoftCrossEntropy()(draft, teacher)) == 1000.0


def test_no_rows_no_loss() -> None:
    assert SoftCrossEntropy()(torch.zeros(0, 5), torch.zeros(0, 5)).shape == (0,)


def test_step_weights_decay_and_sum_to_one() -> None:
    assert step_weights(1, 0.8) == [1.0]
    assert step_weights(3, 1.0) == pytest.approx([1 / 3] * 3)
    weights = step_weights(7, 0.8)
    assert sum(weights) == pytest.approx(1.0)
    assert [b / a for a, b in itertools.pairwise(weights)] == pytest.approx([0.8] * 6)


def test_an_unfinished_loss_says_so() -> None:
    with pytest.raises(TypeError, match="Loss must say how"):
        Loss()(torch.zeros(1, 2), torch.zeros(1, 2))
