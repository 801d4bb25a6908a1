"""``specdec plan``: memory, disk and steps of ``specdec fit`` on many devices, from configs alone, and a verdict.

With ``--device``, also the hours, whether the run fits, how many producers keep up with it, and what goes over the
network. With ``--budget_hours``, the steps and tokens that a number of GPU-hours buys.
"""

import dataclasses
import json
import math
import sys
from typing import Any

import torch

from specdec.commands.fit import Configured, configured
from specdec.commands.parser import OwnOptions
from specdec.commands.plan_costs import (
    DEVICES,
    bought,
    disk_bytes,
    drafter_flops,
    exchanged,
    on_devices,
    run_on_device,
    target_flops,
)
from specdec.commands.plan_report import plan_report
from specdec.data import TokenData
from specdec.drafter import DrafterConfig
from specdec.drafter.model import skeleton_of
from specdec.features import Cached
from specdec.features.contract import DTYPES as STORED
from specdec.features.contract import SCALED
from specdec.features.producing import ProducedFeatures
from specdec.features.source import Features
from specdec.target import TargetSource
from specdec.target.loading import DTYPES, named_parts, skeleton
from specdec.training.distributed import strategy_kind
from specdec.training.memory import PRECISIONS, Precision, memory_need, precision
from specdec.training.module import DrafterModule
from specdec.training.run_directory import RunDirectory
from specdec.training.step import CUDA_PIECE


def drafter_config(module: DrafterModule, model: Any) -> DrafterConfig:
    """The design with a target's dimensions, from a model without weights; ValueError if they do not go together."""
    text = model.config.get_text_config(decoder=True)
    V = model.get_output_embeddings().weight.shape[0]
    sizes = {"vocab_size": V, "num_target_layers": text.num_hidden_layers}
    identity = module.target_source.source
    return DrafterConfig.for_target(module.spec, text, **sizes, identity={"source": identity})


def plan(argv: list[str]) -> int:
    """Run the command; ValueError if an argument is wrong, or target and design do not go together."""
    example = "Example: specdec plan --config conf/quickstart.yaml --device h100"
    parser = OwnOptions("plan", __doc__, f"All other flags are specdec fit's. {example}")
    _add_options(parser)
    options, args = parser.parse_known_args(argv)
    _check_options(options)
    cli = configured(Configured, "fit", args, RunDirectory())
    world = options.world or _configured_processes(cli.config.fit.trainer)
    figures = plan_run(cli, world, on_gpus=options.device is not None)
    if options.device:
        device = DEVICES[options.device]
        slowed = device.slowed(options.efficiency)
        network = options.network * 1e9
        figures["device"] = options.device
        figures["efficiency"] = options.efficiency
        figures["on_devices"] = on_devices(figures, slowed, network, options.target_bits / 8)
        figures["on_device"] = run_on_device(figures, slowed)
    if options.budget_hours is not None:
        figures["budget"] = bought(figures, options.budget_hours)
    text = json.dumps(figures, indent=2) + "\n" if options.json else plan_report(figures)
    sys.stdout.write(text)
    return 0


def _add_options(parser: OwnOptions) -> None:
    add = parser.add_argument
    add(
        "--world",
        type=int,
        metavar="N",
        help="processes, one on each device; default: trainer.devices times trainer.num_nodes",
    )
    add("--json", action="store_true", help="print JSON with raw numbers, memory in bytes")
    add(
        "--device",
        choices=[*DEVICES],
        help="estimate time, producers and network on devices of this kind, and whether the run fits",
    )
    add(
        "--budget_hours",
        type=float,
        metavar="HOURS",
        help="GPU-hours: say how many steps and tokens they buy; needs --device",
    )
    add(
        "--efficiency",
        type=float,
        default=0.35,
        metavar="SHARE",
        help="of the device's peak that products reach; "
        "0.35 is the least of four shares measured on an H200",
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


def _check_options(options: Any) -> None:
    """Raise ValueError for a number out of range, or a budget without a device."""
    if options.world is not None and options.world < 1:
        raise ValueError(f"plan: --world must be at least 1, not {options.world}")
    if not (0 < options.efficiency <= 1 and 0 < options.network < math.inf):
        raise ValueError(
            "plan: --efficiency must be above 0 and at most 1, --network a positive number of GB a second"
        )
    if options.budget_hours is None:
        return
    if not 0 < options.budget_hours < math.inf:
        raise ValueError("plan: --budget_hours must be a positive number of GPU-hours")
    if options.device is None:
        raise ValueError(
            f"plan: --budget_hours needs --device, which says how fast a GPU is: one of {', '.join(DEVICES)}"
        )


def _configured_processes(trainer: Any) -> int:
    """Return the processes of the trainer's options; raise ValueError if they depend on the machine."""
    devices = trainer.devices
    if isinstance(devices, list):
        return len(devices) * trainer.num_nodes
    if str(devices).isdecimal() and int(devices) > 0:
        return int(devices) * trainer.num_nodes
    raise ValueError(
        f"plan: trainer.devices={devices} depends on the machine: give --world N, the number of processes"
    )


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
    figures = {
        "processes": world,
        "strategy": "one" if world == 1 and strategy == "ddp" else strategy,
        "drafter_trainable_parameters": sum(p.numel() for p in drafter.parameters()) - frozen,
        "drafter_frozen_parameters": frozen,
        "target_parameters": target,
        **_length(options, data, source, world),
        "products": {"target": source.dtype, "drafter": str(trained_in.products).removeprefix("torch.")},
        "flops_per_token": {"target": target_flops(model, data.seq_len)}
        | drafter_flops(config, module.objective, module.train_head, data.seq_len),
        "exchanged_bytes_per_step": exchanged(
            drafter, frozen, frozen_embed, trained_in, world, options.num_nodes, options.accumulate_grad_batches,
            sharded=strategy == "fsdp2",
        ),
        "feature_source": _feature_source(module.features),
        "feature_bytes_per_token": _feature_bytes(config, module.features, dtype),
        "memory_bytes_with_parts": without_target + parts * dtype.itemsize,
        "memory_bytes_with_target": without_target + target * dtype.itemsize,
        "memory_bytes_per_process": memory | {"total": sum(memory.values())},
    }  # fmt: skip
    return figures | {"disk_bytes": _disk(cli, figures, trained_in)}


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


def _length(options: Any, data: TokenData, source: TargetSource, world: int) -> dict[str, Any]:
    """Return the sizes of steps, epochs and the run; ``train_rows`` says why it, and an epoch, are not known."""
    rows_per_step = data.batch_size * options.accumulate_grad_batches * world
    rows, batches = _rows_and_batches(data, source, world)
    per_epoch = None
    if batches is not None:
        limit = options.limit_train_batches
        if limit is not None:
            batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        per_epoch = max(1, math.ceil(batches / options.accumulate_grad_batches))
    ends = []
    if options.max_steps > 0:
        ends.append(options.max_steps)
    if per_epoch is not None and (options.max_epochs or 0) > 0:
        ends.append(per_epoch * options.max_epochs)
    steps = min(ends, default=None)
    tokens_per_step = rows_per_step * data.seq_len
    return {
        "seq_len": data.seq_len,
        "batch_size": data.batch_size,
        "rows_per_step": rows_per_step,
        "tokens_per_step": tokens_per_step,
        "train_rows": rows,
        "steps_per_epoch": per_epoch,
        "steps": steps,
        "tokens": None if steps is None else steps * tokens_per_step,
    }


def _rows_and_batches(
    data: TokenData, source: TargetSource, world: int
) -> tuple[int | str, int | None]:
    """Return the packed training rows and a process's batches of an epoch; or why the rows are not known, and None."""
    try:
        data.prepare(source.load_tokenizer())
        rows = len(data.splits.train.ids_BT)
    except ValueError as error:
        return str(error), None
    return rows, math.ceil(math.ceil(rows / world) / data.batch_size)


def _feature_source(features: Features) -> str:
    """Return where features come from, as ``on_devices`` calls it."""
    if isinstance(features, ProducedFeatures):
        return "streamed"
    return "cached" if features.made_ahead else "on_the_fly"


def _feature_bytes(config: DrafterConfig, features: Features, dtype: torch.dtype) -> int:
    """Return the bytes of a token's stored or streamed states."""
    if isinstance(features, ProducedFeatures):
        dtype = STORED.get(features.dtype, dtype)
    states = 1  # the final one
    for boundary in config.aux_layers:
        states += boundary < config.num_target_layers or not config.fusion.final_norm
    return states * (config.target_hidden_size * dtype.itemsize + 4 * (dtype in SCALED))


def _disk(cli: Configured, figures: dict[str, Any], trained_in: Precision) -> dict[str, Any]:
    """Return the bytes of the run's checkpoints and drafters, and of its feature cache."""
    checkpoint = cli.config.fit.checkpoint
    acceptance = cli.config.fit.acceptance
    features = cli.model.features
    numbered: int | None = 0
    if checkpoint.every_n_train_steps and checkpoint.save_top_k:
        steps = figures["steps"]
        written = None if steps is None else steps // checkpoint.every_n_train_steps
        most = checkpoint.save_top_k
        if most < 0:
            numbered = written
        else:
            numbered = most if written is None else min(most, written)
    best = acceptance.every_n_validations > 0 and cli.config.fit.trainer.limit_val_batches != 0
    cache = features.directory if isinstance(features, Cached) else None
    return disk_bytes(figures, trained_in, numbered, 1 + best, cache)
