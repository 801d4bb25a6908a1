"""What a training step costs, from configs alone: floating point operations, and memory before the first step.

A multiply and an add are two operations. Counted are matrix products and attention as the model asks for them: a causal
query meets the keys up to its own, and what is recomputed counts once.

Legend: B rows, T tokens, K unroll steps, H hidden, D draft vocabulary, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specdec.data import Batch
from specdec.drafter import Drafter, DrafterConfig, PreNorm
from specdec.drafter.parts import part_flops
from specdec.nn.unroll import kept_bytes
from specdec.training.head_loss import BLOCK
from specdec.training.step import ObjectiveConfig
from specdec.training.ttt import supervised

FLOAT32 = 4  # bytes
MB = 10**6


class Precision(NamedTuple):
    """What a drafter is trained in."""

    weights: torch.dtype = torch.float32
    autocast: torch.dtype | None = None  # of products, where it is another than the weights'

    @property
    def products(self) -> torch.dtype:
        """What matrices are multiplied in."""
        return self.autocast or self.weights


PRECISIONS = {
    "64-true": Precision(torch.float64),
    "32-true": Precision(),
    "bf16-true": Precision(torch.bfloat16),
    "16-true": Precision(torch.float16),
    "bf16-mixed": Precision(torch.float32, torch.bfloat16),
    "16-mixed": Precision(torch.float32, torch.float16),
}
_SHORT = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "None": "32-true"}  # Lightning's


def precision(name: object) -> Precision | None:
    """What ``trainer.precision`` means, given as Lightning takes it; None for one that is not known."""
    return PRECISIONS.get(_SHORT.get(str(name), str(name)))


def pairs(T: int, window: int | None = None) -> int:
    """Query-key pairs of T queries that see the keys up to their own, at most the last ``window`` of them."""
    seen = T if window is None else max(0, min(window, T))
    return seen * (seen + 1) // 2 + (T - seen) * seen


def target_flops(model: Any, B: float, T: int) -> float:
    """Operations of a transformers model's forward without its head. Experts that are no ``nn.Linear`` are not counted,
    so that of a mixture of experts this is a lower bound."""
    decoder = model.get_decoder()
    config = decoder.config
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    weights = sum(part.weight.numel() for part in decoder.modules() if isinstance(part, nn.Linear))
    return B * (2 * weights * T + config.num_hidden_layers * 4 * width * pairs(T))


def step_flops(
    config: DrafterConfig, objective: ObjectiveConfig, model: Any, B: float, T: int, rows: Sequence[int] | None = None
) -> float:
    """Operations of training on B rows, forward and backward, whose products are taken for two of the forward's size.

    Args:
        model: the target's.
        rows: as :func:`row_counts` has them; None: every slot is trained.
    """
    H, K, tokens = config.hidden_size, objective.steps, B * T
    kept, head_rows, target_rows = rows or (tokens, tokens * K, tokens)
    parts = part_flops(config)
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = 2 * H * (2 * q + 2 * kv) + 6 * H * config.intermediate_size
    window = None if config.attention_window == "full" else config.attention_window
    seen = sum(pairs(T, None if window is None else window - k) / T + k for k in range(K))  # own columns: one a step
    drafter = parts.fuse * tokens + parts.read * B * (T + K)
    drafter += (tokens - kept) * (parts.enter + 4 * H * kv)  # a slot that nobody trains gives its key, and no more
    drafter += kept * (K * (parts.enter + config.num_layers * layer) + config.num_layers * 4 * q * seen)
    drafter += 2 * H * config.draft_vocab_size * head_rows
    width = config.vocab_size if objective.whole_vocabulary else config.draft_vocab_size
    return 3 * drafter + target_flops(model, B, T) + 2 * config.target_hidden_size * width * target_rows


def row_counts(batch: Batch, K: int) -> Tensor:
    """Slots that some step trains, rows of the drafter's head over all K steps, and rows of the target's head, which
    is asked once for all steps; (3,) int64 on the batch's device."""
    trained_KBT = torch.stack([supervised(batch.loss_mask_BT, batch.documents_BT, k) for k in range(K)])
    return torch.stack([trained_KBT.any(0).sum(), trained_KBT.sum(), trained_KBT[0].sum()])


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes on one device at the end of a forward. The backward pass takes up to a third more, as measured; Python,
    libraries and data are not part of it."""

    weights: int  # the drafter's; under autocast with their bfloat16 copies
    gradients: int
    optimizer: int
    target: int
    target_states: int  # those that training reads
    activations: int  # what the unroll keeps for its backward pass
    loss: int
    exchange: int = 0  # what several processes gather from, and reduce with, each other

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(astuple(self))

    def __str__(self) -> str:
        named = [(part.name.replace("_", " "), getattr(self, part.name) / MB) for part in fields(self)]
        return f"{self.total / MB:,.0f} MB: {', '.join(f'{name} {size:,.0f}' for name, size in named if size)}"


def skeleton_of(config: DrafterConfig) -> Drafter:
    """The drafter on the meta device: shapes, and no memory."""
    with torch.device("meta"):
        return Drafter(config, torch.arange(config.draft_vocab_size, device="cpu"))


def memory_need(
    config: DrafterConfig,
    objective: ObjectiveConfig,
    B: int,
    T: int,
    *,
    trained_in: Precision = Precision(),  # noqa: B008  frozen
    train_embed: bool = False,
    train_head: bool = True,
    target_bytes: int = 0,
    target_dtype: torch.dtype = torch.float32,
    world: int = 1,
    sharded: bool = False,
) -> MemoryNeed:
    """Add up what one device will hold, with AdamW's two float32 moments.

    DDP keeps everything on every device, and each gradient's place in a bucket. FSDP2 keeps shards, and gathers all
    weights but a frozen embedding's while a batch is computed.

    Args:
        target_bytes: of the target's parameters and buffers.
    """
    drafter, each, shards = skeleton_of(config), trained_in.weights.itemsize, world if sharded else 1
    parameters = sum(p.numel() for p in drafter.parameters())
    frozen_embed = 0 if train_embed else drafter.embed_tokens.weight.numel()
    trainable = parameters - frozen_embed - (0 if train_head else drafter.lm_head.weight.numel())
    exchange = trainable * each if world > 1 or sharded else 0
    if sharded:
        exchange += (parameters - frozen_embed) * each
    states = len(config.aux_layers) * each + target_dtype.itemsize  # the fused ones, and the last for the logits
    return MemoryNeed(
        weights=parameters * each // shards + (trainable * trained_in.autocast.itemsize if trained_in.autocast else 0),
        gradients=trainable * each // shards,
        optimizer=trainable * 2 * FLOAT32 // shards,
        target=target_bytes,
        target_states=B * T * config.target_hidden_size * states,
        activations=activations(config, B, T, objective.steps, trained_in, objective.recompute),
        loss=_loss_bytes(config, objective, B, T, trained_in, train_head),
        exchange=exchange,
    )


def activations(
    config: DrafterConfig,
    B: int,
    T: int,
    K: int,
    trained_in: Precision = Precision(),  # noqa: B008  frozen
    recompute: bool = False,
) -> int:
    """Bytes that fusion and unroll keep for the backward pass, to some percent, without parameters and their copies,
    where every slot is trained and the kernel keeps no weights. With recomputation every step keeps its feature, keys
    and values, and one step at a time is whole again. A tensor that two operations keep counts once.
    """
    H, heads, layers, norms = config.hidden_size, config.num_attention_heads, config.num_layers, config.norms
    q, kv = heads * config.head_dim, config.num_key_value_heads * config.head_dim
    each, narrow = trained_in.products.itemsize, part_flops(config).enter > 0

    # One step, per token: what norms read (of each layer the middle, and the input of those after the first);
    step = H * (_keeps_read(config) + layers + (layers - 1) + bool(norms.output) + bool(norms.input))
    step += layers * (q + 2 * kv) * bool(norms.query_key)
    # what linear layers read (a narrow entry projects the feature; the gated product is made again);
    step += H * (bool(norms.hidden) + narrow) + (layers - 1) * H + layers * (q + H)
    # rotated queries and keys, values, gate and up; in float32 a log-sum-exp per head, and cosine and sine.
    step += layers * (q + 2 * kv + 2 * config.intermediate_size)
    step_bytes = step * each + (layers * heads + 2 * config.head_dim) * FLOAT32
    unroll = K * step_bytes
    if recompute:
        unroll = K * min((H + layers * 2 * kv) * each, step_bytes) + step_bytes

    # Once for all steps: the embedding and its normed self, and what fusion's linear layers read.
    with torch.device("meta"):
        linears = [part for part in config.fusion.build(config).modules() if isinstance(part, nn.Linear)]
    once = H * (1 + bool(norms.embed)) + sum(part.in_features for part in linears)
    plans = 1 if config.attention_window == "full" else K  # a window moves with the steps
    return B * T * (once * each + unroll) + plans * kept_bytes(B, T)


def _loss_bytes(
    config: DrafterConfig, objective: ObjectiveConfig, B: int, T: int, trained_in: Precision, train_head: bool
) -> int:
    """Of :mod:`specdec.training.head_loss`: the states that the head reads, where the unroll does not keep them, their
    gradients and the head's; of one piece draft logits and gradients, the target's probabilities, and a block of it."""
    D, K, each = config.draft_vocab_size, objective.steps, trained_in.products.itemsize
    states = B * T * K * config.hidden_size * each
    positions = min(max(16, objective.piece_bytes // (FLOAT32 * K * D)), B * T)
    per_position = 3 * K * D * each + (6 * D + 2 * min(config.vocab_size, BLOCK)) * FLOAT32
    kept = states // K if _keeps_read(config) else states
    by_head = train_head * D * config.hidden_size * trained_in.weights.itemsize
    return kept + states + by_head + positions * per_position


def _keeps_read(config: DrafterConfig) -> bool:
    """Whether the unroll keeps the state that the head reads: the next step reads it too."""
    return not (isinstance(config.recurrence, PreNorm) and bool(config.norms.output))
