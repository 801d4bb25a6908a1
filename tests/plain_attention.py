"""Attention from its formula, for what the fast ones are compared with.

Legend: B batch, h query heads, g key heads, T queries, S keys, d head width.
"""

import math

from torch import Tensor

from specdec.nn.view import Visibility


def plain_block(
    q_BhTd: Tensor, k_BgSd: Tensor, v_BgSd: Tensor, sight: Visibility
) -> tuple[Tensor, Tensor]:
    """What flex attention gives: output and log-sum-exp, both with gradients."""
    k, v = (x.repeat_interleave(q_BhTd.shape[1] // x.shape[1], dim=1) for x in (k_BgSd, v_BgSd))
    scores = (q_BhTd @ k.mT / math.sqrt(q_BhTd.shape[-1])).masked_fill(
        ~sight.mask_B1TS, float("-inf")
    )
    return scores.softmax(-1) @ v, scores.logsumexp(-1)
