"""A study as it lies on the disk: its arms, what became of every job, and what the finished ones measured."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from specdec.evaluation.compare_command import Run as Evaluation
from specdec.evaluation.compare_command import read as read_evaluation
from specdec.files import read_json
from specdec.shared import lock_now

VERSION = 1
KINDS = ("fit", "evaluate", "drift", "robustness")
FOLDER = {"fit": "fits", "evaluate": "measures", "drift": "measures", "robustness": "measures"}
DONE = {"fit": "DONE.json", "evaluate": "metrics.json", "drift": "drift.json", "robustness": "robustness.json"}
NOT_BEGUN = "not begun"


class State(NamedTuple):
    """What became of one job."""

    name: str
    """``done``, ``running``, ``stopped``, ``killed``, ``failed`` or ``not begun``."""
    message: str | None
    """Of a job that failed."""
    seconds: float | None
    peak_memory_bytes: int | None

    @property
    def done(self) -> bool:
        """Whether what it makes is whole."""
        return self.name == "done"


@dataclass(frozen=True)
class Run:
    """An arm with one seed."""

    directory: Path
    seed: int
    keys: dict[str, str | None]
    """Of the job of each kind; None where the study has none."""

    @functools.cached_property
    def states(self) -> dict[str, State]:
        """By kind, of the jobs that there are."""
        return {kind: self._state(kind, key) for kind, key in self.keys.items() if key is not None}

    def _state(self, kind: str, key: str) -> State:
        path = self.directory / "jobs" / key / "state.json"
        stored = read_json(path) if path.is_file() else {}
        name = "done" if (self.place(kind) / DONE[kind]).is_file() else stored.get("state", NOT_BEGUN)
        if name == "running" and not _is_held(path.with_name("lock")):
            name = "killed"
        if name == "done" and not (self.place(kind) / DONE[kind]).is_file():
            name = "failed"
            stored = {**stored, "message": f"it left no {DONE[kind]}"}
        message = stored.get("message") if name == "failed" else None
        return State(name, message, stored.get("seconds"), stored.get("peak_memory_bytes"))

    def place(self, kind: str) -> Path:
        """Where the job of a kind that there is leaves what it makes."""
        key = self.keys[kind]
        assert key is not None
        return self.directory / FOLDER[kind] / key

    def done(self, kind: str) -> bool:
        """Whether there is a job of this kind and it is done."""
        return kind in self.states and self.states[kind].done

    @functools.cached_property
    def evaluation(self) -> Evaluation:
        """What its evaluation left."""
        return read_evaluation(self.place("evaluate"))

    def measured(self, kind: str) -> dict[str, Any]:
        """``drift.json`` or ``robustness.json``.

        Raises:
            ValueError: it is of another version.
        """
        path = self.place(kind) / DONE[kind]
        found = read_json(path)
        if not isinstance(found, dict) or found.get("version") != VERSION:
            raise ValueError(f"{path}: not of version {VERSION}: measure again with this version of specdec")
        return found


@dataclass(frozen=True)
class Arm:
    """A combination of the axes' levels, and its runs."""

    name: str
    levels: dict[str, str]
    is_baseline: bool
    differences: tuple[str, ...]
    """From the baseline, as ``specdec diff`` says them."""
    runs: tuple[Run, ...]

    def done(self, kind: str) -> list[Run]:
        """The runs whose job of this kind is done."""
        return [run for run in self.runs if run.done(kind)]


@dataclass(frozen=True)
class Study:
    """A study's plan and what came of it."""

    directory: Path
    name: str
    design: str
    axes: dict[str, list[str]]
    baseline: dict[str, str]
    generators: list[Any]
    seeds: list[int]
    arms: tuple[Arm, ...]
    plan: dict[str, Any]

    @property
    def base(self) -> Arm:
        """The baseline."""
        return next(arm for arm in self.arms if arm.is_baseline)


def read(directory: Path) -> Study:
    """Read ``plan.json``.

    Raises:
        ValueError: there is none, or it is not of this version, or it names no baseline.
    """
    path = directory / "plan.json"
    plan = read_json(path)
    if not isinstance(plan, dict) or plan.get("version") != VERSION:
        raise ValueError(f"{path}: not the plan of a study, version {VERSION}")
    try:
        study = Study(
            directory,
            plan["name"],
            plan["design"] if isinstance(plan["design"], str) else "fractional",
            {str(axis): [str(level) for level in levels] for axis, levels in plan["axes"].items()},
            {str(axis): str(level) for axis, level in (plan.get("baseline") or {}).items()},
            list(plan.get("generators") or []),
            list(plan["seeds"]),
            tuple(_arm(directory, arm) for arm in plan["arms"]),
            plan,
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: not the plan of a study, for want of {error}") from error
    if sum(arm.is_baseline for arm in study.arms) != 1:
        raise ValueError(f"{path}: {sum(arm.is_baseline for arm in study.arms)} arms are the baseline: it takes one")
    return study


def _arm(directory: Path, arm: dict[str, Any]) -> Arm:
    levels = {str(axis): str(level) for axis, level in arm["levels"].items()}
    runs = tuple(Run(directory, run["seed"], {kind: run.get(kind) for kind in KINDS}) for run in arm["runs"])
    return Arm(arm["name"], levels, arm["is_baseline"], tuple(arm["differences"]), runs)


def _is_held(lock: Path) -> bool:
    """Whether somebody works on a job: who does holds the lock of this file."""
    if not lock.is_file():
        return False
    with lock.open("rb") as stream:
        return not lock_now(stream, shared=True)


Name = TypeVar("Name", int, str)


def common(names: Sequence[Sequence[Name]]) -> list[Name]:
    """What all of them have, in the order of the first."""
    return [name for name in names[0] if all(name in each for each in names[1:])] if names else []
