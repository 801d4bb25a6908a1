"""``benchmarks/faults.py``: runs that are killed at random steps and within saves, and one-bit flips.

Every kill is a SIGKILL of the whole process group of a real ``specdec fit`` on a tiny target, which the same command
then goes on with (``--ckpt_path auto``). Every batch's loss and the final weights are compared, bit by bit, with those
of a run that nobody disturbs. The status is 1 where anything differs, is lost or goes unnoticed.
"""

import argparse
import logging
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.faulting.campaign import Campaign, Killed
from benchmarks.faulting.flips import Flipped, artefacts, flip
from benchmarks.faulting.report import faults, markdown, to_json
from benchmarks.faulting.scene import DISTRIBUTED, VARIANTS, Variant, build
from benchmarks.machine import load, machine
from specdec.files import write_json, write_text

ACTS = 200  # of the file system within the saves of a run, roughly


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results, or a path that ends in .md")
    parser.add_argument("--kills", type=int, default=14, help="of every kind of run, at random steps")
    parser.add_argument("--save_kills", type=int, default=36, help="within saves, half of them on either file system")
    parser.add_argument("--flips", type=int, default=120, help="of every kind of file")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of a run")
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--parallel", type=int, default=2, help="runs at once")
    parser.add_argument("--disk", type=Path, default=None, help="folder on a disk; the temporary one by default")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="folder on another file system")
    parser.add_argument("--hardware", default="cpu", help="the machine's name in the file's name")
    args = parser.parse_args(argv)
    logging.getLogger("specdec").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    disk = args.disk or Path(tempfile.gettempdir())
    if os.stat(disk).st_dev == os.stat(args.memory).st_dev:
        parser.error(f"{disk} and {args.memory} are one file system: give two, by --disk and --memory")
    versions = {name: version(name) for name in ("torch", "lightning", "safetensors")}
    about: dict[str, Any] = {**machine(1), "versions": versions, "steps": args.steps, "every": args.every}
    about["asked"] = {"kills": args.kills, "save_kills": args.save_kills, "flips": args.flips}
    out = args.out
    if out.suffix != ".md":
        out = out / f"faults_{args.hardware}_{about['date'][:7].replace('-', '')}.md"
    begin = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="faults-", dir=disk) as one,
        tempfile.TemporaryDirectory(prefix="faults-", dir=args.memory) as two,
    ):
        killed, flipped = _all(args, Path(one), Path(two))
    about |= {"seconds": round(time.monotonic() - begin), "load_at_end": load()}
    write_json(out.with_suffix(".json"), to_json(about, killed, flipped))
    write_text(out, markdown(about, killed, flipped))
    print(out.read_text())
    found = faults(killed, flipped)
    for fault in found:
        sys.stderr.write(f"{fault}\n")
    return 1 if found else 0


def _all(args: argparse.Namespace, disk: Path, memory: Path) -> tuple[list[Killed], list[Flipped]]:
    scene, console = build(disk), Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    variants = [*VARIANTS, *DISTRIBUTED]
    saved = [(VARIANTS[-1], disk, memory), (VARIANTS[0], memory, disk), *((each, disk, memory) for each in DISTRIBUTED)]
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("kills", total=args.kills * len(variants) + args.save_kills)

        def add(found: Killed) -> None:
            console.print(
                f"{found.variant}, {found.where}: {found.kills} kills, "
                f"{found.differing} of {found.losses} losses differ",
                highlight=False,
            )

        def steps(number: int, variant: Variant) -> Killed:
            folder, temporary = disk / f"steps-{number}", disk / f"tmp-{number}"
            campaign = Campaign(scene, variant, folder, temporary, args.steps, args.every, told)
            return campaign.at_steps(args.kills, seed=number)

        def saves(number: int, variant: Variant, here: Path, there: Path) -> Killed:
            folder, temporary = here / f"saves-{number}", there / f"tmp-saves-{number}"
            campaign = Campaign(scene, variant, folder, temporary, args.steps, args.every, told)
            return campaign.in_saves(len(range(number, args.save_kills, len(saved))), ACTS, seed=number)

        def told(more: int) -> None:
            progress.advance(task, more)

        with ThreadPoolExecutor(args.parallel) as pool:  # the runs are processes; a thread waits for one
            tasks = [pool.submit(steps, *each) for each in enumerate(variants) if args.kills]
            tasks += [
                pool.submit(saves, number, *each) for number, each in enumerate(saved) if number < args.save_kills
            ]
            for done in as_completed(tasks):
                add(done.result())
            killed = [done.result() for done in tasks]
    flipped = [flip(each, args.flips) for each in artefacts(sorted(disk.glob("*/whole"))[0], scene, disk)]
    return killed, flipped
