import math
from collections.abc import Callable

import pytest
import torch

from specdec.training.losses import (
    ForwardKL,
    HardCrossEntropy,
    JensenShannon,
    LawLoss,
    ReverseKL,
    Rows,
    SoftCrossEntropy,
    TotalVariation,
)
from tests.training.losses.law_rows import alike, random_rows

Law = list[float]
ROWS = random_rows()


def laws(rows: Rows, r: int) -> tuple[Law, Law]:
    """p and q of a row, in plain Python."""
    odds = [math.exp(x) for x in rows.draft_RD[r].tolist()]
    return rows.p_RD[r].tolist(), [x / sum(odds) for x in odds]


def kl(a: Law, b: Law) -> float:
    return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))


def jsd(p: Law, q: Law, beta: float) -> float:
    middle = [beta * x + (1 - beta) * y for x, y in zip(p, q, strict=True)]
    return beta * kl(p, middle) + (1 - beta) * kl(q, middle)


@pytest.mark.parametrize(
    ("loss", "definition"),
    [
        (SoftCrossEntropy(), lambda p, q: -sum(x * math.log(y) for x, y in zip(p, q, strict=True))),
        (ForwardKL(), kl),
        (ReverseKL(), lambda p, q: kl(q, p)),
        (JensenShannon(), lambda p, q: jsd(p, q, 0.5)),
        (JensenShannon(0.2), lambda p, q: jsd(p, q, 0.2)),
        (HardCrossEntropy(), lambda p, q: -math.log(q[p.index(max(p))])),
    ],
    ids=lambda each: str(each) if isinstance(each, LawLoss) else "",
)
def test_it_is_its_definition(loss: LawLoss, definition: Callable[[Law, Law], float]) -> None:
    got_R = loss(ROWS)
    assert got_R.shape == (5,)
    for r in range(5):
        assert float(got_R[r]) == pytest.approx(definition(*laws(ROWS, r)), rel=1e-12)


def test_total_variation_is_one_minus_the_chance_that_a_sampled_draft_is_accepted() -> None:
    got_R = TotalVariation()(ROWS)
    for r in range(5):
        p, q = laws(ROWS, r)
        mass = math.exp(float(ROWS.log_mass_R[r]))
        accepted = sum(y * min(1.0, mass * x / y) for x, y in zip(p, q, strict=True))
        assert float(got_R[r]) == pytest.approx(1 - accepted, rel=1e-12)


def test_its_floor_is_the_mass_beyond_the_draft_vocabulary() -> None:
    """Not reached by q = p, which is no minimum, for q is larger than p everywhere: every such q is as good."""
    loss_R = TotalVariation()(alike(ROWS))
    torch.testing.assert_close(loss_R, 1 - ROWS.log_mass_R.exp(), rtol=1e-12, atol=0)
    assert bool((TotalVariation()(ROWS) > loss_R).all())


def test_cross_entropys_floor_is_the_targets_entropy() -> None:
    loss_R = SoftCrossEntropy()(alike(ROWS))
    torch.testing.assert_close(loss_R, torch.distributions.Categorical(ROWS.p_RD).entropy(), rtol=1e-12, atol=0)
    assert bool((SoftCrossEntropy()(ROWS) > loss_R).all())


@pytest.mark.parametrize("loss", [ForwardKL(), ReverseKL(), JensenShannon(), JensenShannon(0.9)], ids=str)
def test_a_divergence_is_zero_between_equal_laws_alone(loss: LawLoss) -> None:
    graded = loss.grade(alike(ROWS), torch.ones(5, dtype=torch.float64))
    assert float(graded.loss_R.abs().max()) < 1e-14 and float(graded.grad_RD.abs().max()) < 1e-14
    for seed in range(20):
        assert float(loss(random_rows(seed)).min()) > 0.01


def test_forward_kl_is_cross_entropy_but_for_a_constant() -> None:
    ones_R = torch.ones(5, dtype=torch.float64)
    kl_, cross = (loss.grade(ROWS, ones_R) for loss in (ForwardKL(), SoftCrossEntropy()))
    torch.testing.assert_close(kl_.grad_RD, cross.grad_RD, rtol=1e-13, atol=0)
    entropy_R = torch.distributions.Categorical(ROWS.p_RD).entropy()
    torch.testing.assert_close(cross.loss_R - kl_.loss_R, entropy_R, rtol=1e-12, atol=0)


def swapped(rows: Rows) -> Rows:
    """Target and drafter trade places."""
    log_q_RD = rows.draft_RD.log_softmax(-1)
    return rows._replace(draft_RD=rows.log_p_RD, p_RD=log_q_RD.exp(), log_p_RD=log_q_RD)


def test_divergences_mirror_each_other() -> None:
    mirrored = swapped(ROWS)
    torch.testing.assert_close(JensenShannon()(mirrored), JensenShannon()(ROWS), rtol=1e-12, atol=0)
    torch.testing.assert_close(JensenShannon(0.7)(mirrored), JensenShannon(0.3)(ROWS), rtol=1e-12, atol=0)
    torch.testing.assert_close(ForwardKL()(mirrored), ReverseKL()(ROWS), rtol=1e-12, atol=0)
    assert float((JensenShannon(0.3)(mirrored) - JensenShannon(0.3)(ROWS)).abs().min()) > 1e-4


def test_jensen_shannon_between_the_two_divergences() -> None:
    torch.testing.assert_close(JensenShannon(1e-7)(ROWS) / 1e-7, ForwardKL()(ROWS), rtol=1e-4, atol=0)
    torch.testing.assert_close(JensenShannon(1 - 1e-7)(ROWS) / 1e-7, ReverseKL()(ROWS), rtol=1e-4, atol=0)
    assert float(JensenShannon()(ROWS).max()) < math.log(2)


def test_far_logits() -> None:
    draft_RD = torch.tensor([[500.0, -500.0]])
    log_p_RD = torch.tensor([[-500.0, 500.0]]).log_softmax(-1)
    rows = Rows(draft_RD, log_p_RD.exp(), log_p_RD, torch.zeros(1), torch.tensor([1]))
    for loss in (SoftCrossEntropy(), ForwardKL(), ReverseKL(), HardCrossEntropy()):
        assert float(loss(rows)) == 1000.0
    assert float(TotalVariation()(rows)) == 1.0
    assert float(JensenShannon()(rows)) == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.1, 2.0, math.nan])
def test_a_mixture_needs_both(beta: float) -> None:
    with pytest.raises(ValueError, match=r"JensenShannon\.beta must lie between 0 and 1"):
        JensenShannon(beta)
