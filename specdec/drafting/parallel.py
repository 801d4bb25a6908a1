"""P-EAGLE: one call makes all drafts of a pass, with masks in place of the drafts (https://arxiv.org/abs/2602.01469).

Steps after the first read a mask token and learned states, whatever was drafted. Training unrolls them as a chain,
since a slot sees its own keys of the earlier steps; decoding runs the rows of masks together with the newly
committed ones.

Legend: B batch, T tokens, N aux layers, H hidden, M newly committed tokens, K drafts of a pass.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.drafting.chained import Chained, Recurrence
from specdec.drafting.mode import DrafterMemory, DraftingMode, Expand, Frontier, levels_of
from specdec.nn.view import View

if TYPE_CHECKING:
    from specdec.drafter import Drafter, DrafterConfig, DrafterSpec


class MaskToken(Recurrence):
    """Base of the recurrences whose drafts read a mask in place of each other."""

    mask_token_id: int
    feeds_head_input: ClassVar[bool] = False

    def of_target(self, vocab_size: int) -> Self:
        """Return it with the mask's own number; ValueError if the target has no such token."""
        if not -vocab_size <= self.mask_token_id < vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is none of the target's {vocab_size} tokens"
            )
        return replace(self, mask_token_id=self.mask_token_id % vocab_size)  # type: ignore[type-var]


@dataclass(frozen=True)
class MaskConstant(MaskToken):
    """P-EAGLE (https://arxiv.org/abs/2602.01469): every step after the first reads a mask token, and learned states in
    place of the target's, fused as those are. Drafts of a pass do not know each other, and one call makes all of them.

    Args:
        mask_token_id: a token that texts do not hold; a negative one counts from the end of the target's vocabulary.
    """

    mask_token_id: int = -1

    def check(self, config: "DrafterConfig | DrafterSpec") -> None:
        if not config.fusion.mixes:
            raise ValueError(
                f"recurrence MaskConstant learns states to be fused, and fusion {type(config.fusion).__name__} mixes "
                "nothing: use fusion Concat"
            )

    def build(self, config: Any) -> nn.Module:
        """Return the learned states, a row for each of the target's boundaries."""
        return FeedMask(len(config.aux_layers), config.target_hidden_size)

    def drafting(self) -> DraftingMode:
        return Parallel(self.mask_token_id)


class FeedMask(nn.Module):
    """The learned states, fused, whatever the step made; the drafter that has it sets ``fuse`` to its own."""

    fuse: Callable[[Tensor], Tensor]

    def __init__(self, states: int, width: int) -> None:
        super().__init__()
        self.hidden = nn.Embedding(states, width)

    def forward(self, raw_BTH: Tensor, normed_BTH: Tensor) -> Tensor:
        return self.fuse(self.hidden.weight[None, None]).expand_as(raw_BTH)


@dataclass(frozen=True)
class Parallel(Chained):
    """Every step after the first reads the mask."""

    mask_token_id: int

    one_call: ClassVar[bool] = True
    generation: ClassVar[str | None] = "P-EAGLE"

    @property
    def summary(self) -> str:  # type: ignore[override]
        return f"parallel (P-EAGLE): its mask is token {self.mask_token_id}"

    def check_training(self, recurrence: str, steps: int) -> None:
        if steps == 1:
            raise ValueError(
                f"recurrence {recurrence} is what steps after the first read: give model.ttt_steps 2 or more"
            )

    def reads_mask(self, step: int) -> bool:
        return step > 0

    def masks(self, ids_BK: Tensor) -> Tensor:
        return torch.full_like(ids_BK, self.mask_token_id)

    def extra_rows(self, depth: int) -> int:
        """Return a row of masks for each draft but the first."""
        return depth - 1

    def start(
        self, memory: DrafterMemory, length_B: Tensor, ids_BM: Tensor, h_BMH: Tensor, count_B: Tensor
    ) -> Frontier:  # fmt: skip
        """Run the committed tokens with the rows of masks behind them, and say what follows at each of the K levels."""
        drafter = memory.drafter
        masks = self.extra_rows(memory.depth)
        rows = ids_BM.shape[1] + masks
        order_R = torch.arange(rows, device=ids_BM.device)
        last_B1 = (count_B - 1).clamp_min(0)[:, None]
        committed_BR = order_R <= last_B1
        ids_BR = F.pad(ids_BM, (0, masks))
        ids_BR = torch.where(committed_BR, ids_BR, self.masks(ids_BR))
        h_BRH = F.pad(h_BMH, (0, 0, 0, masks))
        learned_BRH = drafter.recurrence(h_BRH, h_BRH)  # reads their shape alone
        h_BRH = torch.where(committed_BR[..., None], h_BRH, learned_BRH)
        levels_BK = last_B1 + order_R[: masks + 1]
        view = View.chain(length_B, rows, memory.capacity, memory.cache)
        step = drafter.step(ids_BR, h_BRH, view._replace(wanted_BM=levels_BK))
        return Frontier.of(drafter, step)

    def expand(self, memory: DrafterMemory, start: Frontier, length_B: Tensor) -> Expand:
        return levels_of(start)

    def learned_states(self, drafter: "Drafter") -> Tensor | None:
        assert isinstance(drafter.recurrence, FeedMask)
        return drafter.recurrence.hidden.weight
