"""A first call of every loss, which finds the one that does not fit before anything is trained.

Legend: R rows, D draft vocabulary, H hidden.
"""

import torch
from torch import Tensor

from specdec.training.losses.base import FeatureLoss, LawLoss, Loss, Rows
from specdec.training.losses.combined import terms

R, D, H = 3, 5, 4


def try_losses(loss: Loss) -> None:
    """Call every term on a few rows.

    Raises:
        ValueError: a loss fails, does not return one finite number a row, or has no gradient; the message names it.
    """
    generator = torch.Generator().manual_seed(0)
    draft, target = (torch.randn(R, D, generator=generator) for _ in range(2))
    log_p = target.log_softmax(-1)
    rows = Rows(draft, log_p.exp(), log_p, torch.full((R,), -0.1), target.argmax(-1))
    state = torch.randn(R, H, generator=generator)
    for term in terms(loss):
        name = f"loss {type(term.loss).__name__}"
        try:
            if isinstance(term.loss, LawLoss):
                made, grad = term.loss.grade(rows, torch.ones(R))
                _check(f"{name}: its gradient", grad, (R, D))
            else:
                assert isinstance(term.loss, FeatureLoss)
                leaf = state.clone().requires_grad_()
                made = term.loss(leaf, state.flip(0))
                torch.autograd.grad(made.sum(), leaf)
        except (RuntimeError, TypeError, IndexError, AttributeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(f"{name} cannot be used: {reason}") from error
        _check(name, made, (R,))


def _check(what: str, made: Tensor, shape: tuple[int, ...]) -> None:
    if not isinstance(made, Tensor) or made.shape != shape:
        found = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
        raise ValueError(f"{what} must be of shape {shape} for {R} rows, one number a row, not {found}")
    if not made.isfinite().all():
        raise ValueError(f"{what} is not finite on ordinary rows")
