"""Load and length: many conversations tokenized, many steps trained, many prompts evaluated. Linux only.

Each part runs a command of specdec as a user would, and reads its memory from ``/proc`` five times a second. The
conversations and the prompts are also killed halfway (SIGKILL) and given to the same command again.

``python benchmarks/load.py --out benchmarks/results/load_<hardware>_<yyyymmdd>.md``

What a part has measured is stored beside ``--out`` until all parts are done, so that the same command continues.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

# the folder of `benchmarks`, which is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from benchmarks.faults import world
from benchmarks.faults.command import ENVIRONMENT
from benchmarks.tokenizing import write_conversations

PARTS = ("conversations", "steps", "prompts")
WORDS = 45  # of a conversation
MARKS = (0.1, 0.25, 0.5, 0.75, 1.0)  # of a run's steps, at which it is looked at
MB = 1e6


# --- a command, watched ----------------------------------------------------------------------------------------------


class WatchedCommand:
    """A command of specdec in its own process; ``samples`` are (seconds, MB of anonymous memory of its session)."""

    def __init__(self, argv: list[str], cache: Path, log: Path) -> None:
        self.samples: list[tuple[float, float]] = []
        self.log = log
        self._begin = time.monotonic()
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "specdec", *argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=os.environ | ENVIRONMENT | {"SPECDEC_CACHE": str(cache)},
                start_new_session=True,
            )
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self._begin

    @property
    def peak_mb(self) -> float:
        """The most anonymous memory that was seen."""
        return max(size for _, size in self.samples)

    def until(self, ready: Callable[[], bool]) -> None:
        """Wait; ValueError if the command ends before."""
        while not ready():
            if self._process.poll() is not None:
                raise ValueError(f"it ended too early: {self.log.read_text()[-2000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL to its whole session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def finish(self) -> Self:
        """Wait for its end; ValueError if it fails."""
        if self._process.wait():
            raise ValueError(f"status {self._process.returncode}: {self.log.read_text()[-2000:]}")
        return self

    def _sample(self) -> None:
        while self._process.poll() is None:
            self.samples.append((self.seconds, sum(_anonymous(self._process.pid)) / MB))
            time.sleep(0.2)


def _anonymous(session: int) -> Iterator[float]:
    """Bytes of anonymous memory of each process of a session."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, StopIteration):
            # behind the name, which may hold spaces: state, parent, group, session
            if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                lines = (folder / "status").read_text().splitlines()
                line = next(line for line in lines if line.startswith("RssAnon"))
                yield 1024.0 * int(line.split()[1])


# --- the parts -------------------------------------------------------------------------------------------------------


CHAT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def chat_target(folder: Path) -> Path:
    """The target that comes with specdec, with a chat template."""
    from specdec.target import TargetSource

    shutil.copytree(TargetSource().directory(), folder)
    (folder / "SHA256SUMS").unlink()
    tokenizer = TargetSource().load_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


def conversations(place: Path, size: float) -> list[dict[str, Any]]:
    """100,000 conversations, tokenized by ``fit``, and again with a kill halfway; then a million with a kill."""
    lines: list[dict[str, Any]] = []
    target = chat_target(place / "target")
    for count, killed_at in ((100_000, None), (100_000, 0.5), (1_000_000, 0.5)):
        count = round(count * size)
        harness.tell(f"{count:,} conversations{', killed halfway' if killed_at else ''}")
        file = place / f"{count}.jsonl"
        if not file.exists():
            write_conversations(file, count, 1, WORDS)
        argv = [
            "fit", "--model.target.source", str(target), "--data", "ChatData",
            "--data.train", str(file), "--data.val_fraction", "0.001",
            "--trainer.max_steps", "1", "--trainer.accelerator", "cpu", "--trainer.limit_val_batches", "1",
            "--acceptance.every_n_validations", "0", "--out",
        ]  # fmt: skip
        line = _tokenized(place / f"run-{len(lines)}", argv, count, killed_at)
        if lines and lines[-1]["conversations"] == count:
            line["same"] = line["sums"] == lines[-1]["sums"]
        lines.append(line)
    return [{key: value for key, value in line.items() if key != "sums"} for line in lines]


def _tokenized(place: Path, argv: list[str], count: int, killed_at: float | None) -> dict[str, Any]:
    """One run, killed when that share of the conversations is written."""
    from specdec.data.chat import CHUNK
    from specdec.data.token_cache import PART

    cache = place / "cache"
    place.mkdir()
    line: dict[str, Any] = {"conversations": count, "killed": killed_at is not None, "again": count}
    peaks = []
    if killed_at is not None:
        half = max(1, int(killed_at * count / (PART * CHUNK)))
        with WatchedCommand([*argv, str(place / "run")], cache, place / "killed.log") as command:
            command.until(lambda: len(list(cache.glob("tokens/*.begun/0*/SHA256SUMS"))) >= half)
            line["seconds_before"] = command.seconds
            command.kill()
            peaks.append(command.peak_mb)
    again = ["--ckpt_path", "auto"] if killed_at is not None else []
    with WatchedCommand([*argv, str(place / "run"), *again], cache, place / "log") as command:
        command.until(lambda: any(cache.glob("rows/*/SHA256SUMS")))
        line["seconds"] = command.seconds
        peaks.append(command.finish().peak_mb)
    if continued := re.search(r"continues after ([\d,]+) conv", (place / "log").read_text()):
        line["again"] = count - int(continued[1].replace(",", ""))
    (folder,) = (path for path in (cache / "tokens").iterdir() if path.is_dir())
    sums = (folder / "SHA256SUMS").read_text()
    size = sum(file.stat().st_size for file in folder.iterdir())
    return line | {"peak_mb": max(peaks), "tokens_mb": size / MB, "sums": sums}


def steps(place: Path, size: float) -> list[dict[str, Any]]:
    """2,000 steps with validation, decoded acceptance, checkpoints and loggers: memory and files on the way."""
    count = round(2000 * size)
    harness.tell(f"{count:,} steps")
    a = world.World(place)
    world.make_target(a.target)
    run = place / "run"
    argv = [
        "fit", *a.model_and_data(), "--trainer.accelerator", "cpu", "--trainer.max_steps", str(count),
        "--trainer.val_check_interval", str(count // 20), "--trainer.check_val_every_n_epoch", "null",
        "--trainer.limit_val_batches", "2",
        "--checkpoint.every_n_train_steps", str(count // 20), "--acceptance.max_new_tokens", "8",
        "--trainer.log_every_n_steps", "1", "--out", str(run),
    ]  # fmt: skip
    lines: list[dict[str, Any]] = []
    with WatchedCommand(argv, place / "cache", place / "log") as command:
        for mark in MARKS[:-1]:
            at = round(mark * count)
            command.until(lambda at=at: len(world.losses(run)) >= at)
            lines.append(_so_far(run, command, at))
        command.finish()
    return [*lines, _so_far(run, command, count)]


def _so_far(run: Path, command: WatchedCommand, step: int) -> dict[str, Any]:
    """What a run takes now; the memory is the most of the last two seconds."""
    files = [path for path in run.rglob("*") if path.is_file()]
    last = command.samples[-1][0]
    return {
        "step": step,
        "anonymous_mb": max(size for at, size in command.samples if at > last - 2),
        "files": len(files),
        "checkpoints_mb": sum(path.stat().st_size for path in files if path.suffix == ".ckpt") / MB,
        "others_mb": sum(path.stat().st_size for path in files if path.suffix != ".ckpt") / MB,
        "seconds": command.seconds,
    }


def prompts(place: Path, size: float) -> list[dict[str, Any]]:
    """2,000 prompts in batches of 16; the same evaluation, killed halfway and resumed, has the same answers."""
    from specdec.evaluation.benchmark import WAVE
    from specdec.utils.files import write_text

    count = round(2000 * size)
    harness.tell(f"{count:,} prompts")
    a = world.World(place)
    world.make_target(a.target)
    rows = [{"prompt_id": str(n), "prompt": f"def view_{n}(self, x):"} for n in range(count)]
    write_text(a.prompts, "".join(json.dumps(row) + "\n" for row in rows))
    with WatchedCommand(
        a.fit(a.run, "--trainer.max_steps", "40"), place / "cache", place / "fit.log"
    ) as fit:
        fit.finish()
    more = ["--batch_size", "16"]
    cache = place / "cache"
    with WatchedCommand([*a.evaluate(a.one), *more], cache, place / "one.log") as command:
        whole = command.finish()
    half = max(1, count // (16 * WAVE) // 2)

    def waves() -> int:
        journals = cache.glob("evaluations/*.journal")
        return sum(path.read_bytes().count(b"\n") - 1 for path in journals)

    with WatchedCommand([*a.evaluate(a.two), *more], cache, place / "two.log") as command:
        command.until(lambda: waves() >= half)
        command.kill()
        peak_before = command.peak_mb
    with WatchedCommand([*a.evaluate(a.two), *more], cache, place / "three.log") as command:
        resumed = command.finish()
    metrics = json.loads((a.two / "metrics.json").read_text())
    (after,) = metrics["provenance"]["continued_after_prompts"]
    line = {"prompts": count, "answers": metrics["results"][0]["prompts"]}
    return [
        line | {"again": count, "seconds": whole.seconds, "peak_mb": whole.peak_mb},
        line | {
            "again": count - after, "seconds": resumed.seconds, "peak_mb": max(peak_before, resumed.peak_mb),
            "same": world.of_evaluation(a.one) == world.of_evaluation(a.two),
        },
    ]  # fmt: skip


# --- the report ------------------------------------------------------------------------------------------------------

COLUMNS = {
    "conversations": {
        "conversations": "conversations", "killed": "killed on the way", "again": "tokenized by the last process",
        "seconds": "seconds of it", "tokens_mb": "tokens, MB", "peak_mb": "peak anonymous memory, MB",
        "same": "same files",
    },
    "steps": {
        "step": "step", "seconds": "seconds", "anonymous_mb": "anonymous memory, MB", "files": "files",
        "checkpoints_mb": "checkpoints, MB", "others_mb": "other files, MB",
    },
    "prompts": {
        "prompts": "prompts", "again": "decoded by the last process", "seconds": "seconds of it",
        "peak_mb": "peak anonymous memory, MB", "same": "same answers",
    },
}  # fmt: skip
TITLES = {
    "conversations": "Conversations tokenized and packed by `fit`",
    "steps": "A run of many steps: validation, decoded acceptance, checkpoints, CSV and TensorBoard",
    "prompts": "An evaluation in batches of 16, chains of 3",
}


def cell(value: Any) -> str:
    """A figure, or whether something holds."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.0f}" if isinstance(value, int) or value >= 100 else f"{value:.1f}"


def report(about: dict[str, Any], parts: dict[str, dict[str, Any]]) -> list[str]:
    """Markdown."""
    lines = [f"# Load and length, {about['date'][:10]}", ""]
    lines += [*harness.conditions(about, about["versions"]), ""]
    for name, part in parts.items():
        columns = COLUMNS[name]
        cells = [[cell(line.get(key)) for key in columns] for line in part["lines"]]
        lines += [f"## {TITLES[name]}", "", *harness.table(list(columns.values()), cells), ""]
        lines += [f"Commit {part['commit']}", ""]
    return lines


def main() -> None:
    """All parts that were not measured yet; the report is written in the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--size", type=float, default=1.0, help="share of all numbers, to try it")
    parser.add_argument(
        "--out", type=Path, help="a .md file; raw figures go to the .json next to it"
    )
    parser.add_argument("--force", action="store_true", help="overwrite what --out names")
    options = parser.parse_args()
    harness.check_out(options.out, options.force)
    from specdec.utils.files import write_json

    about = harness.machine(1)
    partial = None if options.out is None else options.out.with_suffix(".partial.json")
    measured = json.loads(partial.read_text()) if partial is not None and partial.exists() else {}
    # other sizes are other measurements
    parts = measured["parts"] if measured.get("size") == options.size else {}
    measures = {"conversations": conversations, "steps": steps, "prompts": prompts}
    for name in options.only:
        if name in parts:
            harness.tell(f"{name}: measured already, see {partial}")
            continue
        with tempfile.TemporaryDirectory(prefix="load-") as place:
            lines = measures[name](Path(place), options.size)
        parts[name] = {"commit": about["git_commit"], "lines": lines}
        if partial is not None:
            write_json(partial, {"size": options.size, "parts": parts})
    harness.keep(options.out, report(about, parts), {"run": about, "parts": parts})
    if partial is not None:
        partial.unlink()


if __name__ == "__main__":
    main()
