"""The campaign: kills, flipped bits, links, bad inputs, full disks and hostile directories, two things at a time.

``python -m benchmarks.faults --out benchmarks/results/faults_<hardware>_<yyyymm>.md``

What is finished is kept beside ``--out`` until all is, so that the same command resumes.
"""

import argparse
import dataclasses
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.faults import command

PARTS = {
    "kills": "SIGKILL at random moments, then the same command again",
    "flips": "One flipped bit, then the next use",
    "links": "A link in what is written again",
    "inputs": "Bad inputs, generated",
    "rims": "Disk full, two at once, deleted while running",
    "hostile": "Hostile directories",
}
LANES = 2  # things at a time
QUICK = 0.03  # of a full campaign
TOLD = 12  # findings of a part in the report; all are in the .json
# kills of a quick campaign
CHEAP = ("fit, within a save", "regenerate", "regenerate, a server", "export")
NAMES = ("kind", "artefact", "family", "command", "what")  # of what was counted
HEAVY = ("sweep", "DDP", "FSDP2")  # use both cores by themselves: one at a time

Task = Callable[[Path, float], Any]


def tasks(place: Path, quick: bool, seed: int) -> dict[str, Task]:
    """All of them by ``PART: NAME``; each gets a folder and a share, and returns what it counted."""
    from benchmarks.faults import flips, hostile, inputs, kills, links, rims
    from benchmarks.faults.world import Server, World

    a, found = World(place), dict[str, Task]()
    with Server() as server:
        names = [name for name in kills.kinds(a, server) if not quick or name in CHEAP]
    names.sort(key=lambda name: not any(word in name for word in HEAVY))
    for name in names:
        found[f"kills: {name}"] = lambda where, share, name=name: [
            kills.campaign(a, name, where, share, seed)
        ]
    for name in flips.artefacts(a):
        if not (quick and name == "study"):
            found[f"flips: {name}"] = lambda where, share, name=name: [
                flips.campaign(a, name, where, share, seed)
            ]
    for name in links.folders(a):
        if not (quick and name == "study"):
            found[f"links: {name}"] = lambda where, share, name=name: [
                links.campaign(a, name, where, share, seed)
            ]
    for name in inputs.FAMILIES:
        found[f"inputs: {name}"] = lambda where, share, name=name: [
            inputs.campaign(a, name, where, share, seed)
        ]
    for name in ("disk full", "two at once", "deleted"):
        found[f"rims: {name}"] = lambda where, share, name=name: rims.campaign(
            a, name, where, share, seed
        )
    found["hostile: all"] = lambda where, share: hostile.campaign(a, where, share, seed)
    return found


def in_a_child(task: Task, where: Path, share: float) -> int:
    """Begin a task in a forked process, which writes what it counted to ``where``.json; its number."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    status = 1
    try:
        command.die_with_parent()
        counts = [dataclasses.asdict(one) for one in task(where, share)]
        where.with_suffix(".json").write_text(json.dumps(counts))
        status = 0
    except BaseException:  # noqa: BLE001  told by the parent's report
        traceback.print_exc()
    finally:
        os._exit(status)


def run(
    left: dict[str, Task], place: Path, share: float, keep: Callable[[str, Any], None]
) -> list[str]:
    """Run tasks, so many at a time, and hand on what each counted; the names of those that broke."""
    running: dict[int, tuple[str, Path, float]] = {}
    broken = []
    while left or running:
        heavy = any(is_heavy(name) for name, _, _ in running.values())
        if len(running) < LANES and (
            name := next((one for one in left if not (heavy and is_heavy(one))), None)
        ):
            where = place / name.replace(": ", "-").replace(",", "").replace(" ", "_")
            running[in_a_child(left.pop(name), where, share)] = (name, where, time.monotonic())
            continue
        pid, status = os.wait()
        if pid not in running:
            continue
        name, where, begin = running.pop(pid)
        if status == 0:
            keep(name, json.loads(where.with_suffix(".json").read_text()))
        else:
            broken.append(name)
        harness.tell(
            f"{name}: {'done' if status == 0 else 'BROKEN'} in {time.monotonic() - begin:.0f} s"
        )
        shutil.rmtree(where, ignore_errors=True)
    return broken


def is_heavy(name: str) -> bool:
    """Whether a task uses both cores by itself."""
    return name.startswith("kills") and any(word in name for word in HEAVY)


def report(
    about: dict[str, Any], found: dict[str, list[dict[str, Any]]], minutes: float
) -> list[str]:
    """Markdown."""
    from benchmarks.faults import flips, hostile, inputs, kills, links, rims

    lines = [f"# Faults, {about['date'][:10]}\n", *harness.conditions(about, about["versions"])]
    lines += [f"- Duration: {minutes:.0f} minutes", ""]
    modules = (kills, flips, links, inputs, rims, hostile)
    tables = {part: module.table for part, module in zip(PARTS, modules, strict=True)}
    for part, title in PARTS.items():
        if counts := [
            one for name, each in found.items() if name.startswith(f"{part}:") for one in each
        ]:
            lines += [f"## {title}", "", *tables[part](counts), ""]
            all_of_them = [(one, text) for one in counts for text in one["findings"]]
            lines += [f"{len(all_of_them)} findings{'.' if not all_of_them else ':'}", ""]
            for one, text in all_of_them[:: max(1, len(all_of_them) // TOLD)]:
                named = ", ".join(str(one[key]) for key in NAMES if key in one)
                lines.append(f"- {named}: `{' '.join(text.replace('`', ' ').split())}`")
            lines += [""] if all_of_them else []
    return lines


def main() -> int:
    """All of it; the exit status is 1 if there is a finding."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    p.add_argument(
        "--quick",
        action="store_true",
        help="a little of everything that is cheap, in a minute or two",
    )
    p.add_argument(
        "--seed", type=int, default=0, help="of what is drawn: kills, flips, links, bad inputs"
    )
    p.add_argument(
        "--times",
        type=float,
        default=1.0,
        help="how many times as large as a full campaign: 2 for twice as many",
    )
    p.add_argument("--out", type=Path, help="a .md file; raw figures go to the .json beside it")
    p.add_argument("--force", action="store_true", help="overwrite what --out names")
    a = p.parse_args()
    harness.check_out(a.out, a.force)
    begin = time.monotonic()
    partial = None if a.out is None else a.out.with_suffix(".partial.json")
    known: dict[str, Any] = {}
    if partial is not None and partial.exists():
        before = json.loads(partial.read_text())
        same = all(before.get(name) == getattr(a, name) for name in ("quick", "seed", "times"))
        known = before["parts"] if same else {}
        harness.tell(f"{partial}: {len(known)} parts are done already")
    scratch = Path(tempfile.mkdtemp(prefix="faults-"))
    # a campaign that is ended ends all that it began
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        harness.tell("loading torch, lightning and specdec")
        command.warm(scratch / "cache")
        from benchmarks.faults.world import World
        from specdec.utils.files import write_json

        about = harness.machine(1)
        about["command"] = shlex.join(["python", "-m", "benchmarks.faults", *sys.argv[1:]])
        found = tasks(scratch / "world", a.quick, a.seed)
        wanted = {name: task for name, task in found.items() if name.partition(":")[0] in a.only}
        left = {name: task for name, task in wanted.items() if name not in known}
        harness.tell(f"making a target, and what comes of it; then {len(left)} parts")
        World(scratch / "world").make(
            study=not a.quick and not set(a.only) <= {"kills", "inputs", "rims"}
        )

        def keep(name: str, counts: Any) -> None:
            known[name] = counts
            if partial is not None:
                of_all = {"quick": a.quick, "seed": a.seed, "times": a.times}
                write_json(partial, {**of_all, "parts": known})

        broken = run(left, scratch, a.times * (QUICK if a.quick else 1.0), keep)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    results = {name: known[name] for name in wanted if name in known}
    harness.keep(
        a.out,
        report(about, results, (time.monotonic() - begin) / 60),
        {"run": about, "parts": results},
    )
    for name in broken:
        harness.tell(f"{name}: broken, see above; the same command tries it again")
    if partial is not None and not broken:
        partial.unlink(missing_ok=True)
    return int(
        bool(broken) or any(one["findings"] for counts in results.values() for one in counts)
    )


if __name__ == "__main__":
    sys.exit(main())
