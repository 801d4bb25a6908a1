"""SIGKILL at random moments, and the same command again: does it end as the one that nothing disturbs?

One process is killed in all of its life: while it starts, at a step, within a write. DDP and FSDP2, sweeps and their
workers are processes that no fork makes, so they start interpreters of their own.
"""

import contextlib
import importlib.util
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.faults import world
from benchmarks.faults.command import Command, Ended, Inside
from benchmarks.faults.world import EVERY, Made, Server, World, losses

MOST = 6  # kills of one run, so that it ends some time
IN_ONE = 3  # workers of one sweep, which starts no job more often again
RENAMES = 8  # of a command, before one of which it is killed
SHARD = 200_000  # bytes of a shard of features, so that there are many

Moment = Callable[[Command, Path, random.Random, float], bool]
"""Waits for the moment to kill in the life of a command, by its output and how long an undisturbed one takes; false if
the command ended before."""


@dataclass(frozen=True)
class Kind:
    """What is killed.

    Args:
        kills: how many, in a full campaign.
        argv: the command, by what it makes.
        made: of that the parts that must be equal.
        moments: when it is killed, one drawn each time.
        victim: what is killed; by default the command with all of its process group.
        fresh: see :class:`Command`.
        name: of what it makes.
    """

    kills: int
    argv: Callable[[Path], list[str]]
    made: Callable[[Path], Made]
    moments: tuple[Moment, ...]
    victim: Callable[[Command, Path, random.Random], bool] = lambda command, out, draw: (
        command.kill() is None
    )
    fresh: bool = False
    name: str = "out"
    inside: Inside | None = None


@dataclass
class Count:
    """What became of one kind."""

    kind: str
    kills: int = 0
    runs: int = 0
    losses: int = 0
    differing: int = 0
    parts: int = 0
    unequal: int = 0
    failed: int = 0
    left_over: int = 0
    findings: list[str] = field(default_factory=list)


# --- moments ---------------------------------------------------------------------------------------------------------


def any_time(command: Command, out: Path, draw: random.Random, seconds: float) -> bool:
    """At any, from its start to the end of an undisturbed one."""
    end = time.monotonic() + draw.random() * seconds
    return command.until(lambda: time.monotonic() > end)


def at_a_step(command: Command, out: Path, draw: random.Random, seconds: float) -> bool:
    """Some steps later, and a random part of a step or save after that."""
    goal, pause = len(losses(out)) + draw.randint(1, 2 * EVERY), draw.random() * 0.1
    came = command.until(lambda: len(losses(out)) >= goal)
    time.sleep(pause)
    return came


def within_a_write(command: Command, out: Path, draw: random.Random, seconds: float) -> bool:
    """Just after a temporary file or folder appeared, of the few that are drawn from."""
    seen, goal = set[str](), draw.randint(1, 6)

    def many() -> bool:
        for folder in (out.parent, out, out / "checkpoints"):
            with contextlib.suppress(OSError):
                seen.update(name for name in os.listdir(folder) if name.startswith(".tmp-"))
        return len(seen) >= goal

    came = command.until(many)
    time.sleep(draw.random() * 0.004)
    return came


def _orders(pid: int) -> Path:
    """Where a command reads before which of its renames it is to be killed."""
    return Path(tempfile.gettempdir()) / f"specdec-faults-{os.getuid()}-{pid}"


def renames_may_kill() -> Callable[[], None]:
    """Inside a command: SIGKILL before a rename, if :func:`before_a_rename` has said so."""
    orders, seen = _orders(os.getpid()), list[str]()

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename":
            seen.append(event)
            if orders.exists() and len(seen) >= int(orders.read_text()):
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    return lambda: None


def before_a_rename(command: Command, out: Path, draw: random.Random, seconds: float) -> bool:
    """Between two files that take their places, of which one may say something of the other."""
    orders = _orders(command.pid)
    orders.write_text(str(draw.randint(1, RENAMES)))
    status = command.wait().status
    orders.unlink()
    return status == -signal.SIGKILL


# --- victims of a sweep ----------------------------------------------------------------------------------------------


def processes(out: Path) -> dict[int, list[str]]:
    """Living processes whose command line names a folder, with it."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if any(str(out) in word for word in words) and int(path.name) != os.getpid():
                found[int(path.name)] = words
    return found


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def workers(out: Path) -> list[tuple[int, int]]:
    """Of every job that runs its command and the supervisor of that."""
    return [
        (pid, _parent(pid))
        for pid, words in processes(out).items()
        if "specdec" in words[:4]
        and "sweep" not in words
        and not any("supervise" in word for word in words[:4])
    ]


def a_worker_lives(command: Command, out: Path, draw: random.Random, seconds: float) -> bool:
    """Some time after a job's command has begun."""
    if not command.until(lambda: bool(workers(out))):
        return False
    end = time.monotonic() + draw.random() * seconds / 3
    return command.until(lambda: time.monotonic() > end)


def the_runner(command: Command, out: Path, draw: random.Random) -> bool:
    """The sweep's own process; its workers see to themselves."""
    os.kill(command.pid, signal.SIGKILL)
    return True


def a_worker(command: Command, out: Path, draw: random.Random) -> bool:
    """One job's command, or its supervisor; the sweep goes on."""
    for pids in draw.sample(found := workers(out), len(found)):
        with contextlib.suppress(OSError):
            os.kill(draw.choice(pids), signal.SIGKILL)
            return True
    return False


def a_ray_worker(command: Command, out: Path, draw: random.Random) -> bool:
    """The process of Ray in which a job's worker runs."""
    for _, supervisor in draw.sample(found := workers(out), len(found)):
        with contextlib.suppress(OSError):
            above = _parent(supervisor)
            if above not in (1, command.pid):
                os.kill(above, signal.SIGKILL)
                return True
    return False


# --- kinds -----------------------------------------------------------------------------------------------------------


def kinds(a: World, server: Server) -> dict[str, Kind]:
    """All of them by name."""
    steps = (at_a_step, at_a_step, any_time, within_a_write)
    two = ("--trainer.devices", "2", "--trainer.strategy")

    def fit(
        kills: int, *more: str, moments: tuple[Moment, ...] = steps, fresh: bool = False
    ) -> Kind:
        return Kind(kills, lambda out: a.fit(out, *more), world.of_fit, moments, fresh=fresh)

    def small_shards() -> Callable[[], None]:
        from specdec.engines import extract

        extract.SHARD_BYTES = SHARD
        return lambda: None

    def ray(out: Path) -> list[str]:
        return a.sweep(out, "--engine", "Ray")

    answers = world.of_files("own.jsonl")
    weights = world.of_files("config.json", "model.safetensors")
    between = (
        ("fit", a.fit, world.of_record),
        ("cache", lambda out: ["cache", *a.model_and_data(), "--out", str(out)], world.of_files("index.json")),
        ("regenerate", lambda out: a.regenerate(out / "own.jsonl"), world.of_files("own.jsonl", "own.jsonl.sha256")),
        ("export", lambda out: ["export", *a.pair(), "--out", str(out)], weights),
    )  # fmt: skip
    url = ("--engine", "openai", "--url", server.url, "--concurrency", "2")
    found = {
        "fit": fit(30),
        "fit, accumulation": fit(24, "--trainer.accumulate_grad_batches", "2"),
        "fit, cached features": fit(24, *a.cached()),
        "fit, within a save": fit(30, "--checkpoint.every_n_train_steps", "1", moments=(within_a_write,)),
        "cache": Kind(
            20, lambda out: ["cache", *a.model_and_data(), "--out", str(out)],
            world.of_files("index.json", "*.safetensors"), (any_time, within_a_write), inside=small_shards,
        ),
        "regenerate": Kind(20, lambda out: a.regenerate(out / "own.jsonl"), answers, (any_time,)),
        "regenerate, a server": Kind(20, lambda out: a.regenerate(out / "own.jsonl", *url), answers, (any_time,)),
        "export": Kind(
            20, lambda out: ["export", *a.pair(), "--out", str(out)],
            world.of_files("config.json", "model.safetensors"), (any_time, within_a_write),
        ),
        **{f"{name}, before a rename": Kind(
            24, argv, made, (before_a_rename,), inside=renames_may_kill) for name, argv, made in between},
        "sweep, runner": Kind(8, a.sweep, world.of_study, (a_worker_lives,), the_runner),
        "sweep, worker": Kind(8, a.sweep, world.of_study, (a_worker_lives,), a_worker),
        "fit, DDP": fit(8, *two, "ddp", moments=(at_a_step,), fresh=True),
        "fit, FSDP2": fit(8, *two, "fsdp2", moments=(at_a_step,), fresh=True),
    }  # fmt: skip
    if importlib.util.find_spec("ray"):  # a sweep is the first to import it
        found["sweep, Ray worker"] = Kind(4, ray, world.of_study, (a_worker_lives,), a_ray_worker)
    return found


def campaign(a: World, name: str, place: Path, share: float, seed: int = 0) -> Count:
    """Kills of one kind, until there were so many; what became of them.

    Args:
        share: of the kills of a full campaign.
    """
    server = Server()
    if "server" in name:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                server.serve_forever()
            os._exit(0)
    try:
        return _campaign(kinds(a, server)[name], Count(name), a, place, share, seed)
    finally:
        server.server_close()
        if "server" in name:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _campaign(kind: Kind, count: Count, a: World, place: Path, share: float, seed: int) -> Count:
    draw, kills = random.Random(f"{seed} {count.kind}"), max(1, round(kind.kills * share))
    place.mkdir(parents=True, exist_ok=True)
    whole = place / "whole"
    ended = _to_the_end(kind, whole, a)
    if ended.status != 0:
        raise ValueError(f"{count.kind}: status {ended.status} undisturbed: {ended.last}")
    reference = kind.made(whole)
    while count.kills < kills and count.failed < 5 and count.runs < 5 * kills:
        out = place / f"{count.runs}" / kind.name
        out.parent.mkdir()
        count.runs += 1
        for _ in range(MOST):
            if count.kills == kills:
                break
            command = Command(
                kind.argv(out), cwd=a.folder, fresh=kind.fresh, inside=kind.inside, progress=True
            )
            for _ in range(IN_ONE if kind.victim in (a_worker, a_ray_worker) else 1):
                if count.kills == kills or not draw.choice(kind.moments)(
                    command, out, draw, ended.seconds
                ):
                    break
                count.kills += kind.victim(command, out, draw)
            early = command.wait()
            if "exists already" in early.err:  # it was killed when all was done
                break
            if early.status not in (0, -signal.SIGKILL):
                count.findings.append(f"status {early.status} in between: {early.last}")
            if early.status == 0:
                break
        _judge(count, _to_the_end(kind, out, a), reference, kind, out)
        harness.tell(f"{count.kind}: {count.kills} of {kills} kills")
    return count


def _to_the_end(kind: Kind, out: Path, a: World) -> Ended:
    """Run it to its end; an undisturbed command that finds its work done has nothing against that, or says so."""
    return Command(kind.argv(out), cwd=a.folder, fresh=kind.fresh, inside=kind.inside).wait()


def _judge(count: Count, ended: Ended, reference: Made, kind: Kind, out: Path) -> None:
    made: Mapping[str, str] = {}
    if ended.status != 0 and not (
        count.kind.startswith("export") and "exists already" in ended.err
    ):
        count.failed += 1
        count.findings.append(f"the same command again: status {ended.status}: {ended.last}")
    try:
        made = kind.made(out)
    except (OSError, ValueError, json.JSONDecodeError) as error:
        count.findings.append(f"nothing to compare: {error}")
    for name, value in reference.items():
        if name.endswith("losses.txt"):
            one, two = value.split("\n"), made.get(name, "").split("\n")
            count.losses += len(one)
            count.differing += sum(x != y for x, y in zip(one, two, strict=False)) + abs(
                len(one) - len(two)
            )
        else:
            count.parts += 1
            count.unequal += made.get(name) != value
            if made.get(name) != value:
                count.findings.append(f"{name} differs")
    end = time.monotonic() + 45
    while (alive := processes(out)) and time.monotonic() < end:
        time.sleep(0.1)
    rest = [*world.left_over(out.parent), *(" ".join(words)[:100] for words in alive.values())]
    count.left_over += len(rest)
    count.findings += [f"left over: {one}" for one in rest[:3]]


def table(counts: list[dict[str, Any]]) -> list[str]:
    """Markdown."""
    columns = [
        "what was killed",
        "SIGKILLs",
        "runs",
        "losses different",
        "other parts unequal",
        "failed",
        "left over",
    ]
    rows = [
        [one["kind"], str(one["kills"]), str(one["runs"]), f"{one['differing']} of {one['losses']}",
         f"{one['unequal']} of {one['parts']}", str(one["failed"]), str(one["left_over"])] for one in counts
    ]  # fmt: skip
    return harness.table(columns, rows)
