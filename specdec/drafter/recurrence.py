"""What a drafting step hands to the next one.

Legend: B batch, T nodes, N aux layers, H hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor, nn

from specdec.drafter.parts import Part
from specdec.utils.numbers import Depth, check_numbers

if TYPE_CHECKING:
    from specdec.drafter.config import DrafterConfig, DrafterSpec


class Recurrence(Part):
    """Base of the recurrence axis: a frozen dataclass whose ``build`` makes a module, (raw_BTH, normed_BTH) to the next
    step's feature (B, T, H). The head always reads normed_BTH.

    One of your own: ``--allow_imports my_parts --model.drafter.recurrence my_parts.Mine``.
    """

    parallel: ClassVar[bool] = False
    """Whether no step reads what another made, so that all drafts of a target pass come of one call of the drafter;
    then :meth:`following` gives one token for all."""
    masks: int = 0
    """Drafts of a pass that are a block of nodes of their own, which see each other and the features of the text, as
    entry KVInjection has it; 0 for those that are none."""

    def of_target(self, vocab_size: int) -> Self:
        """This recurrence with the tokens that it names numbered for a vocabulary of ``vocab_size``."""
        return self

    def following(self, ids_BT: Tensor) -> Tensor:
        """What steps after the first read in place of tokens that have been drafted, int64 (B, T)."""
        return ids_BT

    def check_depth(self, depth: int) -> None:
        """Raise ValueError where a pass cannot draft ``depth`` tokens."""
        if 0 < self.masks < depth:
            raise ValueError(
                f"{depth} drafts are asked of a block of {self.masks} masks, which drafts as many: give a depth of "
                f"{self.masks} or less"
            )


@dataclass(frozen=True)
class PreNorm(Recurrence):
    """EAGLE-1 to 3: feed the un-normalised output back (https://arxiv.org/abs/2503.01840)."""

    def build(self, config: "DrafterConfig") -> nn.Module:
        return FeedRaw()


class FeedRaw(nn.Module):
    def forward(self, raw_BTH: Tensor, normed_BTH: Tensor) -> Tensor:
        return raw_BTH


@dataclass(frozen=True)
class PostNorm(Recurrence):
    """EAGLE-3.1's ``norm_output``: feed back what the head sees (https://arxiv.org/abs/2605.09992)."""

    def check(self, config: "DrafterConfig | DrafterSpec") -> None:
        if not config.norms.output:
            raise ValueError(
                "recurrence PostNorm needs norms.output=true: there is no norm to feed back from"
            )

    def build(self, config: "DrafterConfig") -> nn.Module:
        return FeedNormed()


class FeedNormed(nn.Module):
    def forward(self, raw_BTH: Tensor, normed_BTH: Tensor) -> Tensor:
        return normed_BTH


class MaskToken(Recurrence):
    """Base of those whose drafts read a mask in place of each other, and all come of one call."""

    mask_token_id: int
    parallel: ClassVar[bool] = True

    def following(self, ids_BT: Tensor) -> Tensor:
        return torch.full_like(ids_BT, self.mask_token_id)

    def of_target(self, vocab_size: int) -> Self:
        """With the mask's own number; ValueError if the target has no such token."""
        if not -vocab_size <= self.mask_token_id < vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is none of the target's {vocab_size} tokens"
            )
        return replace(self, mask_token_id=self.mask_token_id % vocab_size)  # type: ignore[type-var]


@dataclass(frozen=True)
class MaskConstant(MaskToken):
    """P-EAGLE (https://arxiv.org/abs/2602.01469): every step after the first reads a mask token, and learned states in
    place of the target's, fused as those are. Drafts of a pass do not know each other, and all come of one call.

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

    def build(self, config: "DrafterConfig") -> nn.Module:
        """With the state, one row for each of the target's boundaries, as a drafter starts its embeddings."""
        return FeedMask(len(config.aux_layers), config.target_hidden_size)


class FeedMask(nn.Module):
    """The learned state, fused, whatever the step made; the drafter that has it sets ``fuse`` to its own."""

    fuse: Callable[[Tensor], Tensor]

    def __init__(self, states: int, width: int) -> None:
        super().__init__()
        self.hidden = nn.Embedding(states, width)

    def forward(self, raw_BTH: Tensor, normed_BTH: Tensor) -> Tensor:
        return self.fuse(self.hidden.weight[None, None]).expand_as(raw_BTH)


@dataclass(frozen=True)
class MaskBlock(MaskToken):
    """DFlash (https://arxiv.org/abs/2602.06036): the last token of the text and a mask at the place of every draft, all
    of which see each other, the later ones too. Each mask says what stands at its own place.

    Args:
        mask_token_id: as of :class:`MaskConstant`.
        masks: of every pass, in training as in decoding: a decoder that wants fewer drafts takes the first.
    """

    mask_token_id: int = -1
    masks: Depth = 7

    def check(self, config: "DrafterConfig | DrafterSpec") -> None:
        check_numbers(MaskBlock, vars(self))
        if not config.entry.context:
            raise ValueError(
                "recurrence MaskBlock drafts at nodes that have no feature of their own: it needs entry KVInjection"
            )

    def build(self, config: "DrafterConfig") -> nn.Module:
        """Nothing is handed on."""
        return FeedRaw()
