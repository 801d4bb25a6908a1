"""Where attention goes: the share on the sink, the prompt, recent and own drafted tokens.

Legend: A chains, h query heads, S key slots.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.drift.settings import Settings

NAMES = ("sink_mass", "prompt_mass", "recent_mass", "own_mass", "rest_mass", "self_mass", "entropy")


class Rows(NamedTuple):
    """What the drafter's rows are, when A chains of one text have each drafted to the same level.

    Row i holds the feature of position i and the token of position i + 1. The text's rows lie in the first slots, the
    chains' behind them, level by level; a chain's level 0 is the row of its anchor, whose token is committed.
    """

    text: int
    """Slots of the text's rows."""
    prompt: int
    """Tokens of the prompt."""
    anchor_A: Tensor
    """int64, position of the last committed token before each chain."""
    level: int
    """Of the rows that attend now."""
    slots: int
    """S."""

    def regions(self, settings: Settings) -> Tensor:
        """Which rows are what to each chain, (A, 6, S) bool, in the order of :data:`NAMES` but for the entropy.

        The first five are disjoint and cover every row that a chain sees. A row drafted in the chain is its own. Of the
        committed ones the first ``settings.sink_tokens`` are the sink, the last ``settings.recent`` recent, the other
        ones of the prompt's positions the prompt, and what is left the rest.
        """
        chains, device = len(self.anchor_A), self.anchor_A.device
        slot_S, anchor_A1 = torch.arange(self.slots, device=device), self.anchor_A[:, None]
        own_S = slot_S >= self.text + chains
        committed_S = ~own_S
        position_AS = torch.where(slot_S < self.text, slot_S, anchor_A1 - 1)
        sink_AS = committed_S & (position_AS < settings.sink_tokens)
        recent_AS = committed_S & ~sink_AS & (position_AS >= anchor_A1 - settings.recent)
        prompt_AS = committed_S & ~sink_AS & ~recent_AS & (position_AS < self.prompt)
        rest_AS = committed_S & ~sink_AS & ~recent_AS & ~prompt_AS
        here_A1 = self.text + self.level * chains + torch.arange(chains, device=device)[:, None]
        own_AS = own_S.expand_as(sink_AS)
        return torch.stack([sink_AS, prompt_AS, recent_AS, own_AS, rest_AS, slot_S == here_A1], dim=1)


def masses(weights_AhS: Tensor, regions_ARS: Tensor) -> Tensor:
    """What one layer attends to, (A, 7) in the order of :data:`NAMES`: means over heads.

    The entropy, in nats, is that of each head's weights.
    """
    mass_AR = torch.einsum("ahs,ars->ar", weights_AhS, regions_ARS.to(weights_AhS)) / weights_AhS.shape[1]
    entropy_A1 = torch.special.entr(weights_AhS).sum(-1).mean(1, keepdim=True)
    return torch.cat([mass_AR, entropy_A1], dim=1)
