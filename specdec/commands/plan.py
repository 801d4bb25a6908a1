"""``specdec plan``: memory and steps of ``specdec fit`` on many devices, from configs alone.

With ``--device``, also the time of a step, how many producers keep up with it, and what goes over the network and lies
on the disk.

Legend: T tokens of a row, K unroll steps, H hidden, D draft vocabulary, V vocabulary.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from specdec.commands.fit import Configured, configured
from specdec.commands.parser import OwnOptions
from specdec.data import TokenData
from specdec.drafter import Drafter, DrafterConfig
from specdec.drafter.model import skeleton_of
from specdec.features import Streamed
from specdec.features.contract import DTYPES as STORED
from specdec.features.contract import SCALED
from specdec.features.source import Features
from specdec.target import TargetSource
from specdec.target.loading import DTYPES, named_parts, skeleton
from specdec.training.distributed import strategy_kind
from specdec.training.memory import MB, PRECISIONS, Precision, memory_need, precision
from specdec.training.module import DrafterModule
from specdec.training.run_directory import RunDirectory
from specdec.training.step import CUDA_PIECE, ObjectiveConfig


class Device(NamedTuple):
    """By its vendor's data sheet."""

    memory: float  # bytes
    flops: float  # a second, of dense products in bfloat16


DEVICES = {
    "a100": Device(80e9, 312e12), "h100": Device(80e9, 989e12), "h200": Device(141e9, 989e12),
    "b200": Device(180e9, 2250e12), "mi300x": Device(192e9, 1307e12),
}  # fmt: skip
# of a device's memory, that a producer's weights may take; the rest is for keys and states
ROOM = 0.85
BACKWARD = 4 / 3  # of the memory at the end of a forward, at most, as measured
# what configs call the experts of a token
CHOSEN = "num_experts_per_tok", "top_k_experts", "moe_topk"


def drafter_config(module: DrafterModule, model: Any) -> DrafterConfig:
    """The design with a target's dimensions, from a model without weights; ValueError if they do not go together."""
    text = model.config.get_text_config(decoder=True)
    V = model.get_output_embeddings().weight.shape[0]
    sizes = {"vocab_size": V, "num_target_layers": text.num_hidden_layers}
    identity = module.target_source.source
    return DrafterConfig.for_target(module.spec, text, **sizes, identity={"source": identity})


def plan(argv: list[str]) -> int:
    """Run the command; ValueError if an argument is wrong, or target and design do not go together."""
    example = "Example: specdec plan --world 8 --config conf/quickstart.yaml"
    parser = OwnOptions("plan", __doc__, f"All other flags are specdec fit's. {example}")
    _add_options(parser)
    options, args = parser.parse_known_args(argv)
    if options.world < 1:
        raise ValueError(f"plan: --world must be at least 1, not {options.world}")
    if not (0 < options.efficiency <= 1 and 0 < options.network < math.inf):
        raise ValueError(
            "plan: --efficiency must be above 0 and at most 1, --network a positive number of GB a second"
        )
    cli = configured(Configured, "fit", args, RunDirectory())
    figures = plan_run(cli, options.world, on_gpus=options.device is not None)
    if options.device:
        device = DEVICES[options.device]
        device = device._replace(flops=device.flops * options.efficiency)
        figures["on_devices"] = on_devices(
            figures, device, options.network * 1e9, options.target_bits / 8
        )
    if options.json:
        sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    else:
        table = Table("", "", box=None, show_header=False)
        for row in _rows(figures):
            table.add_row(*row)
        Console(width=None if sys.stdout.isatty() else 150).print(table)
    return 0


def _add_options(parser: OwnOptions) -> None:
    add = parser.add_argument
    add("--world", type=int, required=True, metavar="N", help="processes, one on each device")
    add("--json", action="store_true", help="print JSON, memory in bytes")
    add(
        "--device",
        choices=[*DEVICES],
        help="estimate time, producers, network and disk on devices of this kind",
    )
    add(
        "--efficiency",
        type=float,
        default=0.35,
        metavar="SHARE",
        help="of the device's peak that products reach; "
        "0.35 is a guess, benchmarks/gpu.py measures",
    )
    add(
        "--network",
        type=float,
        default=50.0,
        metavar="GB/S",
        help="of each process, to the others and to producers",
    )
    add("--target_bits", type=int, default=16, choices=(4, 8, 16),
        help="of the target's weights in a producer")  # fmt: skip


def plan_run(cli: Configured, world: int, on_gpus: bool = False) -> dict[str, Any]:
    """Work out what a run's parts need on ``world`` processes; JSON-ready.

    ``train_rows`` are the packed rows of the training data, or why they are not known; memory is in bytes, of a process
    as configured, and in all of one that has the target in parts, or whole. ``flops_per_token`` counts products, a
    multiplication and an addition as two. ``on_gpus``: the loss is computed in the pieces that a GPU gets.
    """
    options = cli.config.fit.trainer
    data = cli.datamodule
    module = cli.model
    trained_in, strategy = _precision_and_strategy(options, world)
    source = module.target_source
    model = skeleton(source.directory(), source.revision, source.trust_remote_code)
    config = drafter_config(module, model)
    drafter = skeleton_of(config)
    frozen_embed = 0 if module.train_embed else drafter.embed_tokens.weight.numel()
    frozen = frozen_embed + (0 if module.train_head else drafter.lm_head.weight.numel())
    target = sum(p.numel() for p in model.parameters())
    parts = sum(p.numel() for _, p in named_parts(model).values())
    dtype = DTYPES[source.dtype]
    objective = module.objective
    if on_gpus:
        objective = dataclasses.replace(objective, piece_bytes=CUDA_PIECE)
    memory = memory_need(
        config, objective, data.batch_size, data.seq_len, trained_in=trained_in, train_embed=module.train_embed,
        train_head=module.train_head,
        target_bytes=(parts if source.parts else target) * dtype.itemsize, target_dtype=dtype, world=world,
        nodes=options.num_nodes, sharded=strategy == "fsdp2",
    )  # fmt: skip
    without_target = sum(memory.values()) - memory["target"]
    rows_per_step = data.batch_size * options.accumulate_grad_batches * world
    rows, steps = _rows_and_steps(data, source, world, rows_per_step)
    return {
        "processes": world,
        "strategy": "one" if world == 1 and strategy == "ddp" else strategy,
        "drafter_trainable_parameters": sum(p.numel() for p in drafter.parameters()) - frozen,
        "drafter_frozen_parameters": frozen,
        "target_parameters": target,
        "seq_len": data.seq_len,
        "rows_per_step": rows_per_step,
        "tokens_per_step": rows_per_step * data.seq_len,
        "train_rows": rows,
        "steps_per_epoch": steps,
        "flops_per_token": {"target": target_flops(model, data.seq_len)}
        | drafter_flops(config, module.objective, module.train_head, data.seq_len),
        "exchanged_bytes_per_step": exchanged(
            drafter, frozen, frozen_embed, trained_in, world, options.num_nodes, options.accumulate_grad_batches,
            sharded=strategy == "fsdp2",
        ),
        "feature_bytes_per_token": _feature_bytes(config, module.features, dtype),
        "memory_bytes_with_parts": without_target + parts * dtype.itemsize,
        "memory_bytes_with_target": without_target + target * dtype.itemsize,
        "memory_bytes_per_process": memory | {"total": sum(memory.values())},
    }  # fmt: skip


def _precision_and_strategy(options: Any, world: int) -> tuple[Precision, str]:
    """Return what the trainer's options stand for; raise ValueError if plan does not know them."""
    trained_in = precision(options.precision)
    strategy = strategy_kind(options.strategy)
    if trained_in is None:
        raise ValueError(
            f"trainer.precision={options.precision}: plan knows {', '.join(PRECISIONS)}"
        )
    if world % options.num_nodes:
        raise ValueError(
            f"plan: --world={world} cannot be shared evenly by trainer.num_nodes={options.num_nodes}"
        )
    return trained_in, strategy


def _rows_and_steps(
    data: TokenData, source: TargetSource, world: int, rows_per_step: int
) -> tuple[int | str, int | None]:
    """Return the packed training rows and the steps of an epoch; or why the rows are not known, and None."""
    try:
        data.prepare(source.load_tokenizer())
    except ValueError as error:
        return str(error), None
    rows = len(data.splits.train.ids_BT)
    return rows, math.ceil(math.ceil(rows / world) * world / rows_per_step)


def _feature_bytes(config: DrafterConfig, features: Features, dtype: torch.dtype) -> int:
    """Return the bytes of a token's stored or streamed states."""
    if isinstance(features, Streamed):
        dtype = STORED.get(features.dtype, dtype)
    states = 1  # the final one
    for boundary in config.aux_layers:
        states += boundary < config.num_target_layers or not config.fusion.final_norm
    return states * (config.target_hidden_size * dtype.itemsize + 4 * (dtype in SCALED))


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
        if p.dim() > 1 and not name.startswith(("fusion.", "embed_tokens.", "lm_head."))
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
        + 2.0 * (3 if train_head else 2) * sum(shares) * H * D,
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
    alone = tokens * (flops["target_head"] + flops["drafter"]) / device.flops
    alone += figures["exchanged_bytes_per_step"] / network
    fly = alone + tokens * flops["target"] / device.flops
    rate = tokens / alone
    states = figures["feature_bytes_per_token"]
    weights = figures["target_parameters"] * target_bytes
    devices = 2 ** max(0, math.ceil(math.log2(weights / (ROOM * device.memory))))
    producers = math.ceil(world * rate * flops["target"] / (devices * device.flops))
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


def _rows(figures: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, str]]:
    """Yield names and values of a nested mapping, for people; names begin with ``start``."""
    for key, value in figures.items():
        name = start + key.replace("_", " ")
        if isinstance(value, Mapping):
            yield from _rows(value, f"{name}: ")
        elif value is None or isinstance(value, bool | str):
            yield name, "unknown" if value is None else str(value)
        else:
            number = value / MB if "bytes" in name else value
            digits = "," if isinstance(number, int) else ",.3g" if number < 999 else ",.0f"
            yield name.replace("bytes", "MB"), format(number, digits)
