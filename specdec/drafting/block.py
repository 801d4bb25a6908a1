"""DFlash: a block of masks behind the last token, which all see each other (https://arxiv.org/abs/2602.06036).

A block is the token after the anchor and a mask at the place of every draft; each mask says what stands at its own
place. The features of the text are context: keys and values at separate nodes, before the block.

Legend: B batch, T tokens, N aux layers, H hidden, M kept slots of a row or newly committed tokens, K nodes of a block,
A anchors, Q nodes of all blocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.drafting.branches import Chains
from specdec.drafting.chained import FLOAT32_BYTES, FeedRaw
from specdec.drafting.mode import (
    AnchorDrafting,
    DrafterMemory,
    DraftingMode,
    Expand,
    Frontier,
    Step,
    UnrollTask,
    attention_numbers,
    branches_of,
    levels_of,
)
from specdec.drafting.parallel import MaskToken
from specdec.drafting.slots import KeptSlots
from specdec.nn.backend import widened
from specdec.nn.blocked import kept_bytes
from specdec.nn.cache import StaticCache
from specdec.nn.unroll import BlockCache
from specdec.nn.view import Spans, View
from specdec.utils.numbers import Depth, check_numbers
from specdec.utils.text import how_many

if TYPE_CHECKING:
    from specdec.drafter import Drafter, DrafterConfig, DrafterSpec


@dataclass(frozen=True)
class MaskBlock(MaskToken):
    """DFlash (https://arxiv.org/abs/2602.06036): the last token of the text and a mask at the place of every draft, all
    of which see each other, the later ones too. Each mask says what stands at its own place.

    Args:
        mask_token_id: as of :class:`specdec.drafting.parallel.MaskConstant`.
        masks: of every pass, in training as in decoding: a decoder that needs fewer drafts takes the first.
    """

    mask_token_id: int = -1
    masks: Depth = 7

    def check(self, config: "DrafterConfig | DrafterSpec") -> None:
        check_numbers(type(self), vars(self))
        if not config.entry.context:
            raise ValueError(
                f"recurrence {type(self).__name__} drafts at nodes without a feature: it needs entry KVInjection"
            )

    def build(self, config: Any) -> nn.Module:
        """Return a module whose output is unused: a block hands nothing on."""
        return FeedRaw()

    def drafting(self) -> DraftingMode:
        return BlockDrafting(self.mask_token_id, self.masks)


@dataclass(frozen=True)
class BlockDrafting(DraftingMode):
    """One call for all drafts of a pass, or of every anchor of a batch.

    Args:
        mask_token_id: the token that stands at the place of every draft.
        masks: of a block.
        first_draft: the node of a block that makes the first draft: 1, the first mask; or 0, the root, if every node
            says what follows it.
    """

    mask_token_id: int
    masks: int
    first_draft: int = 1

    one_call: ClassVar[bool] = True
    engine_method: ClassVar[str | None] = "dflash"
    generation: ClassVar[str | None] = "DFlash"
    embedding_gathers: ClassVar[int] = 2

    @property
    def summary(self) -> str:  # type: ignore[override]
        return f"drafts: a block of {how_many(self.masks, 'mask')}, token {self.mask_token_id}"

    @property
    def fixed_drafts(self) -> int:  # type: ignore[override]
        return 1 + self.masks - self.first_draft

    def check_training(self, recurrence: str, steps: int) -> None:
        if steps != self.fixed_drafts:
            raise ValueError(
                f"recurrence {recurrence} makes {self.fixed_drafts} drafts and model.ttt_steps is {steps}: set "
                f"model.ttt_steps to {self.fixed_drafts}, or masks of the recurrence to {steps - 1 + self.first_draft}"
            )

    def check_recompute(self) -> None:
        raise ValueError(
            "model.recompute: the steps of a block are one call: to save memory, lower model.step_keep"
        )

    def block_ids(self, root_BA: Tensor) -> Tensor:
        """Return the tokens of a block behind each of A roots, level by level, int64 (B, A (1 + masks))."""
        masks_BA = torch.full_like(root_BA, self.mask_token_id)
        return torch.cat([root_BA, masks_BA.repeat(1, self.masks)], 1)

    # ---- training ----

    def unroll(self, drafter: "Drafter", task: UnrollTask) -> Iterator[Step]:
        """Yield the steps of one call at every anchor, or at those that are kept; the kept slots of step 0 count.

        A block sees the features of its document up to its anchor, and all of itself.
        """
        self.check_depth(task.steps)
        documents = View.packed(task.documents_BT)
        T = task.ids_BT.shape[1]
        h_BTH = drafter.fuse(task.aux_BTNH)
        # A block begins at the token after its anchor.
        view = documents
        root_BM = F.pad(task.ids_BT, (0, 1))[:, 1:]
        slots = task.kept_slots[0] if task.kept_slots else None
        if slots is not None:
            view = documents.of(slots.slots_BM)
            root_BM = slots.take(root_BM)
        M = root_BM.shape[1]
        ids_BQ = self.block_ids(root_BM)
        # Nodes are sorted by level: the roots of all anchors, then all first masks, and so on.
        levels = 1 + self.masks
        level_Q = torch.arange(levels, device=ids_BQ.device).repeat_interleave(M)
        block_positions_BQ = view.positions_BT.repeat(1, levels) + 1 + level_Q
        positions = torch.cat([documents.positions_BT, block_positions_BQ], 1)
        assert isinstance(view.visibility, Spans)
        cache = BlockCache(task.kernel, view.visibility, T)
        block_view = View(positions, view.visibility, documents.positions_BT, cache=cache)
        step = drafter.advance(drafter.read(ids_BQ, h_BTH.dtype), h_BTH, block_view)
        for k in range(task.steps):
            nodes = self.nodes_of_step(k, M)
            yield Step(step.h_BTH[:, nodes], step.normed_BTH[:, nodes])

    def nodes_of_step(self, step: int, anchors: int) -> slice:
        """Return the nodes that make draft ``step`` of every anchor; the roots come first."""
        level = self.first_draft + step
        return slice(level * anchors, (level + 1) * anchors)

    def shares(self, keep: float, steps: int) -> list[float]:
        """Return one share for all steps: the masks of a block come together, so anchors are drawn."""
        return [keep] * steps

    def kept_slots(self, trained_KBT: Tensor) -> list[KeptSlots | None]:
        return [KeptSlots.of(trained_KBT)] * len(trained_KBT)

    def drafted_nodes(self, shares: Sequence[float]) -> float:
        return shares[0] * (1 + self.masks)

    def activation_bytes(
        self, config: "DrafterConfig", number_bytes: int, B: int, T: int, shares: Sequence[float], recompute: bool
    ) -> int:  # fmt: skip
        """Return what the one call keeps for the backward pass, in bytes."""
        H = config.hidden_size
        norms = config.norms
        layers = config.num_layers
        q, kv = attention_numbers(config)
        # For each token of the text: nodes of blocks, and one of context.
        nodes = self.drafted_nodes(shares)
        numbers = nodes * (2 * config.intermediate_size + 4 * H + 2 * q)
        numbers += (1 + nodes) * config.attention.kept(config)
        numbers += (1 + nodes) * (q + 2 * kv) * (1 + bool(norms.query_key))
        whole = layers * numbers + nodes * H * bool(norms.output) + H * bool(norms.hidden)
        whole += H * bool(norms.embed)
        tables = layers * nodes * config.num_attention_heads
        tables += 2 * (1 + nodes) * config.attention.rotated(config)
        return int(B * T * (whole * number_bytes + tables * FLOAT32_BYTES)) + kept_bytes(B, T)

    # ---- decoding ----

    def extra_rows(self, depth: int) -> int:
        """Return the rows of root and masks, which every pass runs, whatever a shape takes of their drafts."""
        return 1 + self.masks

    def prefill(
        self, memory: DrafterMemory, cache: StaticCache, ids_1M: Tensor, h_1MH: Tensor
    ) -> None:
        # A root runs with the features, and leaves a key that is written over.
        start_1 = torch.zeros_like(ids_1M[0, :1])
        count_1 = start_1 + ids_1M.shape[1]
        self._run(memory, cache, start_1, ids_1M[:, -1:], h_1MH, count_1)

    def start(
        self, memory: DrafterMemory, length_B: Tensor, ids_BM: Tensor, h_BMH: Tensor, count_B: Tensor
    ) -> Frontier:  # fmt: skip
        last_B1 = (count_B - 1).clamp_min(0)[:, None]
        root_B1 = ids_BM.gather(1, last_B1)
        step = self._run(memory, memory.cache, length_B, self.block_ids(root_B1), h_BMH, count_B)
        drafts = slice(self.first_draft, self.first_draft + memory.depth)
        by_level = Step(step.h_BTH[:, drafts], step.normed_BTH[:, drafts])
        return self.levels(memory.drafter, root_B1, by_level)

    def levels(self, drafter: "Drafter", root_B1: Tensor, step: Step) -> Frontier:
        """Return what the nodes that draft say, a node for each level."""
        return Frontier.of(drafter, step)

    def _run(
        self,
        memory: DrafterMemory,
        cache: StaticCache,
        length_B: Tensor,
        block_BK: Tensor,
        h_BMH: Tensor,
        count_B: Tensor,
    ) -> Step:
        """Commit features, of which the first ``count_B`` count, and run a block behind them.

        The block's nodes see all committed features and each other.
        """
        device = block_BK.device
        K = block_BK.shape[1]
        order_M = torch.arange(h_BMH.shape[1], device=device)
        order_K = torch.arange(K, device=device)
        end_B1 = (length_B + count_B)[:, None]
        # Features that do not count go behind the block, where no node looks.
        moved_BM = (order_M >= count_B[:, None]) * K
        slots_BT = torch.cat([length_B[:, None] + order_M + moved_BM, end_B1 + order_K], 1)
        last_BK = (end_B1 + K - 1).expand(-1, K)
        visible = Spans(torch.zeros_like(last_BK), last_BK, memory.capacity)
        columns_BS = torch.arange(memory.capacity, device=device).expand(len(slots_BT), -1)
        view = View(slots_BT, visible, columns_BS, slots_BT, cache)
        return memory.drafter.step(block_BK, h_BMH, view)

    def expand(self, memory: DrafterMemory, start: Frontier, length_B: Tensor) -> Expand:
        return levels_of(start)

    # ---- diagnostics ----

    def draft_at_anchors(self, memory: DrafterMemory, task: AnchorDrafting) -> Chains:
        drafter = memory.drafter
        step = self.run_at_anchors(memory, task)
        logits_KAD = drafter.logits(step.normed_BTH)
        logits_KAD = widened(logits_KAD)
        return Chains(
            drafter.vocab.to_target(logits_KAD.argmax(-1)).T,
            logits_KAD.log_softmax(-1).transpose(0, 1),
            torch.cat([task.feature_1AH, step.h_BTH]).transpose(0, 1),
        )

    def run_at_anchors(self, memory: DrafterMemory, task: AnchorDrafting) -> Step:
        """Run a block behind each anchor, which sees the features before it and all of itself, in one call.

        Returns:
            What each of the nodes that draft yields, (K, A, H).
        """
        branches, shared_1 = branches_of(task, task.anchor_A)
        anchors = len(task.anchor_A)
        levels = 1 + self.masks
        seen = branches.seen(0, levels, whole=True)
        depth_1Q = branches.depth(levels)[None]
        view = View.append(shared_1, seen, depth_1Q, memory.capacity, memory.cache)
        no_feature_10H = task.feature_1AH[:, :0]  # the context lies in the cache already
        step = memory.drafter.step(self.block_ids(task.root_1A), no_feature_10H, view)
        for level in range(memory.depth):
            task.on_step(level)
        first = self.first_draft * anchors
        drafts = slice(first, first + memory.depth * anchors)
        by_level = (memory.depth, anchors)
        return Step(
            step.h_BTH[0, drafts].unflatten(0, by_level),
            step.normed_BTH[0, drafts].unflatten(0, by_level),
        )
