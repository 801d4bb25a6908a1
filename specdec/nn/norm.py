"""Root-mean-square normalisation."""

import torch
from torch import Tensor, nn


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
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)
