"""``benchmarks/sweep.py``: a sweep of 12 arms and seeds that is killed, and one under Ray, beside the undisturbed one.

Two workers. The undisturbed sweep gives the expected results and the runner's overhead. The second is killed whole
three times at random moments (SIGKILL of the runner and of everything below it) and given again; then a keeper, an
attempt and a command are killed while it runs. The third runs under Ray on this machine, with one of Ray's workers
killed. The status is 1 where a job is not done exactly once, two attempts at one run at a time, a process is left
alive, a loss, a weight or an answer differs, or the overhead is above 3 %.
"""

import argparse
import logging
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import load, machine
from benchmarks.sweeping.campaign import Campaign, Swept
from benchmarks.sweeping.report import faults, markdown, to_json
from benchmarks.sweeping.results import compare
from benchmarks.sweeping.scene import ARMS, build, jobs
from specdec.files import write_json, write_text

SWEEPS = ("undisturbed", "killed", "ray")


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results, or a path that ends in .md")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of a fit")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--arms", type=int, default=len(ARMS), help="of three seeds each")
    parser.add_argument("--workers", type=int, default=2, help="jobs at once")
    parser.add_argument("--times", type=int, default=3, help="SIGKILLs of everything")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--sweeps", nargs="+", choices=SWEEPS, default=SWEEPS, help="undisturbed is always run")
    parser.add_argument("--folder", type=Path, default=None, help="where the studies are kept; else they are removed")
    parser.add_argument("--hardware", default="cpu", help="the machine's name in the file's name")
    args = parser.parse_args(argv)
    logging.getLogger("specdec").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    versions = {name: version(name) for name in ("torch", "lightning", "ray")}
    about: dict[str, Any] = {**machine(1), "versions": versions, "steps": args.steps, "workers": args.workers}
    out = args.out
    if out.suffix != ".md":
        out = out / f"sweep_{args.hardware}_{about['date'][:7].replace('-', '')}.md"
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sweep-") as scratch:
        folder = (args.folder or Path(scratch)).resolve()
        scene = build(folder)
        campaign = Campaign(
            folder, lambda study: jobs(scene, study, args.steps, args.every, args.arms), args.workers, told=_tell
        )
        whole = folder / "undisturbed"
        swept: list[Swept] = []
        sweeps = {
            "undisturbed": campaign.undisturbed,
            "killed": lambda: campaign.killed(
                [*["everything"] * args.times, "keeper", "attempt", "command"], args.seed
            ),
            "ray": lambda: campaign.ray(args.seed),
        }
        for name in SWEEPS:
            if name == "undisturbed" or name in args.sweeps:
                swept.append(sweeps[name]())
                compared = [compare(one.name, campaign.make(whole), whole, folder / one.name) for one in swept[1:]]
                about |= {"seconds": round(time.monotonic() - begin), "load_at_end": load()}
                write_json(out.with_suffix(".json"), to_json(about, swept, compared))
                write_text(out, markdown(about, swept, compared))
    print(out.read_text())
    found = faults(swept, compared)
    for fault in found:
        _tell(fault)
    return 1 if found else 0


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")
