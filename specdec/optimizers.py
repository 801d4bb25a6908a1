"""Optimizers that know which parameters are matrices: AdamW, and Muon with AdamW.

Both are called with named parameters, ``[("layers.0.mlp.up.weight", parameter), ...]``, so that the optimizer's
groups say by name whom they hold.
"""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import torch
import torch.optim._muon
from torch import Tensor, nn

from specdec.host import multiplies_bfloat16

Named = Iterable[tuple[str, nn.Parameter]]
TABLES = ("embed_tokens", "lm_head")  # modules whose matrices are look-up tables over a vocabulary


def hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is for Muon: two axes, and neither embedding nor head, which ``TABLES`` tells by name."""
    return parameter.ndim == 2 and not set(name.split(".")) & set(TABLES)


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
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        matrices: list[Any] = []
        rest: list[Any] = []
        for item in params:
            parameter = item[1] if isinstance(item, tuple) else item
            (matrices if parameter.ndim > 1 else rest).append(item)
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": rest, "weight_decay": 0.0}]
        # fused is three times as fast on a CPU as the next, and nine times as fast as torch's own choice there
        super().__init__(
            [group for group in groups if group["params"]],
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            fused=True,
        )
        # fused kernels can take a gradient scaler's factor, and Lightning refuses to clip for those that would;
        # this one leaves the factor to the scaler, so its gradients may be clipped
        self._step_supports_amp_scaling = False


def orthogonal(update: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """What torch's Muon makes of a gradient, by Newton and Schulz's iteration, with products in float32.

    torch rounds to bfloat16, whose products take some 70 times as long on a CPU that has no instructions for them.
    """
    a, b, c = coefficients
    x = update if (wide := update.shape[0] <= update.shape[1]) else update.T
    x = x.float() / x.float().norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the hidden matrices, AdamW for embedding, head, norms and biases, as one optimizer.

    One schedule, one clipping and one state dict serve both. Muon (https://kellerjordan.github.io/posts/muon) is
    scaled as in https://arxiv.org/abs/2502.16982, so that its learning rates are of AdamW's size. Its products are in
    bfloat16, but for a CPU that has no instructions for those: there they are float32's.

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
        params: Named,
        lr: float = 1e-3,
        lr_rest: float = 1e-4,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        named = list(params)
        if not all(isinstance(item, tuple) for item in named):
            raise ValueError("MuonAdamW tells embedding and head by their names: give it named_parameters()")
        matrices = [item for item in named if hidden_matrix(*item)]
        if not matrices:
            raise ValueError("MuonAdamW finds no hidden matrix among the trainable parameters: use AdamW")
        rest = [item for item in named if not hidden_matrix(*item)]
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
            )
        ]
        if rest:
            self._parts.append(torch.optim.AdamW(rest, lr=lr_rest, betas=betas, weight_decay=0.0, fused=True))
        super().__init__([group for part in self._parts for group in part.param_groups], defaults={})
        self._share()

    def _share(self) -> None:
        """Let both parts read this optimizer's groups and keep their state in its own: a group is a part."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a loaded state, for both."""
        super().__setstate__(state)
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._products():
            for part in self._parts:
                part.step()
        return loss

    def _products(self) -> contextlib.AbstractContextManager[Any]:
        on_cpu = self.param_groups[0]["params"][0].device.type == "cpu"
        if not on_cpu or multiplies_bfloat16():
            return contextlib.nullcontext()
        return patch.object(torch.optim._muon, "_zeropower_via_newtonschulz", orthogonal)
