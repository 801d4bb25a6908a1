"""Tokens of a law: drawn with noise that somebody else made, or the likeliest; without waiting for the device.

Legend: V vocabulary, R draws.
"""

import torch
from torch import Tensor


def _arrivals(law_V: Tensor, race_V: Tensor) -> Tensor:
    """Tokens race, each at the pace of its probability: greater is earlier, zero never arrives."""
    return law_V / race_V.clamp_min(torch.finfo(race_V.dtype).tiny)


def draw(law_V: Tensor, race_V: Tensor) -> Tensor:
    """One token, int64, from the law, over the last dimension: an exponential race, also known as Gumbel-max.

    Args:
        law_V: not negative, and some of it positive; it need not sum to one.
        race_V: independent Exp(1) noise, broadcastable to the law.
    """
    return _arrivals(law_V, race_V).argmax(-1)


def draw_distinct(law_V: Tensor, race_V: Tensor, count: int) -> Tensor:
    """``count`` tokens one after another without replacement, in order, (..., count) int64.

    The order of arrival in one race is that of sequential draws from what is left (https://arxiv.org/abs/1903.06059).
    Once all tokens of positive probability are drawn, the rest are arbitrary tokens of probability zero.
    """
    return _arrivals(law_V, race_V).topk(count).indices


def draw_repeatedly(law_V: Tensor, race_RV: Tensor) -> Tensor:
    """R independent tokens, (..., R) int64, from a law (..., V) and races (..., R, V)."""
    return draw(law_V[..., None, :], race_RV)


def likeliest(law_V: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest numbers of a law or its logarithm in order, and their tokens, (..., count) each.

    A single one is the first of its equals; compiled code works it out with what stands around it, but calls a library
    for more.
    """
    values, tokens = law_V.max(-1, keepdim=True) if count == 1 else law_V.topk(count)
    return values, tokens
