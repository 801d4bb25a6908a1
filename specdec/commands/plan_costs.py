"""What a planned run costs: operations, bytes sent, bytes on the disk, and time and memory on devices.

Legend: T tokens of a row, K unroll steps, H hidden, D draft vocabulary, V vocabulary.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from specdec.drafter import Drafter, DrafterConfig
from specdec.drafter.model import skeleton_of
from specdec.nn.optimizers import TABLES
from specdec.training.memory import FLOAT32, Precision
from specdec.training.step import ObjectiveConfig


class Device(NamedTuple):
    """By its vendor's data sheet."""

    memory: float  # bytes
    flops: float  # a second, of dense products in 16 bits
    # the same in float32, whose products torch doesn't round to TF32 by default
    float32_flops: float

    def flops_in(self, dtype: str) -> float:
        """Return the operations a second of products in a dtype."""
        return self.flops if dtype in ("bfloat16", "float16") else self.float32_flops

    def slowed(self, share: float) -> "Device":
        """Return the device with this share of its peaks."""
        return self._replace(flops=share * self.flops, float32_flops=share * self.float32_flops)


DEVICES = {
    "a100": Device(80e9, 312e12, 19.5e12), "h100": Device(80e9, 989e12, 67e12), "h200": Device(141e9, 989e12, 67e12),
    "b200": Device(180e9, 2250e12, 75e12), "mi300x": Device(192e9, 1307e12, 163e12),
}  # fmt: skip
# of a device's memory, that a producer's weights may take; the rest is for keys and states
ROOM = 0.85
BACKWARD = 4 / 3  # of the memory at the end of a forward, at most, as measured
# what configs call the experts of a token
CHOSEN = "num_experts_per_tok", "top_k_experts", "moe_topk"


def exchanged(
    drafter: Drafter, frozen: int, frozen_embed: int, trained_in: Precision, world: int, nodes: int, batches: int,
    sharded: bool,
) -> float:  # fmt: skip
    """Bytes that a process sends in a step of this many batches, around rings.

    DDP sums gradients and spreads the sums. FSDP2 gathers the weights of a node's shards and sums gradients to shards
    for every batch, and several nodes sum those.
    """
    weights = sum(p.numel() for p in drafter.parameters())
    gradients = (weights - frozen) * trained_in.weights.itemsize
    if not sharded:
        return 2 * (world - 1) / world * gradients
    shards = world // nodes
    embeds = drafter.config.drafting.embedding_gathers
    gathered = (weights - frozen_embed + embeds * frozen_embed) * trained_in.products.itemsize
    beside = 2 * (nodes - 1) / nodes * gradients / shards
    return batches * ((shards - 1) / shards * (gathered + gradients) + beside)


def target_flops(model: Any, T: int) -> float:
    """Of a forward of the target for a token, without its head, rows being one document of T tokens."""
    text, (embedding, head) = model.config.get_text_config(decoder=True), _tables(model)
    chosen = next((n for name in CHOSEN if (n := getattr(text, name, None))), None)
    flops = 0.0
    for name, weight in model.named_parameters():
        if weight.dim() < 2 or name.endswith("bias") or weight is embedding or weight is head:
            continue
        layer_name, routed, _ = name.partition(".experts.")
        # a token meets some of them; families stack all in one tensor, or name each
        if routed and chosen:
            numbered = model.get_submodule(f"{layer_name}.experts")
            experts = len(numbered) if isinstance(numbered, nn.ModuleList) else len(weight)
            flops += 2 * weight.numel() * chosen / experts
        else:
            flops += 2 * weight.numel()
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    queries, values = (getattr(text, name, None) or width for name in ("qk_head_dim", "v_head_dim"))
    # a token sees half of a row
    attention = text.num_hidden_layers * heads * (queries + values) * T
    return flops + attention


def drafter_flops(
    config: DrafterConfig, objective: ObjectiveConfig, train_head: bool, T: int
) -> dict[str, float]:
    """Of a training step for a token, forward and backward: the target's head, and the drafter."""
    drafter = skeleton_of(config)
    shares = objective.shares(config.drafting)
    nodes = config.drafting.drafted_nodes(shares)
    fusion = sum(p.numel() for p in drafter.fusion.parameters() if p.dim() > 1)
    body = sum(
        p.numel()
        for name, p in drafter.named_parameters()
        if p.dim() > 1 and not name.startswith(("fusion.", *(f"{table}." for table in TABLES)))
    )
    H = config.hidden_size
    D = config.draft_vocab_size
    V = config.vocab_size
    heads = config.num_attention_heads * config.head_dim * config.num_layers
    forwards = 2 if objective.recompute else 1
    return {
        # all of the vocabulary is needed to know whether the likeliest token is in the draft vocabulary
        "target_head": 2.0 * config.target_hidden_size * (V if objective.in_vocab else D),
        "drafter": 2.0
        # by the inputs, which are none of fusion's; by weights
        * (2 * fusion + (2 + forwards) * nodes * body)
        # two products over half a row, and five in the backward pass
        + (5 + 2 * forwards) * nodes * heads * T
        + 2.0 * ((3 if train_head else 2) * H + 3 * config.drafting.extra_width) * sum(shares) * D,
    }


def _tables(model: Any) -> tuple[Any, Any]:
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight


def on_devices(
    figures: Mapping[str, Any], device: Device, network: float, target_bytes: float
) -> dict[str, Any]:
    """Time and traffic of the planned run by where its features come from: computed in the step, read from a cache,
    or streamed.

    Args:
        device: with the operations a second that it reaches.
        network: bytes a second of a process.
        target_bytes: of one of the target's parameters in a producer.
    """
    world = figures["processes"]
    flops = figures["flops_per_token"]
    tokens = figures["tokens_per_step"] / world  # of a process
    products = figures["products"]
    target_rate = device.flops_in(products["target"])
    alone = tokens * flops["target_head"] / target_rate
    alone += tokens * flops["drafter"] / device.flops_in(products["drafter"])
    alone += figures["exchanged_bytes_per_step"] / network
    fly = alone + tokens * flops["target"] / target_rate
    rate = tokens / alone
    states = figures["feature_bytes_per_token"]
    weights = figures["target_parameters"] * target_bytes
    devices = 2 ** max(0, math.ceil(math.log2(weights / (ROOM * device.memory))))
    producers = math.ceil(world * rate * flops["target"] / (devices * target_rate))
    rows = figures["train_rows"]
    ahead = {
        "step_seconds": alone, "tokens_per_second": world * rate, "memory_bytes": figures["memory_bytes_with_parts"],
        "fits": BACKWARD * figures["memory_bytes_with_parts"] < device.memory,
        "feature_bytes_per_second_and_process": rate * states,
    }  # fmt: skip
    return {
        "on_the_fly": {
            "step_seconds": fly, "tokens_per_second": world * tokens / fly,
            "memory_bytes": figures["memory_bytes_with_target"],
            "fits": BACKWARD * figures["memory_bytes_with_target"] < device.memory,
        },
        "cached": ahead | {"disk_bytes": rows * figures["seq_len"] * states if isinstance(rows, int) else None},
        "streamed": ahead | {
            "devices_of_a_producer": devices, "producers": producers, "devices_of_producers": devices * producers,
            "network_share": rate * states / network,
        },
    }  # fmt: skip


def disk_bytes(
    figures: Mapping[str, Any],
    trained_in: Precision,
    numbered: int | None,
    drafters: int,
    cache: str | None,
) -> dict[str, int | None]:
    """Bytes that a run leaves on the disk; what is not known is None, and so is the total then.

    Args:
        numbered: checkpoints that the run keeps next to ``last.ckpt``.
        drafters: directories of a drafter: the last one, and the best one.
        cache: the directory of the features, if the run reads them from one.
    """
    trainable = figures["drafter_trainable_parameters"]
    weights = (trainable + figures["drafter_frozen_parameters"]) * trained_in.weights.itemsize
    checkpoint = weights + 2 * FLOAT32 * trainable  # with AdamW's moments
    stored = 0 if cache is None else _cache_bytes(figures, Path(cache))
    parts = {
        "checkpoints": None if numbered is None else (numbered + 1) * checkpoint,
        "drafters": drafters * weights,
        "feature_cache": stored,
    }
    known = [size for size in parts.values() if size is not None]
    total = sum(known) if len(known) == len(parts) else None
    return {"checkpoint": checkpoint, **parts, "total": total}


def _cache_bytes(figures: Mapping[str, Any], cache: Path) -> int | None:
    """Return the bytes of a feature cache that exists, else those that one of all training rows takes."""
    if cache.is_dir():
        return sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    rows = figures["train_rows"]
    if isinstance(rows, str):
        return None
    return int(rows * figures["seq_len"] * figures["feature_bytes_per_token"])


def run_on_device(figures: Mapping[str, Any], device: Device) -> dict[str, Any]:
    """Time and memory of the run as configured, in which the target is whole or in parts and features have one source.

    ``device_hours`` counts the devices of producers too.
    """
    source = figures["on_devices"][figures["feature_source"]]
    devices = figures["processes"] + source.get("devices_of_producers", 0)
    steps = figures["steps"]
    seconds = None if steps is None else steps * source["step_seconds"]
    peak = BACKWARD * figures["memory_bytes_per_process"]["total"]
    return {
        "devices": devices,
        "step_seconds": source["step_seconds"],
        "seconds": seconds,
        "device_hours": None if seconds is None else devices * seconds / 3600,
        "memory_bytes_peak": peak,
        "memory_bytes_of_device": device.memory,
        "fits": peak < device.memory,
    }


def bought(figures: Mapping[str, Any], hours: float) -> dict[str, Any]:
    """Steps and tokens that a budget of device-hours buys; the epochs are None where their length is not known."""
    run = figures["on_device"]
    steps = int(3600 * hours / (run["devices"] * run["step_seconds"]))
    per_epoch = figures["steps_per_epoch"]
    return {
        "device_hours": hours,
        "steps": steps,
        "tokens": steps * figures["tokens_per_step"],
        "epochs": None if per_epoch is None else steps / per_epoch,
    }
