"""Sweeps of the same jobs: undisturbed, killed, under Ray with a worker killed; and what became of each."""

import contextlib
import datetime
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specdec.files import read_json, write_json
from specdec.sweep.job import Job
from specdec.sweep.state import Folder

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT = 7200.0  # seconds of a sweep
POLL = 0.2


class Swept(NamedTuple):
    """What a sweep came to."""

    name: str
    kills: int
    """SIGKILLs, of one process each."""
    strikes: tuple[str, ...]
    """What was killed, and when."""
    jobs: int
    done_once: int
    """Jobs with exactly one attempt that ended well."""
    begun_again: int
    """Attempts beyond the first."""
    at_once: int
    """Pairs of attempts at one job that ran at the same time."""
    left_alive: int
    """Processes of killed workers that lived on."""
    seconds: float
    own_seconds: float
    """Of the jobs' commands, in all attempts."""
    runner: dict[str, Any]
    """What the runner that came to the end wrote."""

    @property
    def overhead(self) -> float:
        """Share of the commands' own time that their workers took beside it."""
        return (self.runner["workers_seconds"] - self.own_seconds) / self.own_seconds

    @property
    def idle(self) -> float:
        """The same of all the workers' time from the first beginning to the last end."""
        return (self.runner["slots_seconds"] - self.own_seconds) / self.own_seconds


class Campaign:
    """Sweeps in folders of their own.

    Args:
        make: the jobs of a study's folder.
        module: whose commands they are.
        told: is told what happens.
    """

    def __init__(
        self, folder: Path, make: Callable[[Path], list[Job]], workers: int = 2, module: str = "specdec",
        grace: float = 30.0, told: Callable[[str], None] = lambda line: None,
    ) -> None:  # fmt: skip
        self.folder, self.make, self.workers, self.module, self.grace = folder, make, workers, module, grace
        self.told = told

    def undisturbed(self, engine: str = "local") -> Swept:
        """Nobody is killed."""
        return self._sweep("undisturbed", engine, [])

    def killed(self, strikes: Sequence[str], seed: int = 0) -> Swept:
        """SIGKILL of the runner and all its workers (``everything``), a ``keeper``, an ``attempt``, a ``command``."""
        return self._sweep("killed", "local", strikes, seed)

    def ray(self, seed: int = 0) -> Swept:
        """SIGKILL of a worker of Ray."""
        return self._sweep("ray", "ray", ["worker"], seed)

    def _sweep(self, name: str, engine: str, strikes: Sequence[str], seed: int = 0) -> Swept:
        study = self.folder / name
        jobs, draw, begin = self.make(study), random.Random(seed), time.monotonic()
        spec = {
            "study": str(study), "engine": engine, "workers": self.workers, "module": self.module, "grace": self.grace,
            "out": str(study / "outcome.json"), "jobs": [job.to_json() for job in jobs],
        }  # fmt: skip
        write_json(study / "spec.json", spec)
        done: list[str] = []
        kills, alive = 0, set[int]()
        with self._runner(study) as runner:
            for number, strike in enumerate(strikes):
                share = (number + draw.random()) / len(strikes)
                if not self._reach(runner[0], study, jobs, int(share * 0.9 * len(jobs)), draw):
                    break
                victims, family = _victims(runner[0].pid, strike, draw)
                if not victims:
                    break
                for pid in victims:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        kills += 1
                finished = _finished(study, jobs)
                done.append(f"{strike} ({len(victims)} processes) after {finished} of {len(jobs)} jobs")
                self.told(f"{name}: SIGKILL: {done[-1]}")
                if strike == "everything":
                    runner[0].wait()
                    alive |= _still_alive(family)
                    runner[0] = self._start(study)
                else:
                    alive |= _still_alive(family)
            status = runner[0].wait(LIMIT)
        if status != 0:
            raise RuntimeError(f"{name}: status {status}: {(study / 'runner.log').read_text()[-3000:]}")
        if len(done) < len(strikes):
            raise RuntimeError(f"{name}: ended before it could be killed {len(strikes)} times: give it longer jobs")
        return _told_of(name, study, jobs, kills, tuple(done), len(alive), time.monotonic() - begin, self.workers)

    def _start(self, study: Path) -> subprocess.Popen:
        with (study / "runner.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "benchmarks.sweeping.runner", str(study / "spec.json")],
                cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    @contextlib.contextmanager
    def _runner(self, study: Path) -> Iterator[list[subprocess.Popen]]:
        runner = [self._start(study)]
        try:
            yield runner
        finally:
            runner[0].terminate()
            runner[0].wait()

    def _reach(
        self, runner: subprocess.Popen, study: Path, jobs: Sequence[Job], most: int, draw: random.Random
    ) -> bool:
        """Wait until so many jobs are done and others run, and then for a random part of a job's time."""
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            if runner.poll() is not None:
                return False
            if _finished(study, jobs) >= most and len(_workers(runner.pid)) >= 1:
                times = [
                    one.seconds for job in jobs for one in Folder(study / "jobs" / job.key).attempts() if one.seconds
                ]
                time.sleep(draw.random() * min(times, default=1.0))
                return runner.poll() is None
            time.sleep(0.05)
        return False


def _finished(study: Path, jobs: Sequence[Job]) -> int:
    return sum((study / job.directory / job.done).exists() for job in jobs)


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, rest = int(path.parent.name), path.read_text().rpartition(")")[2].split()
            if rest[0] != "Z":
                found.setdefault(int(rest[1]), []).append(pid)
    return found


def _family(pid: int) -> list[int]:
    children, out = _children(), [pid]
    for one in out:
        out += children.get(one, [])  # grows meanwhile
    return out


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _workers(pid: int) -> list[tuple[int, int, int, int]]:
    """Of every worker whose command runs: who started its keeper, the keeper, the attempt, the command."""
    children, out = _children(), []
    for above in _family(pid):
        for keeper in children.get(above, []):
            for attempt in children.get(keeper, []) if "keeper.py" in _command(keeper) else []:
                out += [(above, keeper, attempt, command) for command in children.get(attempt, [])]
    return out


def _victims(runner: int, strike: str, draw: random.Random) -> tuple[list[int], list[int]]:
    """What to kill, in a random order, and what must not live on after it."""
    workers = _workers(runner)
    if not workers:
        return [], []
    if strike == "everything":
        family = _family(runner)
        return draw.sample(family, len(family)), family
    above, keeper, attempt, command = draw.choice(workers)
    victim = {"worker": above, "keeper": keeper, "attempt": attempt, "command": command}[strike]
    return [victim], [victim, keeper, attempt, *_family(command)]


def _still_alive(pids: Sequence[int], seconds: float = 60.0) -> set[int]:
    """Those that live on after some time; a zombie does not."""
    end = time.monotonic() + seconds
    while True:
        everybody = {pid for some in _children().values() for pid in some}
        left = everybody & set(pids)
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.1)


def _told_of(
    name: str, study: Path, jobs: Sequence[Job], kills: int, strikes: tuple[str, ...], alive: int, seconds: float,
    workers: int,
) -> Swept:  # fmt: skip
    attempts = {job.key: Folder(study / "jobs" / job.key).attempts() for job in jobs}
    spans = {
        key: [(at := datetime.datetime.fromisoformat(one.begun).timestamp(), at + (one.seconds or 0.0)) for one in some]
        for key, some in attempts.items()
    }
    overlaps = sum(
        later[0] < earlier[1] - 0.05  # they are rounded
        for some in spans.values()
        for number, later in enumerate(some)
        for earlier in some[:number]
    )
    runner = read_json(study / "outcome.json")
    states = [Folder(study / "jobs" / job.key).state() for job in jobs]
    ended = sorted(
        datetime.datetime.fromisoformat(state.ended).timestamp() for state in states if state and state.ended
    )
    tail = sum(ended[-1] - end for end in ended[-workers:])  # a worker that nothing is left for is not overhead
    runner["slots_seconds"] = workers * runner["seconds"] - tail
    return Swept(
        name, kills, strikes, len(jobs),
        sum([one.end for one in some].count("done") == 1 for some in attempts.values()),
        sum(len(some) - 1 for some in attempts.values()),
        overlaps, alive, seconds,
        sum(one.seconds or 0.0 for some in attempts.values() for one in some),
        runner,
    )  # fmt: skip
