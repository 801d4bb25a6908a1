"""Grouped-query attention that leaves masks and keys to the view."""

from torch import Tensor, nn

from specdec.nn.cache import attend
from specdec.nn.rope import rotate
from specdec.nn.view import View


class Attention(nn.Module):
    """Multi-head attention with grouped keys (https://arxiv.org/abs/2305.13245) and an explicit head width.

    Args:
        width_in: width of the input, which EAGLE-3's first layer doubles.
        width: width of the output.
        layer: index under which the view's cache keeps this layer's keys.
    """

    def __init__(self, width_in: int, width: int, heads: int, kv_heads: int, head_dim: int, layer: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.layer = layer
        self.q_proj = nn.Linear(width_in, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width_in, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width_in, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)

    def forward(self, x_BTH: Tensor, view: View, rope: tuple[Tensor, Tensor]) -> Tensor:
        """(B, T, width_in) to (B, T, width); ``rope`` are the tables for ``view.positions_BT``."""
        q, k, v = (
            proj(x_BTH).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, rope), rotate(k, rope)
        if view.cache is None:
            out = attend(q, k, v, view.mask_B1TS)
        else:
            out = view.cache.attend(self.layer, q, k, v, view.mask_B1TS, view.slots_T)
        return self.o_proj(out.transpose(1, 2).flatten(2))
