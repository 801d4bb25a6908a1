"""A node's own keys of the later unroll steps: one diagonal column of scores for each step, next to the causal block.

Legend: B batch, g key heads, r query heads of a key head, T nodes, d head width.
"""

import torch
from torch import Tensor

from specdec.nn.backend import pointwise, wide


@pointwise
def own_scores(q_BgrTd: Tensor, k_BgTd: Tensor) -> Tensor:
    """Return each node's score of its own key of one step, (B, g, r, T), in float32 or wider."""
    kind = wide(q_BgrTd.dtype)
    products = q_BgrTd.to(kind) * k_BgTd.unsqueeze(2).to(kind)
    return products.sum(-1) * q_BgrTd.shape[-1] ** -0.5


@pointwise
def add_own_value(
    out_BgrTd: Tensor, scores_BgrT: Tensor, lse_BgrT: Tensor, v_BgTd: Tensor
) -> Tensor:
    """Return an output with each node's own value of one step, weighed under the log-sum-exp of all its scores."""
    weights = torch.exp(scores_BgrT - lse_BgrT).unsqueeze(-1)
    return out_BgrTd.to(weights.dtype) + weights * v_BgTd.unsqueeze(2)


@pointwise
def own_gradients(
    grad_BgrTd: Tensor,
    q_BgrTd: Tensor,
    lse_BgrT: Tensor,
    inner_BgrT: Tensor,
    k_BgTd: Tensor,
    v_BgTd: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients by queries, own keys and own values of one step.

    Args:
        grad_BgrTd: by the attention's output.
        inner_BgrT: ``grad . out`` of every node: the sum of each weight times its gradient.
    """
    kind = lse_BgrT.dtype
    scale = q_BgrTd.shape[-1] ** -0.5
    q = q_BgrTd.to(kind)
    grad = grad_BgrTd.to(kind)
    k = k_BgTd.unsqueeze(2).to(kind)
    v = v_BgTd.unsqueeze(2).to(kind)
    weights = torch.exp((q * k).sum(-1) * scale - lse_BgrT)
    by_scores = (weights * ((grad * v).sum(-1) - inner_BgrT) * scale).unsqueeze(-1)
    by_k = (by_scores * q).sum(2)
    by_v = (weights.unsqueeze(-1) * grad).sum(2)
    return by_scores * k, by_k.to(k_BgTd.dtype), by_v.to(v_BgTd.dtype)
