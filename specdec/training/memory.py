"""What training needs of memory, from configs alone.

Legend: B rows, T tokens, K unroll steps, H hidden, D draft vocabulary.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from specdec.drafter import DrafterConfig, PreNorm
from specdec.drafter.model import skeleton_of
from specdec.nn.unroll import kept_bytes
from specdec.training.head_loss import BLOCK
from specdec.training.step import ObjectiveConfig

log = logging.getLogger(__name__)

FLOAT32 = 4  # bytes
MB = 10**6


PRECISIONS = {"64": torch.float64, "32": torch.float32, "16": torch.float16, "bf16": torch.bfloat16}


class Precision(NamedTuple):
    """What a drafter is trained in."""

    weights: torch.dtype = torch.float32
    products: torch.dtype = torch.float32


def precision(name: object) -> Precision | None:
    """What ``trainer.precision`` means, given as Lightning takes it; None for one that is not known."""
    bits, _, kind = str(name or 32).partition("-")
    if bits not in PRECISIONS or kind not in ("", "true", "mixed"):
        return None
    mixed = kind == "mixed" or (kind == "" and bits in ("16", "bf16"))
    return Precision(torch.float32 if mixed else PRECISIONS[bits], PRECISIONS[bits])


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
    nodes: int = 1,
    sharded: bool = False,
) -> dict[str, int]:
    """Bytes on one device at the end of a forward, part by part, with AdamW's two float32 moments.

    The backward pass takes up to a third more, as measured; Python, libraries and data are not part of it. DDP keeps
    everything on every device, and each gradient's place in a bucket. FSDP2 keeps shards, as many as a node has
    processes, and gathers all weights but a frozen embedding's while a batch is computed.

    Args:
        target_bytes: of the target's parameters and buffers.
    """
    drafter = skeleton_of(config)
    each = trained_in.weights.itemsize
    shards = world // nodes if sharded else 1
    parameters = sum(p.numel() for p in drafter.parameters())
    frozen_embed = 0 if train_embed else drafter.embed_tokens.weight.numel()
    trainable = parameters - frozen_embed - (0 if train_head else drafter.lm_head.weight.numel())
    exchange = trainable * each if world > 1 or sharded else 0
    if sharded:
        exchange += (parameters - frozen_embed) * trained_in.products.itemsize
    # the fused ones, and the last for the logits
    states = len(config.aux_layers) * each + target_dtype.itemsize
    # shards are gathered in the products' dtype
    cast = trained_in.products != trained_in.weights and not sharded
    copies = trainable * trained_in.products.itemsize if cast else 0
    return {
        "weights": parameters * each // shards + copies,
        "gradients": trainable * each // shards,
        "optimizer": trainable * 2 * FLOAT32 // shards,
        "target": target_bytes,
        "target_states": B * T * config.target_hidden_size * states,
        "activations": activations(
            config, B, T, objective.shares(config.recurrence.masks), trained_in, objective.recompute
        ),
        "loss": _loss_bytes(config, objective, B, T, trained_in, train_head),
        "exchange": exchange,  # what several processes gather from, and reduce with, each other
    }


def activations(
    config: DrafterConfig,
    B: int,
    T: int,
    shares: Sequence[float],
    trained_in: Precision = Precision(),  # noqa: B008  frozen
    recompute: bool = False,
) -> int:
    """Bytes that fusion and unroll keep for the backward pass, to some percent, without parameters and their copies,
    where the kernel keeps no weights. With recomputation every step keeps its feature, keys and values, and one step at
    a time is whole again. A tensor that two operations keep counts once.

    Args:
        shares: of each of K steps, how many of the slots are trained; below 1 it falls short by up to a fifth,
            what is narrowed being copied.
    """
    K = len(shares)
    steps = sum(shares)
    H = config.hidden_size
    heads = config.num_attention_heads
    layers = config.num_layers
    norms = config.norms
    q = heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    each = trained_in.products.itemsize
    with torch.device("meta"):
        of_fusion, of_entry = (
            [
                layer.in_features
                for layer in part.build(config).modules()
                if isinstance(layer, nn.Linear)
            ]
            for part in (config.fusion, config.entry)
        )

    # Once for all steps: what fusion's linear layers read, and what the embedding's norm does.
    once = sum(of_fusion) + H * bool(norms.embed)
    # all steps at once, per token: n nodes of blocks, and one of context
    if config.recurrence.masks:
        n = shares[0] * (1 + config.recurrence.masks)
        step = n * (2 * config.intermediate_size + 4 * H + 2 * q) + (1 + n) * config.attention.kept(
            config
        )
        step += (1 + n) * (q + 2 * kv) * (1 + bool(norms.query_key))
        whole = layers * step + n * H * bool(norms.output) + H * bool(norms.hidden)
        tables = layers * n * heads + 2 * (1 + n) * config.attention.rotated(config)
        return int(B * T * ((once + whole) * each + tables * FLOAT32)) + kept_bytes(B, T)

    # One step, per token: what norms read (of each layer the middle, and the input of those after the first);
    step = H * (
        _keeps_read(config) + layers + (layers - 1) + bool(norms.output) + bool(norms.input)
    )
    step += layers * (q + 2 * kv) * bool(norms.query_key)
    # what linear layers read (of the entry's not the first, which reads the token; the gated product is made again);
    step += H * bool(norms.hidden) + sum(of_entry[1:]) + (layers - 1) * H + layers * (q + H)
    step += layers * config.attention.kept(config)
    # rotated queries and keys, values, gate and up; in float32 a log-sum-exp per head, and cosine and sine.
    step += layers * (q + 2 * kv + 2 * config.intermediate_size)
    step_bytes = step * each + (layers * heads + 2 * config.attention.rotated(config)) * FLOAT32
    unroll = steps * step_bytes
    if recompute:
        unroll = steps * min((H + layers * 2 * kv) * each, step_bytes) + step_bytes

    once += H  # the embedding, which of a block is the first layer's input and counted there
    plans = 1 if config.attention_window == "full" else K  # a window moves with the steps
    return int(B * T * (once * each + unroll)) + plans * kept_bytes(B, T)


def _loss_bytes(
    config: DrafterConfig,
    objective: ObjectiveConfig,
    B: int,
    T: int,
    trained_in: Precision,
    train_head: bool,
) -> int:
    """Of :mod:`specdec.training.head_loss`: the states that the head reads, where the unroll does not keep them, their
    gradients and the head's; of one piece draft logits and gradients, the target's probabilities, and a block of it."""
    D = config.draft_vocab_size
    K = objective.steps
    each = trained_in.products.itemsize
    states = int(B * T * sum(objective.shares(config.recurrence.masks)) * config.hidden_size * each)
    positions = min(objective.piece(FLOAT32, D), B * T)
    per_position = 3 * K * D * each + (6 * D + 2 * min(config.vocab_size, BLOCK)) * FLOAT32
    kept = states // K if _keeps_read(config) else states
    by_head = train_head * D * config.hidden_size * trained_in.weights.itemsize
    return kept + states + by_head + positions * per_position


def _keeps_read(config: DrafterConfig) -> bool:
    """Whether the unroll keeps the state that the head reads: the next step reads it too."""
    return not (
        (isinstance(config.recurrence, PreNorm) or config.recurrence.parallel)
        and bool(config.norms.output)
    )


def report_memory(need: dict[str, int]) -> None:
    """Log what is needed, part by part."""
    parts = ", ".join(
        f"{name.replace('_', ' ')} {size / MB:,.0f}" for name, size in need.items() if size
    )
    log.info("estimated memory: %s MB: %s", f"{sum(need.values()) / MB:,.0f}", parts)
