"""What a GPU makes of specdec: one command of at most nine minutes, from this checkout and nothing else. Linux only.

The most valuable figures come first: flex attention beside the dense kernel; training steps of EAGLE-3.1 at the widths
of a 1B and an 8B target; decoding with random weights, eager and compiled into CUDA graphs. Then, beside one another
since their times don't matter: the proof of random targets in 16 bits, the tests that need CUDA, ``specdec
quickstart``, and a real target from end to end (``--target``, else the small one that comes with specdec). Last,
decoding at the second size, and with ``--peers`` and ``--vllm`` both beside others.

Every part is a process of its own. The report is written again after each line, so that whoever stops the command keeps
what was measured. A part that fails is named with its error, the rest goes on, and the exit status is 1.

A machine without a package index gets what it lacks from a folder of ``benchmarks/gpu_wheels.py`` (``--wheels``); it
needs torch, transformers and lightning. ``--device cpu --shapes tiny``: a dry run.

``python benchmarks/gpu.py --wheels FOLDER --out FILE.md``
"""

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# the folder of `benchmarks`, which is not installed
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402  it needs Python alone

BEGAN = time.monotonic()
DRY_RUN_SECONDS = 3600.0  # a CPU compiles slowly


class Run(NamedTuple):
    """A part's process, which adds lines to the table of its title."""

    title: str
    part: str  # of benchmarks.gpu_parts
    options: dict[str, Any]
    most: float  # seconds, of which the graphs of a GPU take a good part


# columns of a title's table, and how many of them are words
TABLES: dict[str, tuple[tuple[str, ...], int]] = {
    "Attention of the unroll": (("sizes of", "tokens", "kernel", "ms", "differs from dense", "peak GB"), 3),
    "Training step": (
        ("sizes of", "what", "s", "tokens/s", "TFLOP/s by plan", "of the data sheet's", "of a product's", "peak GB"), 2,
    ),
    "Decoding": (("sizes of", "shape", "how", "ms a pass", "tokens", "s of the first text"), 3),
    "Proofs of the target": (("sizes of", "dtype", "verdict", "s"), 3),
    "A real target from end to end": (("what", "s", "result", "texts equal"), 1),
    "Tests that need CUDA": (("ended with",), 1),
    "Training step beside peers": ((), 0),
    "Decoding beside vLLM": ((), 0),
}  # fmt: skip


def groups_of(options: argparse.Namespace) -> list[list[Run]]:
    """List what is run, in order; a group's parts run beside one another, since their times don't matter."""
    on = {"device": options.device}
    first = options.shapes[0]
    times = {"times": options.steps}
    tokens = {"tokens": options.tokens}
    attention = Run("Attention of the unroll", "attention", {"name": first} | on | times, 120)
    training = [
        Run("Training step", "training", {"name": name} | on | times, 120)
        for name in options.shapes
    ]
    decoding = [
        Run("Decoding", "decoding", {"name": name} | on | tokens, 240) for name in options.shapes
    ]
    real = "A real target from end to end"
    untimed = [
        Run("Proofs of the target", "proofs", {"name": first} | on, 120),
        Run("Tests that need CUDA", "cuda_tests", {}, 120),
        Run(real, "quick_start", on, 240),
        Run(real, "end_to_end", {"source": options.target} | on, 240),
    ]
    timed = [attention, *training, decoding[0]]
    beside = [
        Run(
            "Training step beside peers", "peers", {"name": name, "python": options.peers} | on, 600
        )
        for name in options.shapes
        if options.peers
    ]
    if options.vllm:
        more = {"name": first, "python": options.vllm}
        beside.append(Run("Decoding beside vLLM", "vllm", more | on | tokens, 600))
    return [*([run] for run in timed), untimed, *([run] for run in (*decoding[1:], *beside))]


def lines_of(run: Run, seconds: float, log: Path) -> Iterator[list[str]]:
    """Start a part, and yield its lines as they come.

    Raises:
        ValueError: it failed, or took longer than ``seconds``; the message ends with its last words.
    """
    command = [sys.executable, "-m", "benchmarks.gpu_parts", run.part, json.dumps(run.options)]
    end = time.monotonic() + seconds
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
    assert process.stdout is not None
    try:
        pending = b""
        while True:
            left = end - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                raise ValueError(f"ended after {seconds:.0f} s, the time that was left for it")
            read = os.read(process.stdout.fileno(), 1 << 16)
            if not read:
                break
            *whole, pending = (pending + read).split(b"\n")
            for line in whole:
                yield json.loads(line)
        if status := process.wait():
            words = [line.strip() for line in log.read_text().splitlines() if line.strip()]
            raise ValueError(" ".join((words or [f"ended with status {status}"])[-1].split())[:400])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it started too
        process.wait()
        process.stdout.close()


class Report:
    """The file that is written again after every line."""

    def __init__(self, out: Path | None, about: dict[str, Any], device: str) -> None:
        self.out = out
        self.lock = threading.Lock()
        self.head = ["# specdec on a GPU", "", f"Device: {device}.", ""]
        self.head += harness.conditions(about, about["versions"])
        self.raw: dict[str, Any] = {"about": about, "device": device, "parts": {}, "failed": []}

    def add(self, title: str, line: list[str]) -> None:
        """Add a line to a table; parts that run beside one another may."""
        with self.lock:
            self.raw["parts"].setdefault(title, []).append(line)
            self.write()

    def fail(self, what: str) -> None:
        """Add what failed, and why."""
        harness.tell(f"failed: {what}")
        with self.lock:
            self.raw["failed"].append(what)
            self.write()

    def lines(self) -> list[str]:
        """Return the report as it is by now."""
        lines = list(self.head)
        for title, rows in self.raw["parts"].items():
            columns, words = TABLES[title]
            table = harness.table(columns, rows, words) if columns else [row for (row,) in rows]
            lines += ["", f"## {title}", "", *table]
        lines += ["", *(f"**Failed**: {what}" for what in self.raw["failed"])]
        return [*lines, "", f"Took {time.monotonic() - BEGAN:.0f} s."]

    def write(self) -> None:
        """Write it, and the raw figures beside it."""
        if self.out is not None:
            from specdec.utils.files import write_json, write_text

            write_text(self.out, "\n".join(self.lines()) + "\n")
            write_json(self.out.with_suffix(".json"), self.raw)


def named_device(device: str) -> str:
    """Ask torch, in a process of its own, for the GPU's name; SystemExit if there is none."""
    if device == "cpu":
        return "the CPU, a dry run"
    code = "import torch; print(torch.cuda.get_device_name())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit("no CUDA device: give --device cpu --shapes tiny for a dry run")
    return done.stdout.strip()


def install(wheels: Path, site: str) -> None:
    """Install a folder of wheels into another folder, which this process and those that it starts look into first."""
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        raise SystemExit(f"--wheels {wheels}: no wheel lies there: see benchmarks/gpu_wheels.py")
    flags = ["-q", "--no-index", "--no-deps", "--no-compile", "--find-links", str(wheels)]
    command = [sys.executable, "-m", "pip", "install", *flags, "--target", site, *files]
    subprocess.run(command, check=True)
    sys.path.insert(1, site)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [site, *filter(None, [os.environ.get("PYTHONPATH")])]
    )


def parser() -> argparse.ArgumentParser:
    """Describe the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cuda, or cpu for a dry run")
    add("--shapes", nargs="+", choices=("tiny", "S", "M", "1B", "8B"), default=["1B", "8B"])
    add("--target", help="a directory or GGUF file of a real target; default: the embedded one")
    add("--steps", type=int, default=10, help="training steps that are timed")
    add("--tokens", type=int, default=128, help="that are decoded")
    add("--seconds", type=float, help="all may take; default: 530, of a dry run 3600")
    add("--wheels", type=Path, help="folder of the packages that this machine lacks")
    add("--peers", metavar="PYTHON", help="of speculators and specforge, to train beside them")
    add("--vllm", metavar="PYTHON", help="of vLLM, to decode beside it")
    add("--out", type=Path, help="a report, .md; raw figures go to the .json beside it")
    add("--force", action="store_true", help="write over one that is there")
    return parser


def measure(options: argparse.Namespace, work: str) -> Report:
    """Run every part, in order, within the time."""
    if options.wheels:
        install(options.wheels, f"{work}/site")
    dry = options.device == "cpu"
    limit = options.seconds or (DRY_RUN_SECONDS if dry else 530.0)
    about = harness.machine(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    report = Report(options.out, about, named_device(options.device))

    def measure_part(run: Run) -> None:
        what = f"{run.title}, {run.options.get('name', run.part)}"
        left = BEGAN + limit - time.monotonic()
        if left < 10:
            report.fail(f"{what}: not begun, the time was over")
            return
        harness.tell(what)
        try:
            seconds = left if dry else min(left, run.most)
            log = Path(work, f"{run.part}_{run.options.get('name', '')}.log")
            for line in lines_of(run, seconds, log):
                report.add(run.title, line)
        except ValueError as error:
            report.fail(f"{what}: {error}")

    for group in groups_of(options):
        # a dry run has few cores, on which parts would only wait for one another
        with ThreadPoolExecutor(1 if dry else len(group)) as pool:
            list(pool.map(measure_part, group))
    return report


def main(argv: Sequence[str]) -> int:
    """Run all, print, and keep; the exit status is 1 if something failed."""
    options = parser().parse_args(argv)
    harness.check_out(options.out, options.force)
    with tempfile.TemporaryDirectory() as work:
        report = measure(options, work)
    report.write()
    print("\n".join(report.lines()))
    return 1 if report.raw["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
