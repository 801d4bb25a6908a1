"""DSpark: DFlash's block, whose drafts know the token before them (https://github.com/deepseek-ai/DeepSpec).

One call of the drafter makes the states of all drafts, as in DFlash. A draft's logits are the head's, plus what a
low-rank matrix says of the token before it, a first-order Markov chain; so drafts are chosen one after another, at the
cost of one small product each. A second head estimates from the same two inputs whether the draft will be accepted.

Example with rank 2: the state of a draft says "of" or "course", both 0.4. Behind "of" the matrix adds 2 to the logit of
"course" and takes 2 from that of "of", so that the pair "of of", which parallel drafts are prone to, is not proposed.

Legend: B batch, T tokens, H hidden, R rank, M kept slots of a row or newly committed tokens, K levels of a pass or
nodes of a level, D draft vocabulary, A anchors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.drafting.block import BlockDrafting, MaskBlock
from specdec.drafting.branches import Chains
from specdec.drafting.mode import (
    AnchorDrafting,
    DrafterMemory,
    DraftingMode,
    Expand,
    Frontier,
    Step,
    UnrollTask,
    levels_of,
)
from specdec.nn.backend import widened
from specdec.utils.numbers import Count, Depth
from specdec.utils.text import how_many

if TYPE_CHECKING:
    from specdec.drafter import Drafter, DrafterConfig, DrafterSpec


@dataclass(frozen=True)
class MarkovBlock(MaskBlock):
    """DSpark (https://github.com/deepseek-ai/DeepSpec): a block of masks, each of whose drafts also reads the token
    before it, through a low-rank matrix that adds to its logits.

    Args:
        mask_token_id: a token that texts do not hold; a negative one counts from the end of the target's vocabulary.
        masks: how many masks a block has, in training as in decoding.
        rank: of the matrix that reads the token before a draft.
        confidence: whether a head estimates the chance that a draft is accepted; the loss ``ConfidenceLoss`` trains it.
        root_drafts: whether the last token of the text makes a draft too, and every node says what follows it, so that
            a pass makes ``masks + 1`` drafts, as the authors' does; if not, each mask drafts for its own place.
    """

    masks: Depth = 6
    rank: Count = 256
    confidence: bool = True
    root_drafts: bool = True

    def check(self, config: "DrafterConfig | DrafterSpec") -> None:
        super().check(config)
        for name in ("confidence", "root_drafts"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"MarkovBlock.{name} is {getattr(self, name)!r}, wanted a bool")
        if getattr(config, "logit_scale", 1) != 1:  # of a target, which a spec does not know yet
            raise ValueError(
                f"recurrence MarkovBlock adds to logits that are not scaled, and logit_scale is {config.logit_scale}, "  # type: ignore[union-attr]
                "which head=target takes from a target that scales its own: set model.drafter.head=own"
            )

    def build(self, config: Any) -> nn.Module:
        """Return both heads; as a recurrence they hand on the state that they read."""
        return MarkovHead(
            config.vocab_size,
            config.draft_vocab_size,
            config.hidden_size,
            self.rank,
            self.confidence,
        )

    def drafting(self) -> DraftingMode:
        first_draft = 0 if self.root_drafts else 1
        return MarkovDrafting(
            self.mask_token_id, self.masks, first_draft, self.rank, self.confidence
        )


class MarkovHead(nn.Module):
    """What the token before a draft adds to its logits, and the confidence head, if there is one."""

    def __init__(self, V: int, D: int, H: int, rank: int, confidence: bool) -> None:
        super().__init__()
        self.previous = nn.Embedding(V, rank)
        self.transition = nn.Linear(rank, D, bias=False)
        self.confidence = nn.Linear(H + rank, 1) if confidence else None

    def forward(self, raw_BTH: Tensor, normed_BTH: Tensor) -> Tensor:
        return normed_BTH

    def after(self, said: Frontier, previous_BK: Tensor) -> Frontier:
        """Return what nodes say behind given tokens, from what they say without knowing them."""
        embedded_BKR = self.previous(previous_BK)
        logits_BKD = said.logits_BKD + self.transition(embedded_BKR)
        if self.confidence is None:
            return Frontier(said.h_BKH, logits_BKD)
        read_BKW = torch.cat([said.h_BKH, embedded_BKR], -1)
        return Frontier(said.h_BKH, logits_BKD, self.confidence_logits(read_BKW).sigmoid())

    def confidence_logits(self, read: Tensor) -> Tensor:
        """Return the logits (...) of the chance that each draft is accepted, in float32 or wider.

        Args:
            read: the state and the embedded token before the draft, (..., H + R).
        """
        assert self.confidence is not None
        logits = self.confidence(read)
        return widened(logits[..., 0])


@dataclass(frozen=True)
class MarkovDrafting(BlockDrafting):
    """One call for the states of all drafts, and the drafts one after another.

    Args:
        rank: of the matrix that reads the token before a draft.
        has_confidence: whether there is a confidence head.
    """

    rank: int = 256
    has_confidence: bool = True

    engine_method: ClassVar[str | None] = "dspark"
    generation: ClassVar[str | None] = "DSpark"

    @property
    def summary(self) -> str:  # type: ignore[override]
        drafts = how_many(self.fixed_drafts, "draft")
        confidence = "a confidence head" if self.has_confidence else "no confidence head"
        return f"{super().summary}, which makes {drafts}; a Markov head of rank {self.rank}; {confidence}"

    # ---- the head ----

    @property
    def extra_width(self) -> int:  # type: ignore[override]
        return self.rank

    def head_weights(self, drafter: "Drafter") -> list[Tensor]:
        """Return the head's matrix (D, H) and the Markov head's, (D, R)."""
        return [drafter.lm_head.weight, _head(drafter).transition.weight]

    def logits(self, drafter: "Drafter", normed: Tensor) -> Tensor:
        H = drafter.config.hidden_size
        return drafter.lm_head(normed[..., :H]) + _head(drafter).transition(normed[..., H:])

    def confidence_logits(self, drafter: "Drafter", normed: Tensor) -> Tensor:
        return _head(drafter).confidence_logits(normed)

    # ---- training ----

    def unroll(self, drafter: "Drafter", task: UnrollTask) -> Iterator[Step]:
        """Yield the block's steps, each state followed by the embedded token before its draft, (B, M, H + R)."""
        head = _head(drafter)
        T = task.ids_BT.shape[1]
        slots = task.kept_slots[0] if task.kept_slots else None
        # Draft k of slot t follows token x[t + 1 + k]; zeros stand behind the row's end.
        tokens_BS = F.pad(task.ids_BT, (0, task.steps))
        for k, step in enumerate(super().unroll(drafter, task)):
            if slots is None:
                previous_BM = tokens_BS[:, 1 + k : 1 + k + T]
            else:
                previous_BM = slots.take(tokens_BS, 1 + k)
            embedded_BMR = head.previous(previous_BM).to(step.normed_BTH.dtype)
            yield Step(step.h_BTH, torch.cat([step.normed_BTH, embedded_BMR], -1))

    def activation_bytes(
        self, config: "DrafterConfig", number_bytes: int, B: int, T: int, shares: Sequence[float], recompute: bool
    ) -> int:  # fmt: skip
        """Return what the block keeps, and the states followed by the embedded tokens, in bytes."""
        block = super().activation_bytes(config, number_bytes, B, T, shares, recompute)
        drafts = shares[0] * self.fixed_drafts
        return block + int(B * T * drafts * (config.hidden_size + self.rank) * number_bytes)

    # ---- decoding ----

    def levels(self, drafter: "Drafter", root_B1: Tensor, step: Step) -> Frontier:
        """Return what the nodes say that draft; only the first one's token before it, the root, is known yet."""
        logits_BKD = drafter.lm_head(step.normed_BTH)
        unaware = Frontier(step.h_BTH, widened(logits_BKD))
        first = _head(drafter).after(unaware.first(), root_B1)
        aware_BKD = torch.cat([first.logits_BKD, unaware.logits_BKD[:, 1:]], 1)
        return Frontier(step.h_BTH, aware_BKD, first.confidence_BK)

    def expand(self, memory: DrafterMemory, start: Frontier, length_B: Tensor) -> Expand:
        head = _head(memory.drafter)
        level_of = levels_of(start)

        def expand(ids_BK: Tensor, h_BKH: Tensor, seen_BKQ: Tensor, depth_BQ: Tensor) -> Frontier:
            return head.after(level_of(ids_BK, h_BKH, seen_BKQ, depth_BQ), ids_BK)

        return expand

    # ---- diagnostics ----

    def draft_at_anchors(self, memory: DrafterMemory, task: AnchorDrafting) -> Chains:
        drafter = memory.drafter
        head = _head(drafter)
        step = self.run_at_anchors(memory, task)
        logits_KAD = drafter.lm_head(step.normed_BTH)
        logits_KAD = widened(logits_KAD)
        tokens: list[Tensor] = []
        said: list[Frontier] = []
        previous_A = task.root_1A[0]
        for level in range(memory.depth):
            if level:
                forced_AK = task.given_AK
                previous_A = tokens[-1] if forced_AK is None else forced_AK[:, level - 1]
            unaware = Frontier(step.h_BTH[level][None], logits_KAD[level][None])
            said.append(head.after(unaware, previous_A[None]))
            tokens.append(drafter.vocab.to_target(said[-1].logits_BKD[0].argmax(-1)))
        by_level = [frontier.confidence_BK for frontier in said]
        confidence = [by_A[0] for by_A in by_level if by_A is not None]
        return Chains(
            torch.stack(tokens, 1),
            torch.stack([frontier.logits_BKD[0] for frontier in said], 1).log_softmax(-1),
            torch.cat([task.feature_1AH, step.h_BTH]).transpose(0, 1),
            torch.stack(confidence, 1) if confidence else None,
        )


def _head(drafter: "Drafter") -> MarkovHead:
    assert isinstance(drafter.recurrence, MarkovHead)
    return drafter.recurrence
