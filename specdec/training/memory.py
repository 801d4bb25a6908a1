"""What training needs of memory, from configs alone.

Legend: B rows, T tokens, K unroll steps, H hidden, D draft vocabulary.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from specdec.drafter import DrafterConfig
from specdec.drafter.model import skeleton_of
from specdec.drafting.mode import linear_inputs
from specdec.training.step import ObjectiveConfig
from specdec.training.target_head import BLOCK

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
    weight_bytes = trained_in.weights.itemsize
    shards = world // nodes if sharded else 1
    parameters = sum(p.numel() for p in drafter.parameters())
    frozen_embed = 0 if train_embed else drafter.embed_tokens.weight.numel()
    trainable = parameters - frozen_embed - (0 if train_head else drafter.lm_head.weight.numel())
    exchange = trainable * weight_bytes if world > 1 or sharded else 0
    if sharded:
        exchange += (parameters - frozen_embed) * trained_in.products.itemsize
    # the fused ones, and the last for the logits
    states = len(config.aux_layers) * weight_bytes + target_dtype.itemsize
    # shards are gathered in the products' dtype
    cast = trained_in.products != trained_in.weights and not sharded
    copies = trainable * trained_in.products.itemsize if cast else 0
    return {
        "weights": parameters * weight_bytes // shards + copies,
        "gradients": trainable * weight_bytes // shards,
        "optimizer": trainable * 2 * FLOAT32 // shards,
        "target": target_bytes,
        "target_states": B * T * config.target_hidden_size * states,
        "activations": activations(
            config, B, T, objective.shares(config.drafting), trained_in, objective.recompute
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
    """Return the bytes that fusion and unroll keep for the backward pass, to some percent.

    Parameters and their copies are not part of it, nor are the weights of a kernel that keeps them.

    Args:
        shares: of the slots, those that each of K steps trains; below 1 the result falls short by up to a fifth, since
            what is narrowed is copied.
    """
    number_bytes = trained_in.products.itemsize
    fusion = B * T * sum(linear_inputs(config.fusion, config)) * number_bytes
    unroll = config.drafting.activation_bytes(config, number_bytes, B, T, shares, recompute)
    return fusion + unroll


def _loss_bytes(
    config: DrafterConfig,
    objective: ObjectiveConfig,
    B: int,
    T: int,
    trained_in: Precision,
    train_head: bool,
) -> int:
    """Return the bytes of the head and its loss: the states that the head reads, unless the unroll keeps them, their
    gradients and the head's; of one piece draft logits and gradients, the target's probabilities, and a block of it."""
    D = config.draft_vocab_size
    K = objective.steps
    number_bytes = trained_in.products.itemsize
    extra = config.drafting.extra_width
    width = config.hidden_size + extra
    states = int(B * T * sum(objective.shares(config.drafting)) * width * number_bytes)
    positions = min(objective.piece(FLOAT32, D), B * T)
    per_position = 3 * K * D * number_bytes + (6 * D + 2 * min(config.vocab_size, BLOCK)) * FLOAT32
    # A state that the next step reads too is kept by the unroll already, but for the last step's.
    unroll_keeps_them = config.recurrence.feeds_head_input or not config.norms.output
    kept_states = states // K if unroll_keeps_them else states
    by_head = D * (train_head * config.hidden_size + extra) * trained_in.weights.itemsize
    return kept_states + states + by_head + positions * per_position


def report_memory(need: dict[str, int]) -> None:
    """Log what is needed, part by part."""
    parts = ", ".join(
        f"{name.replace('_', ' ')} {size / MB:,.0f}" for name, size in need.items() if size
    )
    log.info("estimated memory: %s MB: %s", f"{sum(need.values()) / MB:,.0f}", parts)
