"""``specdec plan``: memory, batch and speed of ``specdec fit`` on many devices, from configs alone."""

import argparse
import csv
import dataclasses
import json
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from specdec.drafter import DrafterConfig
from specdec.fit import Configured, configured
from specdec.target.loading import DTYPES, skeleton
from specdec.training.cost import MB, PRECISIONS, MemoryNeed, precision, skeleton_of, step_flops
from specdec.training.distributed import strategy_kind
from specdec.training.module import DrafterModule
from specdec.training.run_directory import RunDirectory
from specdec.training.throughput import SKIPPED


@dataclass(frozen=True)
class TrainingPlan:
    """Arithmetic alone; bytes and operations of one process."""

    world: int
    strategy: str  # of the weights: one, ddp or fsdp2
    drafter_trainable_parameters: int
    drafter_frozen_parameters: int
    target_parameters: int
    memory_bytes_per_process: MemoryNeed
    rows_per_step: int  # of an optimizer step, on all processes
    tokens_per_step: int
    operations_per_token: float  # all tokens being trained: the most
    bytes_reduced_per_step_and_process: int  # gradients that it sends, in a ring
    bytes_gathered_per_step_and_process: int  # weights that it is sent


def drafter_config(module: DrafterModule, model: Any) -> DrafterConfig:
    """The design with a target's dimensions, from a model without weights; ValueError if they do not go together."""
    text, V = model.config.get_text_config(decoder=True), model.get_output_embeddings().weight.shape[0]
    sizes, identity = {"vocab_size": V, "num_target_layers": text.num_hidden_layers}, module.target_source.source
    return DrafterConfig.for_target(module.spec, text, **sizes, identity={"source": identity})


def plan(
    module: DrafterModule,
    rows: int,
    seq_len: int,
    world: int,
    strategy: str,
    trainer_precision: object,
    accumulate: int,
    model: PreTrainedModel | None = None,
) -> TrainingPlan:
    """Add it up, for ``rows`` in one process's batch; ``model`` is the target without weights, where it is at hand.

    ValueError: no such precision, or target and design do not go together.
    """
    trained_in = precision(trainer_precision)
    if trained_in is None:
        raise ValueError(f"trainer.precision={trainer_precision}: plan knows {', '.join(PRECISIONS)}")
    source = module.target_source
    model = model or skeleton(source.directory(), source.revision, source.trust_remote_code)
    config = drafter_config(module, model)
    drafter = skeleton_of(config)
    parameters = sum(p.numel() for p in drafter.parameters())
    trainable = parameters - (0 if module.train_embed else drafter.embed_tokens.weight.numel())
    trainable -= 0 if module.train_head else drafter.lm_head.weight.numel()
    target_parameters, each = sum(p.numel() for p in model.parameters()), trained_in.weights.itemsize
    target_bytes, sharded = target_parameters * DTYPES[source.dtype].itemsize, strategy == "fsdp2"
    slots, share = rows * seq_len, (world - 1) / world
    return TrainingPlan(
        world,
        strategy,
        trainable,
        parameters - trainable,
        target_parameters,
        module.memory_need(config, rows, seq_len, trained_in, target_bytes, world, sharded),
        rows * accumulate * world,
        slots * accumulate * world,
        step_flops(config, module.objective, model, rows, seq_len) / slots,
        # a ring sends everything but one share once for the sum and, where all want the result, once more
        int(share * trainable * each * (accumulate if sharded else 2)),
        int(share * parameters * each * accumulate) if sharded else 0,
    )


class Planned(Configured):
    """A run's parts, and what they need."""

    def plan(self, world: int) -> TrainingPlan:
        """What it needs on ``world`` processes."""
        given, data = self.config[self.subcommand].trainer, self.datamodule
        kind = strategy_kind(given.strategy)
        strategy = "one" if world == 1 and kind == "ddp" else kind
        size = (data.batch_size, data.seq_len, world)
        return plan(self.model, *size, strategy, given.precision, given.accumulate_grad_batches)

    def count(self) -> int | str:
        """Packed rows of the training data, or why they are not known."""
        try:
            self.datamodule.prepare(self.model.target_source.load_tokenizer())
        except ValueError as error:
            return str(error)
        return len(self.datamodule.splits.train.ids_BT)


def main(argv: list[str]) -> int:
    """Run the command; ValueError if an argument is wrong, or a measured run cannot be read."""
    parser = argparse.ArgumentParser(
        prog="specdec plan", description=__doc__, allow_abbrev=False,
        epilog="All other flags are specdec fit's. Example: specdec plan --world 8 --config conf/quickstart.yaml",
    )  # fmt: skip
    parser.add_argument("--world", type=int, required=True, metavar="N", help="processes, one on each device")
    parser.add_argument("--measured_run", metavar="RUN", help="take speed and peak memory from a run's directory")
    parser.add_argument("--json", action="store_true", help="print JSON")
    own, args = parser.parse_known_args(argv)
    if own.world < 1:
        raise ValueError(f"plan: --world must be at least 1, not {own.world}")
    cli = configured(Planned, "fit", args, RunDirectory())
    planned, rows = cli.plan(own.world), cli.count()
    told = dataclasses.asdict(planned)
    told["memory_bytes_per_process"]["total"] = planned.memory_bytes_per_process.total
    of_all = math.ceil(rows / own.world) * own.world if isinstance(rows, int) else None
    told |= {"train_rows": rows, "steps_per_epoch": of_all and math.ceil(of_all / planned.rows_per_step)}
    found: dict[str, Any] = {"arithmetic": told, "measured": None, "extrapolated": None}
    if own.measured_run:
        found |= _measured(Path(own.measured_run), planned)
    if own.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        _print(found)
    return 0


def _measured(directory: Path, planned: TrainingPlan) -> dict[str, Any]:
    """Speed and peak memory of a run, and what they say of the planned one."""
    logs = sorted(directory.glob("csv/version_*/metrics.csv"))
    if not logs or not (directory / "config.yaml").is_file():
        raise ValueError(f"{directory}: no run of specdec fit with csv logs and a config.yaml")
    cli = configured(Planned, "fit", ["--config", str(directory / "config.yaml")], RunDirectory())
    given = cli.config.fit.trainer
    if not str(given.devices).isdigit():
        raise ValueError(f"{directory}: its trainer.devices is {given.devices}: measure a run on a number of devices")
    processes = int(given.devices) * given.num_nodes
    with logs[-1].open() as stream:
        lines = [line for line in csv.DictReader(stream) if line.get("speed/tokens_per_second")]
    if not lines:
        raise ValueError(f"{directory}: it logged no speed: let it make more than {SKIPPED} steps and log after them")
    speed = statistics.median(float(line["speed/tokens_per_second"]) for line in lines) / processes
    there = cli.plan(processes)
    each = speed * there.operations_per_token / planned.operations_per_token
    measured = {
        "run": str(directory),
        "processes": processes,
        "tokens_per_second_per_process": speed,
        "peak_bytes": max(float(line["memory/peak_mb"]) for line in lines) * MB,
        "estimated_bytes_of_that_run": there.memory_bytes_per_process.total,
    }
    extrapolated = {  # communication left out
        "tokens_per_second_per_process": each,
        "tokens_per_second": each * planned.world,
        "seconds_per_step": planned.tokens_per_step / (each * planned.world),
    }
    return {"measured": measured, "extrapolated": extrapolated}


def _print(found: dict[str, Any]) -> None:
    """As a table, bytes in MB; what is extrapolated leaves communication out."""
    table = Table("", "", "", box=None, show_header=False)
    for section, figures in found.items():
        if figures is None:
            continue
        table.add_row(section, "communication left out" if section == "extrapolated" else "", "")
        memory = figures.pop("memory_bytes_per_process", {})
        for name, value in (figures | {f"memory bytes: {part}": size for part, size in memory.items()}).items():
            told = "unknown" if value is None else str(value)
            if isinstance(value, int | float):
                told = f"{value / MB:,.0f}" if "bytes" in name else f"{value:,.4g}"
                told = f"{value:,}" if isinstance(value, int) and "bytes" not in name else told
            table.add_row("", name.replace("bytes", "MB").replace("_", " "), told)
    if found["measured"] is None:
        table.add_row("speed", "not known: give --measured_run RUN", "")
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150).print(table)
