"""Root-mean-square normalisation."""

from typing import Any

import torch
from torch import Tensor, nn

from specdec.nn.pointwise import pointwise


@pointwise
def _forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight.to(x.dtype) * normed.to(x.dtype)


@pointwise
def _backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    kind = torch.promote_types(x.dtype, torch.float32)
    wide, grad = x.to(kind), grad.to(kind)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * scale
    by_normed = grad * weight.to(kind)
    grad_x = scale * (by_normed - normed * (by_normed * normed).mean(-1, keepdim=True))
    grad_weight = (grad * normed).reshape(-1, weight.shape[0]).sum(0)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


class _RMSNorm(torch.autograd.Function):
    """Keeps its input alone; autograd's own formula would keep three more tensors of its size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _forward(x, weight, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        return *_backward(grad, x, weight, ctx.eps), None


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) * weight`` over the last axis, computed in float32 at least.

    (https://arxiv.org/abs/1910.07467), in the Llama form: the product with the weight is in the input's dtype.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` (..., width); the dtype is kept."""
        if torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad):
            return _RMSNorm.apply(x, self.weight, self.eps)
        return _forward(x, self.weight, self.eps)
