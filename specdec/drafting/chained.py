"""EAGLE and MTP: one draft after another, each from the feature that the step before handed on.

Training unrolls the drafter over its own features (training-time test, EAGLE-3, https://arxiv.org/abs/2503.01840).
Decoding runs the same steps on a cache.

Legend: B batch, T tokens, N aux layers, H hidden, M kept slots of a row, R = T + K, W what the entry reads of a token,
K unroll steps or frontier nodes, Q drafted nodes, A anchors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from specdec.drafting.branches import Chains
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
    linear_inputs,
)
from specdec.drafting.slots import KeptSlots
from specdec.nn.blocked import kept_bytes
from specdec.nn.cache import StaticCache
from specdec.nn.parts import Part
from specdec.nn.unroll import UnrollCache
from specdec.nn.view import View

if TYPE_CHECKING:
    from specdec.drafter import Drafter, DrafterConfig, DrafterSpec

FLOAT32_BYTES = 4


class Recurrence(Part):
    """Base of the recurrence axis: a frozen dataclass whose ``build`` makes a module that maps (raw_BTH, normed_BTH) to
    the next step's feature (B, T, H). The head always reads normed_BTH.

    Your own recurrence: ``--allow_imports my_parts --model.drafter.recurrence my_parts.Mine``.
    """

    feeds_head_input: ClassVar[bool] = True
    """Whether the next step reads the state that the head reads, so that training keeps that state anyway."""

    def drafting(self) -> DraftingMode:
        """Return how the drafts of a pass are made: one after another, unless a subclass says otherwise."""
        return Chained()

    def of_target(self, vocab_size: int) -> Self:
        """Return this recurrence with the tokens that it names numbered for a vocabulary of ``vocab_size``."""
        return self


@dataclass(frozen=True)
class PreNorm(Recurrence):
    """EAGLE-1 to 3: feed the un-normalized output back (https://arxiv.org/abs/2503.01840)."""

    feeds_head_input: ClassVar[bool] = False

    def build(self, config: Any) -> nn.Module:
        return FeedRaw()


class FeedRaw(nn.Module):
    """Returns the output before its norm."""

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

    def build(self, config: Any) -> nn.Module:
        return FeedNormed()


class FeedNormed(nn.Module):
    """Returns the output after its norm."""

    def forward(self, raw_BTH: Tensor, normed_BTH: Tensor) -> Tensor:
        return normed_BTH


@dataclass(frozen=True)
class Chained(DraftingMode):
    """Each draft reads the token before it and the feature that the step before handed on."""

    # ---- training ----

    def unroll(self, drafter: "Drafter", task: UnrollTask) -> Iterator[Step]:
        """Yield the steps, each from the features that the one before handed on.

        Each slot sees the step-0 keys of its own document up to itself and its own keys of the later steps, at rotary
        position t + k: what a chain that starts at this anchor sees in its cache when it decodes.
        """
        ids_BT = task.ids_BT
        T = ids_BT.shape[1]
        documents = View.packed(task.documents_BT)
        cache = UnrollCache(task.kernel)
        # Step 0 reads the target's true features.
        h_BTH = drafter.fuse(task.aux_BTNH)
        # Every token is read once for all steps: step k reads x[t + 1 + k] at slot t, zeros behind the row's end.
        tokens_BRW = drafter.read(F.pad(ids_BT, (0, task.steps)), h_BTH.dtype)
        masks_BRW: Tensor | None = None
        previous: KeptSlots | None = None
        view = documents
        for k in range(task.steps):
            slots = task.kept_slots[k] if task.kept_slots else None
            # step 0 gives keys of all slots, later steps of theirs alone
            if k < 2 or slots is not previous:
                view = _view_of_slots(documents, slots, k)
            if k > 0 and slots is not None and slots is not previous:
                # Fewer slots than the step before: drop the features and the later keys of the others.
                place_BM = slots.among(previous)
                h_BTH = h_BTH.take_along_dim(place_BM[..., None], 1)
                cache.narrow(place_BM)
            previous = slots
            # The token that follows the feature of step k, or a mask in its place.
            read_BRW = tokens_BRW
            if self.reads_mask(k):
                if masks_BRW is None:
                    mask_11W = drafter.read(self.masks(ids_BT[:1, :1]), h_BTH.dtype)
                    masks_BRW = mask_11W.expand_as(tokens_BRW)
                read_BRW = masks_BRW
            if slots is None or k == 0:
                read_BTW = read_BRW[:, 1 + k : 1 + k + T]
            else:
                read_BTW = slots.take(read_BRW, 1 + k)
            step_view = view._replace(positions_BT=view.positions_BT + k)
            if task.recompute and torch.is_grad_enabled():
                step = _recomputed(drafter, read_BTW, h_BTH, step_view, cache)
            else:
                step = drafter.advance(read_BTW, h_BTH, step_view._replace(cache=cache))
            yield step
            # From now on the drafter reads what it made itself, as it does when it decodes.
            h_BTH = self.next_feature(k + 1, h_BTH, step.h_BTH)

    def reads_mask(self, step: int) -> bool:
        """Whether a step reads a mask in place of the token before it."""
        return False

    def masks(self, ids_BK: Tensor) -> Tensor:
        """Return the masks that stand in place of tokens, int64 (B, K)."""
        raise TypeError(f"{type(self).__name__} must say what its mask is")

    def next_feature(self, step: int, read_BTH: Tensor, handed_BTH: Tensor) -> Tensor:
        """Return the feature that a step reads, given what the one before has read and handed on."""
        return handed_BTH

    def activation_bytes(
        self, config: "DrafterConfig", number_bytes: int, B: int, T: int, shares: Sequence[float], recompute: bool
    ) -> int:  # fmt: skip
        """Return what the unroll keeps for the backward pass, in bytes; a tensor that two operations keep counts once.

        With recomputation every step keeps its feature, keys and values, and one step at a time is whole again.
        """
        H = config.hidden_size
        norms = config.norms
        layers = config.num_layers
        q, kv = attention_numbers(config)
        head_input_is_kept = config.recurrence.feeds_head_input or not norms.output
        # Numbers that one step keeps for each token. What norms read: in each layer the middle, and the input of the
        # layers after the first.
        numbers = H * (
            head_input_is_kept + layers + (layers - 1) + bool(norms.output) + bool(norms.input)
        )
        numbers += layers * (q + 2 * kv) * bool(norms.query_key)
        # What linear layers read: the entry's first reads the token, once for all steps; the gated product of the MLP
        # is made again.
        numbers += H * bool(norms.hidden) + sum(linear_inputs(config.entry, config)[1:])
        numbers += (layers - 1) * H + layers * (q + H)
        numbers += layers * config.attention.kept(config)
        # Rotated queries and keys, values, gate and up projection.
        numbers += layers * (q + 2 * kv + 2 * config.intermediate_size)
        # In float32 a log-sum-exp for each head, and cosine and sine.
        tables = layers * config.num_attention_heads + 2 * config.attention.rotated(config)
        step_bytes = numbers * number_bytes + tables * FLOAT32_BYTES
        unroll = sum(shares) * step_bytes
        if recompute:
            inputs = (H + layers * 2 * kv) * number_bytes
            unroll = sum(shares) * min(inputs, step_bytes) + step_bytes
        # The embedding, and its norm's input, once for all steps.
        once = (H + H * bool(norms.embed)) * number_bytes
        # A window moves with the steps, and each position of it needs masks of its own.
        tilings = 1 if config.attention_window == "full" else len(shares)
        return int(B * T * (once + unroll)) + tilings * kept_bytes(B, T)

    # ---- decoding ----

    def prefill(
        self, memory: DrafterMemory, cache: StaticCache, ids_1M: Tensor, h_1MH: Tensor
    ) -> None:
        start_1 = torch.zeros_like(ids_1M[0, :1])
        view = View.chain(start_1, ids_1M.shape[1], memory.capacity, cache)
        # It runs for its keys, and nobody reads its output: one node's is asked for.
        first_11 = torch.zeros_like(ids_1M[:, :1])
        memory.drafter.step(ids_1M, h_1MH, view._replace(wanted_BM=first_11))

    def start(
        self, memory: DrafterMemory, length_B: Tensor, ids_BM: Tensor, h_BMH: Tensor, count_B: Tensor
    ) -> Frontier:  # fmt: skip
        """Run the committed tokens over whatever had been guessed in their rows; see :meth:`DraftingMode.start`."""
        last_B1 = (count_B - 1).clamp_min(0)[:, None]
        view = View.chain(length_B, ids_BM.shape[1], memory.capacity, memory.cache)
        step = memory.drafter.step(ids_BM, h_BMH, view._replace(wanted_BM=last_B1))
        return Frontier.of(memory.drafter, step)

    def expand(self, memory: DrafterMemory, start: Frontier, length_B: Tensor) -> Expand:
        """Return a step of the drafter with its own features in place of the target's."""

        def expand(ids_BK: Tensor, h_BKH: Tensor, seen_BKQ: Tensor, depth_BQ: Tensor) -> Frontier:
            return memory.append(length_B, ids_BK, h_BKH, seen_BKQ, depth_BQ)

        return expand

    # ---- diagnostics ----

    def draft_at_anchors(self, memory: DrafterMemory, task: AnchorDrafting) -> Chains:
        branches, shared_1 = branches_of(task, task.anchor_A - 1)
        drafter = memory.drafter
        h_1AH = task.feature_1AH
        ids_1A = task.root_1A
        tokens = []
        log_probs = []
        features = [h_1AH[0]]
        for level in range(memory.depth):
            seen = branches.seen(level, level + 1)
            depth_1Q = branches.depth(level + 1)[None]
            frontier = memory.append(shared_1, ids_1A, h_1AH, seen, depth_1Q)
            features.append(frontier.h_BKH[0])
            log_probs.append(frontier.logits_BKD[0].log_softmax(-1))
            tokens.append(drafter.vocab.to_target(frontier.logits_BKD[0].argmax(-1)))
            h_1AH = self.next_feature(level + 1, h_1AH, frontier.h_BKH)
            if self.reads_mask(level + 1):
                ids_1A = self.masks(ids_1A)
            elif task.given_AK is None:
                ids_1A = tokens[-1][None]
            elif level + 1 < memory.depth:
                ids_1A = task.given_AK[None, :, level]
            task.on_step(level)
        return Chains(torch.stack(tokens, 1), torch.stack(log_probs, 1), torch.stack(features, 1))


def _view_of_slots(documents: View, slots: KeptSlots | None, k: int) -> View:
    """Return who sees whom at step k, of all slots or of those that are kept."""
    if slots is None:
        return documents
    if k == 0:
        # Every slot needs its step-0 keys, and only the kept ones an output.
        return documents._replace(wanted_BM=slots.slots_BM)
    return documents.of(slots.slots_BM)


def _recomputed(
    drafter: "Drafter", read: Tensor, h_BTH: Tensor, view: View, cache: UnrollCache
) -> Step:
    """Run a step under gradient checkpointing; its keys are added once, however often it is run."""
    earlier = cache.copy()
    extended = list[UnrollCache]()

    def run(read: Tensor, h_BTH: Tensor) -> Step:
        own_cache = earlier.copy()
        if not extended:  # else it is run again, in the backward pass
            extended.append(own_cache)
        return drafter.advance(read, h_BTH, view._replace(cache=own_cache))

    step: Step = checkpoint(run, read, h_BTH, use_reentrant=False)
    cache.layers = extended[0].layers
    return step
