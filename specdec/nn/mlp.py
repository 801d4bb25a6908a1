"""The gated feed-forward block."""

from torch import Tensor, nn
from torch.nn import functional as F


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (https://arxiv.org/abs/2002.05202), without biases."""

    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, intermediate, bias=False)
        self.up_proj = nn.Linear(width, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to (..., width)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
