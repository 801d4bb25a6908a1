"""Drafters whose input is noisy: ``x + alpha rms(x) z``, z standard normal, as the paper on attention drift has it
(https://arxiv.org/abs/2605.09992). rms(x) is the token's own, over the channels.

The noise at a place of a text depends on the seed, the place and the token there: not on the batch, nor on which pass
comes to it. Texts that have the same token at the same place share it.

Legend: B sequences, T nodes, H hidden.
"""

import torch
from torch import Tensor, nn

from specdec.decoding.noise import coins
from specdec.drafter import Drafter, Step
from specdec.nn.view import View

HIDDEN, EMBEDDING = 11, 12  # streams of their own beside decoding's


def gaussian(seed: int, ids_BT: Tensor, place_BT: Tensor, stream: int, width: int) -> Tensor:
    """Standard normal numbers, float64 (B, T, width)."""
    seeds_N = (ids_BT + (seed << 32)).flatten()
    uniform_N1H = coins(seeds_N, place_BT.flatten()[:, None], stream, width).double() + 2**-25
    return torch.special.ndtri(uniform_N1H).view(*ids_BT.shape, width)


def blurred(x_BTH: Tensor, alpha: float, z_BTH: Tensor) -> Tensor:
    """``x + alpha rms(x) z`` in the dtype of x."""
    rms_BT1 = x_BTH.double().square().mean(-1, keepdim=True).sqrt()
    return x_BTH + (alpha * rms_BT1 * z_BTH).to(x_BTH.dtype)


class Noisy(Drafter):
    """Base: a drafter with all parts and weights of another, which stays as it is. Inference only."""

    def __init__(self, drafter: Drafter, alpha: float, seed: int) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(drafter.__dict__)
        self.alpha, self.seed = alpha, seed

    def noise(self, ids_BT: Tensor, view: View, stream: int) -> Tensor:
        """Of every node, (B, T, H)."""
        return gaussian(self.seed, ids_BT, view.positions_BT, stream, self.config.hidden_size)


class NoisyHidden(Noisy):
    """Every feature that enters a step is noisy: the fused states of committed tokens and, in drafting, the
    recurrent state; before the norm, and where the residual path starts."""

    def step(self, ids_BT: Tensor, h_BTH: Tensor, view: View) -> Step:
        return super().step(ids_BT, blurred(h_BTH, self.alpha, self.noise(ids_BT, view, HIDDEN)), view)


class NoisyEmbedding(Noisy):
    """Every token embedding that enters a step is noisy, before the norm."""

    def step(self, ids_BT: Tensor, h_BTH: Tensor, view: View) -> Step:
        z_BTH = self.noise(ids_BT, view, EMBEDDING)
        hook = self.embed_tokens.register_forward_hook(lambda _, __, e_BTH: blurred(e_BTH, self.alpha, z_BTH))
        try:
            return super().step(ids_BT, h_BTH, view)
        finally:
            hook.remove()
