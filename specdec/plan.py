"""``specdec plan``: memory, batch and speed of ``specdec fit`` on many devices, worked out in one process."""

import argparse
import csv
import dataclasses
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from specdec.fit import Configured, configured, run
from specdec.training.estimate import MB
from specdec.training.plan import Plan, plan
from specdec.training.run_directory import RunDirectory
from specdec.training.strategies import kind_of

SKIPPED = 2  # steps at the start of a run that are not measured
SHORT = {
    "trainer.devices": "1", "trainer.num_nodes": "1", "trainer.strategy": "auto", "trainer.logger": "null",
    "trainer.limit_val_batches": "0", "trainer.log_every_n_steps": "1", "trainer.enable_progress_bar": "false",
    "trainer.enable_model_summary": "false", "acceptance.every_n_validations": "0",
}  # fmt: skip


class Planned(Configured):
    """A run's parts, and what they need."""

    def plan(self, world: int) -> Plan:
        """What it needs on ``world`` processes."""
        given = self.config[self.subcommand].trainer
        data, strategy = self.datamodule, kind_of(given.strategy)
        strategy = "one" if world == 1 and strategy == "ddp" else strategy
        size = (data.batch_size, data.seq_len, world)
        return plan(self.model, *size, strategy, given.precision, given.accumulate_grad_batches)

    def count(self) -> int | str:
        """Packed rows of the training data, or why they are not known."""
        try:
            self.datamodule.prepare(self.model.target_source.load_tokenizer())
        except ValueError as error:
            return str(error)
        return len(self.datamodule.splits.train.ids_BT)


class Measured(NamedTuple):
    """Of a run's log."""

    run: str
    processes: int
    tokens_per_second: float  # of one process, the median of what was logged
    peak: float  # bytes; on a CPU with Python, libraries and data
    planned: Plan  # the same run's


def main(argv: list[str]) -> int:
    """Run the command.

    Raises:
        ValueError: an argument is wrong, or a measured run cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="specdec plan", description=__doc__, allow_abbrev=False, epilog="all other flags are specdec fit's"
    )
    parser.add_argument("--world", type=int, required=True, metavar="N", help="processes, one on each device")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--measure", type=int, metavar="STEPS", help="train so many steps here, on one device, for speed")
    how.add_argument("--measured_run", metavar="RUN", help="take speed and peak memory from a run's directory")
    parser.add_argument("--skip_data", action="store_true", help="do not read the data to count its rows")
    parser.add_argument("--json", action="store_true", help="print JSON")
    own, args = parser.parse_known_args(argv)
    if own.world < 1 or (own.measure is not None and own.measure < 1):
        raise ValueError("plan: --world and --measure must be at least 1")
    cli = configured(Planned, "fit", args, RunDirectory())
    planned = cli.plan(own.world)
    rows = "not asked for" if own.skip_data else cli.count()
    measured = None
    if own.measured_run:
        measured = read(Path(own.measured_run))
    elif own.measure:
        with tempfile.TemporaryDirectory() as folder:
            out, flags = Path(folder) / "run", SHORT | {"trainer.max_steps": str(own.measure + SKIPPED)}
            run("fit", [*args, *(f"--{name}={value}" for name, value in flags.items()), f"--out={out}"])
            measured = read(out)._replace(run=f"{own.measure} steps here")
    found = figures(planned, rows, measured)
    if own.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        _print(found)
    return 0


def read(directory: Path) -> Measured:
    """Speed and peak memory of a run.

    Raises:
        ValueError: it has no log or config, logged no speed, or does not say on how many devices it ran.
    """
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
    speed = statistics.median(float(line["speed/tokens_per_second"]) for line in lines)
    peak = max(float(line["memory/peak_mb"]) for line in lines) * MB
    return Measured(str(directory), processes, speed / processes, peak, cli.plan(processes))


def figures(planned: Plan, rows: int | str, measured: Measured | None) -> dict[str, Any]:
    """All that is told, by where it comes from."""
    found: dict[str, Any] = {
        "arithmetic": {
            "world": planned.world,
            "strategy": planned.strategy,
            "drafter_trainable_parameters": planned.trainable,
            "drafter_frozen_parameters": planned.frozen,
            "target_parameters": planned.target_parameters,
            "memory_bytes_per_process": dataclasses.asdict(planned.memory) | {"total": planned.memory.total},
            "rows_per_step": planned.global_rows,
            "tokens_per_step": planned.tokens,
            "train_rows": rows,
            "steps_per_epoch": planned.steps_per_epoch(rows) if isinstance(rows, int) else None,
            "operations_per_token": planned.work_per_token,
            "bytes_reduced_per_step_and_process": planned.reduced,
            "bytes_gathered_per_step_and_process": planned.gathered,
        },
        "measured": None,
        "extrapolated": None,
    }
    if measured is not None:
        each = measured.tokens_per_second * measured.planned.work_per_token / planned.work_per_token
        found["measured"] = {
            "run": measured.run,
            "processes": measured.processes,
            "tokens_per_second_per_process": measured.tokens_per_second,
            "peak_bytes": measured.peak,
            "estimated_bytes_of_that_run": measured.planned.memory.total,
        }
        found["extrapolated"] = {
            "tokens_per_second_per_process": each,
            "tokens_per_second": each * planned.world,
            "seconds_per_step": planned.tokens / (each * planned.world),
        }
    return found


def _print(found: dict[str, Any]) -> None:
    table = Table("", "", "", box=None, show_header=False)
    told = found["arithmetic"]
    memory = told["memory_bytes_per_process"]
    table.add_row("arithmetic", f"{told['world']} processes, {told['strategy']}", "")
    for name in ("drafter_trainable_parameters", "drafter_frozen_parameters", "target_parameters"):
        table.add_row("", name.replace("_", " "), f"{told[name]:,}")
    for name, size in memory.items():
        table.add_row("", f"memory per process: {name}", f"{size / MB:,.0f} MB")
    for name in ("rows_per_step", "tokens_per_step", "train_rows", "steps_per_epoch"):
        value = told[name]
        table.add_row("", name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value or "unknown"))
    for name in ("bytes_reduced_per_step_and_process", "bytes_gathered_per_step_and_process"):
        table.add_row("", name.replace("_", " ").replace("bytes", "MB"), f"{told[name] / MB:,.0f}")
    if found["measured"] is None:
        table.add_row("speed", "not known: give --measure 3, or --measured_run RUN", "")
    else:
        seen, far = found["measured"], found["extrapolated"]
        table.add_row("measured", f"{seen['run']}, {seen['processes']} processes", "")
        table.add_row("", "tokens/s per process", f"{seen['tokens_per_second_per_process']:,.0f}")
        table.add_row("", "peak memory", f"{seen['peak_bytes'] / MB:,.0f} MB")
        table.add_row("", "its estimate", f"{seen['estimated_bytes_of_that_run'] / MB:,.0f} MB")
        table.add_row("extrapolated", "by operations per token, communication left out", "")
        table.add_row("", "tokens/s per process", f"{far['tokens_per_second_per_process']:,.0f}")
        table.add_row("", "tokens/s of all", f"{far['tokens_per_second']:,.0f}")
        table.add_row("", "seconds per step", f"{far['seconds_per_step']:,.3f}")
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150).print(table)
