"""Optimizers that know which parameters are matrices: AdamW, and Muon with AdamW.

Both are called with named parameters, ``[("layers.0.mlp.up.weight", parameter), ...]``, so that the optimizer's
groups say by name whom they hold.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from specdec.utils.machine import multiplies_bfloat16
from specdec.utils.numbers import NonNegative, Positive, Rate, Share, check_numbers

TABLES = (
    "embed_tokens", "lm_head", "recurrence.previous", "recurrence.transition", "recurrence.confidence",
)  # fmt: skip
"""Modules whose matrices are look-up tables over a vocabulary, or have one row; the last three are DSpark's heads."""


def hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is for Muon: two axes, and neither embedding nor head, which ``TABLES`` tells by name."""
    return parameter.ndim == 2 and not any(f".{table}." in f".{name}" for table in TABLES)


class AdamW(torch.optim.AdamW):
    """AdamW (https://arxiv.org/abs/1711.05101) that decays matrices, and never the scales of norms or biases.

    Args:
        params: named parameters, or bare ones.
        lr: learning rate.
        betas: decay of the running mean and of the running square; EAGLE's.
        eps: added to the denominator.
        weight_decay: of parameters with two axes or more, times ``lr`` per step.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: Rate = 1e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: Positive = 1e-8,
        weight_decay: NonNegative = 0.0,
    ) -> None:
        check_numbers(
            AdamW.__init__, {"lr": lr, "eps": eps, "weight_decay": weight_decay}, "AdamW."
        )
        split: tuple[list[Any], list[Any]] = [], []  # those with one axis, those with more
        for item in params:
            parameter = item[1] if isinstance(item, tuple) else item
            split[parameter.ndim > 1].append(item)
        groups: list[dict[str, Any]] = [
            {"params": split[1]},
            {"params": split[0], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        # fused is three times as fast on a CPU as the next, and nine times as fast as torch's own choice there
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        # Lightning refuses to clip for fused kernels, since they can take a gradient scaler's factor, and knows them by
        # this attribute alone; here the factor is left to the scaler, so gradients may be clipped
        self._step_supports_amp_scaling = False


@torch.no_grad()
def orthogonal(update: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix with its singular values moved close to one by five steps of Newton and Schulz, taken in ``dtype``."""
    # Muon's quintic
    a = 3.4445
    b = -4.7750
    c = 2.0315
    tall = update.shape[0] > update.shape[1]
    x = update.to(dtype)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)  # no singular value above one
    for _ in range(5):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if tall else x


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the hidden matrices, AdamW for embedding, head, norms and biases, as one optimizer.

    One schedule, one clipping and one state dict serve both. Muon (https://kellerjordan.github.io/posts/muon) is
    scaled as in https://arxiv.org/abs/2502.16982, so that its learning rates are of AdamW's size.

    Args:
        params: named parameters; see :func:`hidden_matrix` for who gets Muon.
        lr: learning rate of the hidden matrices.
        lr_rest: learning rate of all others.
        weight_decay: of the hidden matrices, times ``lr`` per step; the others have none.
        momentum: Muon's, with Nesterov's correction.
        betas: AdamW's.

    Raises:
        ValueError: the parameters have no names, or none of them is a hidden matrix.
    """

    def __init__(
        self,
        params: Iterable[tuple[str, nn.Parameter]],
        lr: Rate = 1e-3,
        lr_rest: Rate = 1e-4,
        weight_decay: NonNegative = 0.1,
        momentum: Share = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        numbers = {"lr": lr, "lr_rest": lr_rest, "weight_decay": weight_decay, "momentum": momentum}
        check_numbers(MuonAdamW.__init__, numbers, "MuonAdamW.")
        named = list(params)
        if not all(isinstance(item, tuple) for item in named):
            raise ValueError(
                "MuonAdamW tells embedding and head by their names: give it named_parameters()"
            )
        matrices, rest = (
            [item for item in named if hidden_matrix(*item) == hidden] for hidden in (True, False)
        )
        if not matrices:
            raise ValueError(
                "MuonAdamW finds no hidden matrix among the trainable parameters: use AdamW"
            )
        muon = {"params": matrices, "lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        self._adamw = (
            torch.optim.AdamW(rest, lr=lr_rest, betas=betas, weight_decay=0.0, fused=True)
            if rest
            else None
        )
        super().__init__([muon, *(self._adamw.param_groups if self._adamw else [])], defaults={})
        self._share()

    def _share(self) -> None:
        """Let AdamW read this optimizer's second group and keep its state here."""
        if self._adamw is not None:
            self._adamw.param_groups = self.param_groups[1:]
            self._adamw.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a loaded state, for both."""
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        muon = self.param_groups[0]
        for parameter in (parameter for parameter in muon["params"] if parameter.grad is not None):
            grad = parameter.grad
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(
                    grad, memory_format=torch.preserve_format
                )
            mean = state["momentum_buffer"].lerp_(grad, 1 - muon["momentum"])
            # some CPUs have no instructions for bfloat16 and take some 70 times as long for its products
            slow = parameter.device.type == "cpu" and not multiplies_bfloat16()
            update = orthogonal(
                grad.lerp(mean, muon["momentum"]), torch.float32 if slow else torch.bfloat16
            )
            parameter.mul_(1 - muon["lr"] * muon["weight_decay"])
            # as large as AdamW's are
            parameter.add_(update, alpha=-muon["lr"] * 0.2 * max(parameter.shape) ** 0.5)
        if self._adamw is not None:
            self._adamw.step()
        return loss
