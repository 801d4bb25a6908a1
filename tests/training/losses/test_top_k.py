import math

import pytest
import torch

from specdec.training.losses import SoftCrossEntropy, TopKCrossEntropy
from tests.training.losses.law_rows import random_rows

ROWS = random_rows()


@pytest.mark.parametrize("k", [1, 3, 6])
def test_it_is_its_definition(k: int) -> None:
    """Neither law is renormalised over the tokens kept."""
    got_R = TopKCrossEntropy(k)(ROWS)
    log_q_RD = ROWS.draft_RD.log_softmax(-1)
    for r in range(5):
        p, log_q = ROWS.p_RD[r].tolist(), log_q_RD[r].tolist()
        kept = sorted(range(7), key=lambda d: -p[d])[:k]
        assert float(got_R[r]) == pytest.approx(-sum(p[d] * log_q[d] for d in kept), rel=1e-12)


@pytest.mark.parametrize("k", [7, 1000])
def test_all_tokens_are_the_soft_cross_entropy(k: int) -> None:
    ones_R = torch.ones(5, dtype=torch.float64)
    got, want = TopKCrossEntropy(k).grade(ROWS, ones_R), SoftCrossEntropy().grade(ROWS, ones_R)
    torch.testing.assert_close(got.loss_R, want.loss_R, rtol=1e-12, atol=0)
    torch.testing.assert_close(got.grad_RD, want.grad_RD, rtol=1e-12, atol=1e-15)


def test_tokens_beyond_only_lose() -> None:
    """They have no share in the loss, so the gradient, which descent subtracts, is positive there."""
    grad_RD = TopKCrossEntropy(2).grade(ROWS, torch.ones(5, dtype=torch.float64)).grad_RD
    beyond_RD = torch.ones_like(grad_RD, dtype=torch.bool).scatter_(-1, ROWS.p_RD.topk(2).indices, False)
    assert bool((grad_RD[beyond_RD] > 0).all())
    assert math.isclose(float(grad_RD.sum()), 0, abs_tol=1e-14)


@pytest.mark.parametrize("k", [0, -3])
def test_no_tokens_no_loss(k: int) -> None:
    with pytest.raises(ValueError, match=r"TopKCrossEntropy\.k must be at least 1"):
        TopKCrossEntropy(k)
