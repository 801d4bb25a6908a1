"""What the benchmarks share: systems in processes of their own that work in turns, the machine, and dated files.

The worker's side (:func:`serve`, :func:`timed`) needs Python alone, since it also runs in other packages' environments.
"""

import contextlib
import json
import os
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 1800.0  # seconds for one answer: the first may compile
# of /proc/stat's columns: all but idle and waiting for a disk; 7 is what a host took away
BUSY = (0, 1, 2, 5, 6, 7)
OTHERS = 0.05  # of the machine, used by other processes during an act: more is warned of

T = TypeVar("T")


# --- in the worker ---------------------------------------------------------------------------------------------------


def _machine_seconds() -> float:
    """CPU seconds that all processes of this machine have used."""
    with open("/proc/stat") as lines:
        columns = [int(x) for x in lines.readline().split()[1:]]
    return sum(columns[i] for i in BUSY) / os.sysconf("SC_CLK_TCK")


def timed(act: Callable[[], T]) -> tuple[T, dict[str, float]]:
    """What an act returns; its wall ``seconds``, and the share of the machine that ``others`` used meanwhile."""
    machine, own, begin = _machine_seconds(), time.process_time(), time.perf_counter()
    out = act()
    wall, own, machine = (
        time.perf_counter() - begin,
        time.process_time() - own,
        _machine_seconds() - machine,
    )
    cores = os.cpu_count() or 1
    ticks = cores / os.sysconf("SC_CLK_TCK")  # the kernel counts whole ticks of each core
    return out, {"seconds": wall, "others": max(0.0, machine - own - ticks) / (wall * cores)}


def serve(start: Callable[[dict[str, Any]], tuple[dict[str, Any], Callable[[Any], Any]]]) -> None:
    """Speak lines of JSON on standard output until the input ends; whatever else is printed goes to standard error.

    Args:
        start: from the job on the command line to what is said first, and what answers each line of standard input.
    """
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    about, answer = start(json.loads(sys.argv[-1]))
    print(json.dumps(about), file=replies)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=replies)


# --- in the parent ---------------------------------------------------------------------------------------------------


class Worker:
    """``python SCRIPT --worker JOB`` in a process of its own; ``about`` is what it says first.

    Raises:
        ValueError: it could not be started, died, or gave no answer in time; the message ends with its last words.
    """

    def __init__(
        self, python: str, name: str, script: Path, job: Mapping[str, Any], log: Path
    ) -> None:
        self.name, self.log = name, log
        threads = str(job["threads"])
        environment = os.environ | {
            "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        if job.get("device") != "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [python, str(script), "--worker", json.dumps(job)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors, env=environment, text=True,
            )  # fmt: skip
        try:
            self.about = self._answer()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, question: Any) -> Any:
        """Its answer; both are JSON."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer says it better
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], PATIENCE)[0]:
            raise ValueError(f"{self.name}: no answer for {PATIENCE:.0f} s")
        if not (line := self.process.stdout.readline()):
            words = [text.strip() for text in self.log.read_text().splitlines() if text.strip()]
            raise ValueError(f"{self.name} ended: {words[-1] if words else 'it said nothing'}")
        return json.loads(line)


def tell(what: str) -> None:
    """A line of progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {what}", file=sys.stderr, flush=True)


def machine(threads: int) -> dict[str, Any]:
    """CPU, memory, threads, date, command, commit, versions and load; paths of this machine are left out."""
    from specdec.utils.machine import provenance

    found = provenance()
    words = [os.path.relpath(word) if os.path.isabs(word) else word for word in sys.argv]
    memory = next(
        int(line.split()[1])
        for line in Path("/proc/meminfo").read_text().splitlines()
        if "MemTotal" in line
    )
    kept = ("date", "git_commit", "git_dirty", "cpu", "cores", "platform", "python", "versions")
    return {name: found[name] for name in kept} | {
        "command": shlex.join(["python", *words]),
        "threads": threads,
        "memory_gb": round(memory * 1024 / 1e9, 1),
        "load_at_start": [round(x, 2) for x in os.getloadavg()],
    }


def conditions(about: Mapping[str, Any], versions: Mapping[str, str]) -> list[str]:
    """Lines of Markdown on where and how something was measured."""
    software = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    return [
        f"- Command: `{about['command']}`",
        f"- Machine: {about['cpu']}, {about['cores']} cores, {about['threads']} threads, {about['memory_gb']} GB",
        f"- Software: Python {about['python']}, {software}",
        f"- Commit: {about['git_commit']}{', with changes' if about['git_dirty'] else ''}; {about['date'][:10]}; "
        f"load average at the start {about['load_at_start'][0]}",
    ]


def table(columns: Sequence[str], lines: Iterable[Sequence[str]], words: int = 1) -> list[str]:
    """A Markdown table; all but the first ``words`` columns are figures."""
    rule = "|---" * words + "|---:" * (len(columns) - words) + "|"
    return [
        "| " + " | ".join(columns) + " |",
        rule,
        *("| " + " | ".join(line) + " |" for line in lines),
    ]


def disturbances(timed: Mapping[str, Sequence[Mapping[str, float]]]) -> list[str]:
    """A warning, if other processes used much of the machine while systems, here by name, were timed."""
    found = {
        name: n
        for name, each in timed.items()
        if (n := sum(one["others"] > OTHERS for one in each))
    }
    return (
        ["", f"**Warning**: other processes used much of the CPU, so many times: {found}."]
        if found
        else []
    )


def keep(out: Path | None, lines: Sequence[str], raw: Any) -> None:
    """Print a report; if ``out`` (``.md``) is given, write it there, and the raw figures to the ``.json`` beside it."""
    from specdec.utils.files import write_json, write_text

    print("\n".join(lines))
    if out is not None:
        write_text(out, "\n".join(lines) + "\n")
        write_json(out.with_suffix(".json"), raw)


def check_out(out: Path | None, force: bool) -> None:
    """Raise ValueError unless a report may be written there."""
    if out is None:
        return
    if out.suffix != ".md":
        raise ValueError(f"--out {out} must end in .md: the raw figures go to a .json beside it")
    if out.exists() and not force:
        raise ValueError(f"{out} exists already: choose another --out, or add --force")
