"""Muon for the matrices and AdamW for the rest, as one optimiser."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class MuonAdamW(torch.optim.Optimizer):
    """Steps :class:`torch.optim.Muon` and :class:`torch.optim.AdamW` together, so that one schedule drives both.

    Muon (https://kellerjordan.github.io/posts/muon, update scaled as in https://arxiv.org/abs/2502.16982) learns a
    given text in far fewer tokens than AdamW; embedding, head and norms are not for it.

    Args:
        matrices: 2-D parameters, for Muon.
        rest: all others, for AdamW.
        lr: learning rate of the matrices.
        lr_rest: learning rate of the others.
    """

    def __init__(self, matrices: list[nn.Parameter], rest: list[nn.Parameter], lr: float, lr_rest: float) -> None:
        muon = torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW(rest, lr=lr_rest, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        # The same dictionaries, not copies: a schedule that sets `lr` here sets it there.
        super().__init__([*muon.param_groups, *adamw.param_groups], defaults={})
        self._parts = (muon, adamw)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss
