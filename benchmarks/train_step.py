"""One EAGLE-3 training step: specdec beside speculators and specforge, step by step in turns.

Every system is a process of its own, built from that trainer's own model, loss and optimizer classes on the same
weights, rows and target states. All wait on a pipe; one at a time takes one step, so that a slow minute slows all
alike. No ratio is printed unless the first step's losses agree. Linux only: it reads ``/proc``.

``python benchmarks/train_step.py --peers PYTHON --out benchmarks/results/train_step_<hardware>_<yyyymm>.md``
"""

import argparse
import contextlib
import ctypes
import importlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

# the folder of `benchmarks`, which is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness, limits
from benchmarks.training import recipe

IN_VOCAB, EVERY = "in-vocab rows", "every row"
# relative, of the first step's loss at any unroll step
TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-2}


class Entry(NamedTuple):
    """A line of the table."""

    key: str
    variant: str
    rows: str  # which of the supervised rows count: its definition of the loss
    module: str
    options: tuple[str, ...] = ()

    @property
    def peer(self) -> bool:
        """Whether it runs in the peers' environment."""
        return self.module != "of_specdec"


ENTRIES = (
    Entry("specdec", "compiled", IN_VOCAB, "of_specdec", ("compiled",)),
    Entry("specdec-every", "compiled", EVERY, "of_specdec", ("compiled", "every")),
    Entry("specdec-full", "compiled, all supervised", IN_VOCAB, "of_specdec", ("compiled",)),
    Entry("speculators", "sdpa", EVERY, "of_speculators", ("sdpa",)),
    Entry("specforge", "sdpa", IN_VOCAB, "of_specforge"),
    Entry("specforge-compact", "sdpa, compact teacher", IN_VOCAB, "of_specforge", ("compact",)),
)


# --- the worker ------------------------------------------------------------------------------------------------------


def resident(field: str) -> float:
    """``VmRSS`` or ``VmHWM`` of this process, in MB of 10^6 bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(field))


def start(job: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Any], dict[str, Any]]]:
    """Build a system; what takes its steps."""
    import torch

    from benchmarks.training import pieces

    torch.set_num_threads(job["threads"])
    torch.set_default_device(job["device"])
    gpu = job["device"] == "cuda"
    # in every worker: the compiler takes memory, and some steps use it
    torch.compile(lambda x: x + 1)(torch.zeros(1))
    system: recipe.System = importlib.import_module(f"benchmarks.training.{job['module']}").build(
        recipe.Job(**job)
    )
    ctypes.CDLL(None).malloc_trim(0)
    versions = {name: version(name) for name in (*system.packages, "torch")}
    before: list[float] = []

    def answer(question: str) -> dict[str, Any]:
        if question == "flops":
            return {"flops": pieces.flops(system.step)}
        if question == "pieces":
            dtype = getattr(torch, job["dtype"])
            return {name: list(piece) for name, piece in pieces.pieces(system.step, dtype).items()}
        return step()

    def step() -> dict[str, Any]:
        first = not before
        if first:
            before.append(torch.cuda.memory_allocated() / 1e6 if gpu else resident("VmRSS"))
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            # the peak starts anew from what is resident now
            Path("/proc/self/clear_refs").write_text("5")

        def act() -> None:
            system.step()
            if gpu:
                torch.cuda.synchronize()

        _, spent = harness.timed(act)
        peak = torch.cuda.max_memory_allocated() / 1e6 if gpu else resident("VmHWM")
        reply: dict[str, Any] = {"before_mb": before[0], "peak_mb": peak, **spent}
        return reply | ({"losses": system.losses()} if first else {})

    return {"trainable": system.trainable, "versions": versions}, answer


# --- the parent ------------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """A system and its steps."""

    entry: Entry
    about: dict[str, Any]
    warm_up: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    counted: dict[str, int]  # floating-point operations of a step's products
    pieces: dict[str, list[float]]  # of specdec's own step on a CPU: see benchmarks.training.pieces

    @property
    def losses(self) -> list[float]:
        """Of the first step, by unroll step."""
        return self.warm_up[0]["losses"]

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(step["seconds"] for step in self.steps)

    def share(self, peak: float) -> float:
        """Its rate of floating-point operations as a share of the machine's, in FLOP/s."""
        return self.counted["flops"] / self.median / peak

    @property
    def growth(self) -> float:
        """Peak resident set of all steps, warm-up included, less the resident set before the first; MB."""
        return (
            max(step["peak_mb"] for step in self.warm_up + self.steps)
            - self.warm_up[0]["before_mb"]
        )


def measure(
    a: argparse.Namespace, workload: str, dtype: str, mask: str, logs: Path
) -> list[Measured]:
    """All systems of one group: each takes a step in turn, and the turn's start moves on."""
    out, workers = [], []
    with contextlib.ExitStack() as alive:
        for entry in ENTRIES:
            if (entry.peer and a.peers is None) or (entry.key == "specdec-full" and mask == "all"):
                continue
            harness.tell(f"{workload} {dtype} {mask}: building {entry.key}")
            rows = "all" if entry.key == "specdec-full" else mask
            job = recipe.Job(
                entry.module,
                list(entry.options),
                workload,
                dtype,
                rows,
                a.threads,
                a.seed,
                a.device,
            )
            python = a.peers if entry.peer else sys.executable
            log = logs / f"{workload}-{dtype}-{mask}-{entry.key}.log"
            worker = alive.enter_context(
                harness.Worker(python, entry.key, Path(__file__).resolve(), job._asdict(), log)
            )
            warm_up = [worker.ask("step") for _ in range(a.warm_up)]
            out.append(Measured(entry, worker.about, warm_up, [], {}, {}))
            workers.append(worker)
        for n in range(a.steps):
            harness.tell(f"{workload} {dtype} {mask}: step {n + 1} of {a.steps}")
            for turn in range(len(workers)):
                i = (turn + n) % len(workers)
                out[i].steps.append(workers[i].ask("step"))
        for measured, worker in zip(out, workers, strict=True):
            measured.counted.update(worker.ask("flops"))
        if a.device == "cpu":
            harness.tell(f"{workload} {dtype} {mask}: profiling {out[0].entry.key}")
            out[0].pieces.update(workers[0].ask("pieces"))
    return out


def objections(measured: Sequence[Measured], dtype: str) -> list[str]:
    """Why no ratio may be given: systems of one definition that disagree; empty where they agree."""
    found = []
    for one in measured:
        ours = next(
            m for m in measured if m.entry.module == "of_specdec" and m.entry.rows == one.entry.rows
        )
        worst = max(abs(a / b - 1) for a, b in zip(one.losses, ours.losses, strict=True))
        if one.entry.key != "specdec-full" and not worst <= TOLERANCE[dtype]:
            found.append(f"{one.entry.key} and {ours.entry.key} differ by {worst:.1e}")
    if len({m.about["trainable"] for m in measured}) > 1:
        found.append("they train different numbers of parameters")
    return found


def report(
    measured: Sequence[Measured], dtype: str, peak: float | None
) -> tuple[list[str], dict[str, float]]:
    """A table and its headline; the ratios of specdec to the faster peer.

    Args:
        peak: FLOP/s of this machine in this dtype; None where it was not measured.
    """
    peers = [m for m in measured if m.entry.peer]
    peer = min(peers, key=lambda m: m.median, default=None)
    odd = objections(measured, dtype)
    lines, ratios = [], {}
    for m in measured:
        seconds = [step["seconds"] for step in m.steps]
        times, growth = ("-", "-")
        if peer is not None and m.entry.key != "specdec-full":
            times = "refused" if odd else f"{m.median / peer.median:.2f}"
            growth = "refused" if odd else f"{m.growth / peer.growth:.2f}"
        spread = f"{m.median:.3f} [{min(seconds):.3f}, {max(seconds):.3f}]"
        share = "-" if peak is None else f"{m.share(peak):.0%}"
        lines.append(
            [
                m.entry.key,
                m.entry.variant,
                m.entry.rows,
                spread,
                share,
                f"{m.growth:.0f}",
                times,
                growth,
            ]
        )
    columns = [
        "system",
        "variant",
        "trains",
        "median s [min, max]",
        "share of the peak",
        "growth MB",
        "time / faster peer",
        "growth / its",
    ]
    out = harness.table(columns, lines, 3)
    if odd:
        out += ["", "No ratio, for the systems do not agree: " + "; ".join(odd) + "."]
    elif peer is not None:
        ours = measured[0]
        ratios = {"time": ours.median / peer.median, "growth": ours.growth / peer.growth}
        shares = f"{ratios['time']:.2f} of the time and {ratios['growth']:.2f} of the memory growth"
        out += ["", f"specdec takes {shares} of the faster peer, {peer.entry.key}."]
    if full := next((m for m in measured if m.entry.key == "specdec-full"), None):
        out += [
            "",
            f"{measured[0].median / full.median:.2f} of the time of its step with all rows supervised.",
        ]
    if peak is not None:
        ratios["share_of_peak"] = measured[0].share(peak)
    out += harness.disturbances({m.entry.key: m.steps for m in measured})
    if measured[0].pieces:
        out += [
            "",
            "Where specdec's step goes, in a profile:",
            "",
            *pieces_table(measured[0].pieces),
        ]
    return out, ratios


def pieces_table(pieces_of_step: dict[str, list[float]]) -> list[str]:
    """Lines of Markdown: milliseconds of a step by piece, and of the matrix products in it."""
    total = sum(milliseconds for milliseconds, *_ in pieces_of_step.values())
    rows = []
    for name, (milliseconds, products, alone) in pieces_of_step.items():
        shown = [f"{products:.1f}", f"{alone:.1f}"] if products else ["-", "-"]
        rows.append([name, f"{milliseconds:.1f}", f"{milliseconds / total:.0%}", *shown])
    return harness.table(("piece", "ms", "share", "its products, ms", "the same alone, ms"), rows)


NOTES = """\
One step of EAGLE-3, seven unroll steps, batch of one row: forward, backward, clipping, optimizer. The target's states
are given; its head is part of the step. *in-vocab rows*: rows whose likeliest target token the draft vocabulary lacks
do not count (specforge, specdec's default); *every row*: they count (speculators). The peers' losses are, on a
CPU, those that run without a GPU. In bfloat16 specdec and speculators keep float32 weights under autocast, specforge
trains bfloat16 weights with float32 copies. *growth*: peak resident set (on a GPU, memory allocated) less that before
the first step, MB of 10^6 bytes.
"""


def main() -> int:
    """Measure every group; the exit status."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--peers",
        metavar="PYTHON",
        help="python of the environment with the peers; without, specdec alone",
    )
    p.add_argument("--workloads", nargs="+", choices=sorted(recipe.WORKLOADS), default=["S", "M"])
    p.add_argument("--dtypes", nargs="+", choices=list(TOLERANCE), default=list(TOLERANCE))
    p.add_argument(
        "--masks", nargs="+", choices=recipe.MASKS, default=["all", "half"], help="rows supervised"
    )
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--steps", type=int, default=7, help="measured steps of each")
    p.add_argument("--warm-up", type=int, default=2, help="steps before these")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument(
        "--out", type=Path, help="a .md file to write; raw step times go to the .json beside it"
    )
    p.add_argument("--force", action="store_true", help="overwrite what --out names")
    a = p.parse_args()
    harness.check_out(a.out, a.force)
    about = harness.machine(a.threads) | {"warm_up": a.warm_up, "steps": a.steps}
    lines, raw, versions = [], [], {}
    peaks: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="train_step-") as logs:
        for workload in a.workloads:
            for dtype in a.dtypes:
                for mask in a.masks:
                    if a.device == "cpu":
                        limit = limits.ask(a.threads, [dtype], [], Path(logs) / "limits.log")
                        peaks[dtype] = max(limit["flops"][dtype], peaks.get(dtype, 0.0))
                    measured = measure(a, workload, dtype, mask, Path(logs))
                    shown, ratios = report(measured, dtype, peaks.get(dtype))
                    lines += [f"\n## {workload}, {dtype}, {mask} rows supervised\n", *shown]
                    versions |= {k: v for m in measured for k, v in m.about["versions"].items()}
                    raw.append({"workload": workload, "dtype": dtype, "mask": mask, "ratios": ratios, "systems": [
                        m.entry._asdict() | {"median_seconds": m.median, "growth_mb": m.growth, "losses": m.losses,
                                             "flops": m.counted["flops"], "pieces_ms": m.pieces,
                                             "steps": m.steps} for m in measured]})  # fmt: skip
                    head = [
                        f"# One training step, {about['date'][:10]}\n",
                        *harness.conditions(about, versions),
                    ]
                    head[-1] += f"; {a.warm_up} warm-up and {a.steps} measured steps"
                    if peaks:
                        head += limits.lines({"flops": peaks, "read": {}})
                    harness.keep(
                        a.out,
                        [*head, "", NOTES, *lines],
                        {"run": about, "peaks": peaks, "groups": raw},
                    )
    return 0


if __name__ == "__main__":
    if "--worker" in sys.argv:
        harness.serve(start)
    else:
        sys.exit(main())
