"""The drafter's layer, on one sequence: M new nodes that see each other causally, and whatever was kept before them.

Legend: M new nodes, S keys, H width, W input width, h query heads, g key heads, d head width.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.parity.reference.checkpoint import Served
from specdec.parity.reference.rotary import turn

Past = list[tuple[Tensor, Tensor]]
"""Keys and values of every layer, (g, S, d) each; column j stands at position j."""


def no_past(served: Served) -> Past:
    """Before the first node."""
    empty = served.weights["fc.weight"].new_empty(served.settings.groups, 0, served.settings.head)
    return [(empty, empty)] * served.settings.layers


def cut(past: Past, length: int) -> Past:
    """The first nodes alone."""
    return [(k_gSd[:, :length], v_gSd[:, :length]) for k_gSd, v_gSd in past]


def rms(served: Served, name: str, x: Tensor) -> Tensor:
    """Unit root mean square over the last axis, in float32 at least, times the weight."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    unit = wide / (wide.square().mean(-1, keepdim=True) + served.settings.eps).sqrt()
    return unit.to(x.dtype) * served.weights[f"{name}.weight"]


def project(served: Served, name: str, x: Tensor) -> Tensor:
    """A matrix, and its bias if there is one."""
    return F.linear(x, served.weights[f"{name}.weight"], served.weights.get(f"{name}.bias"))


def attention(served: Served, i: int, x_MW: Tensor, positions_M: Tensor, past: Past) -> Tensor:
    """Layer ``i``'s attention, (M, H); the new keys are added to ``past``."""
    read, at = served.settings, f"layers.{i}.self_attn"
    q_hMd, k_gMd, v_gMd = (
        project(served, f"{at}.{name}_proj", x_MW).unflatten(-1, (-1, read.head)).transpose(0, 1) for name in "qkv"
    )
    if read.head_norms:
        q_hMd, k_gMd = rms(served, f"{at}.q_norm", q_hMd), rms(served, f"{at}.k_norm", k_gMd)
    q_hMd, k_gMd = (turn(x, positions_M, read.rope) for x in (q_hMd, k_gMd))
    past[i] = torch.cat([past[i][0], k_gMd], 1), torch.cat([past[i][1], v_gMd], 1)
    k_hSd, v_hSd = (x.repeat_interleave(read.heads // read.groups, 0) for x in past[i])
    back_MS = positions_M[:, None] - torch.arange(k_hSd.shape[1], device=positions_M.device)
    window = read.windows[i]
    hidden_MS = (back_MS < 0) if window is None else (back_MS < 0) | (back_MS >= window)
    scores_hMS = (q_hMd @ k_hSd.mT / read.head**0.5).masked_fill(hidden_MS, float("-inf"))
    shares_hMS = scores_hMS.softmax(-1, dtype=torch.promote_types(scores_hMS.dtype, torch.float32))
    return project(served, f"{at}.o_proj", (shares_hMS.to(v_hSd.dtype) @ v_hSd).transpose(0, 1).flatten(1))


def feed_forward(served: Served, i: int, x_MH: Tensor) -> Tensor:
    """Layer ``i``'s, gated by SiLU, behind its norm."""
    at = f"layers.{i}.mlp"
    x_MH = rms(served, f"layers.{i}.post_attention_layernorm", x_MH)
    gate = F.silu(project(served, f"{at}.gate_proj", x_MH))
    return project(served, f"{at}.down_proj", gate * project(served, f"{at}.up_proj", x_MH))


def further(served: Served, h_MH: Tensor, positions_M: Tensor, past: Past) -> Tensor:
    """The layers after the first: plain, each normalised on its way in."""
    for i in range(1, served.settings.layers):
        normed_MH = rms(served, f"layers.{i}.input_layernorm", h_MH)
        h_MH = h_MH + attention(served, i, normed_MH, positions_M, past)
        h_MH = h_MH + feed_forward(served, i, h_MH)
    return h_MH
