"""The gated feed-forward block."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.nn.pointwise import pointwise
from specdec.nn.remade import remade


@pointwise
def _forward(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


@pointwise
def _backward(grad: Tensor, both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    share = torch.sigmoid(gate)
    silu = gate * share
    return torch.cat([grad * up * (share + silu * (1 - share)), grad * silu], dim=-1)


class _Gate(torch.autograd.Function):
    """``silu(gate) * up`` of ``[gate, up]``, which keeps its input and nothing else."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        return _forward(both)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _backward(grad, *ctx.saved_tensors)


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (https://arxiv.org/abs/2002.05202), without biases; one matrix for both."""

    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(width, 2 * intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to (..., width)."""
        both = self.gate_up_proj(x)
        if not both.requires_grad:
            return self.down_proj(_forward(both))
        product = _Gate.apply(both)
        with remade(product, _forward, both):  # as wide as the rest of the layer, and cheap to make again
            return self.down_proj(product)
