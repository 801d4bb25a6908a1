"""A study as it lies on the disk: its arms, what became of every job, and what the finished ones measured."""

import csv
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from specdec.evaluation.compare import SavedEvaluation, read_evaluation
from specdec.studies.plan import PLAN, VERSION
from specdec.studies.worker import JobFolder
from specdec.utils.files import read_json

KINDS = ("fit", "evaluate", "drift", "robustness")
DONE = {"fit": "DONE.json", "evaluate": "metrics.json", "drift": "drift.json", "robustness": "robustness.json"}
MEASUREMENT = 1  # the version of drift.json and robustness.json
CURVE_POINTS = 400  # of a drawn loss curve


class JobState(NamedTuple):
    """What became of one job."""

    name: str
    """``done``, ``running``, ``stopped``, ``killed``, ``failed`` or ``not begun``."""
    message: str | None
    """Of a job that failed."""
    seconds: float | None
    """That its command ran, in all attempts."""


@dataclass(frozen=True)
class RecordedRun:
    """An arm with one seed."""

    directory: Path
    seed: int
    keys: dict[str, str | None]
    """Of the job of each kind; None where the study has none."""

    @functools.cached_property
    def states(self) -> dict[str, JobState]:
        """By kind, of the jobs that there are."""
        return {kind: self._state(kind, key) for kind, key in self.keys.items() if key is not None}

    def _state(self, kind: str, key: str) -> JobState:
        folder = JobFolder(self.directory, key)
        attempts = folder.attempts()
        seconds = round(sum(one.seconds or 0.0 for one in attempts), 3) if attempts else None
        if (self.place(kind) / DONE[kind]).is_file():
            return JobState("done", None, seconds)
        if not attempts:
            return JobState("not begun", None, None)
        last = attempts[-1]
        name = last.end or ("running" if folder.is_held() else "killed")
        if name == "done":
            return JobState("failed", f"its {DONE[kind]} was removed", seconds)
        return JobState({"died": "failed"}.get(name, name), last.message, seconds)

    def place(self, kind: str) -> Path:
        """Where the job of a kind that there is leaves what it makes."""
        key = self.keys[kind]
        assert key is not None
        return self.directory / ("fits" if kind == "fit" else "measures") / key

    def done(self, kind: str) -> bool:
        """Whether there is a job of this kind and it is done."""
        return kind in self.states and self.states[kind].name == "done"

    @functools.cached_property
    def evaluation(self) -> SavedEvaluation:
        """What its evaluation left."""
        return read_evaluation(self.place("evaluate"))

    def measured(self, kind: str) -> dict[str, Any]:
        """``drift.json`` or ``robustness.json``.

        Raises:
            ValueError: it is of another version.
        """
        path = self.place(kind) / DONE[kind]
        found = read_json(path)
        if not isinstance(found, dict) or found.get("version") != MEASUREMENT:
            raise ValueError(f"{path}: not of version {MEASUREMENT}: measure again with this version of specdec")
        return found

    @functools.cached_property
    def logged(self) -> dict[str, list[tuple[int, float]]]:
        """``(step, value)`` of everything that the training logged as CSV; of a step that was run again, the last."""
        found: dict[str, dict[int, float]] = {}
        paths = self.place("fit").glob("csv/version_*/metrics.csv")
        for path in sorted(paths, key=lambda path: int(path.parent.name.split("_")[1])):
            with path.open(encoding="utf-8", newline="") as file:
                for row in csv.DictReader(file):
                    for name, text in row.items():
                        if name != "step" and text and row.get("step"):
                            found.setdefault(name, {})[int(row["step"])] = float(text)
        return {name: sorted(values.items()) for name, values in found.items()}

    def loss_curve(self) -> list[tuple[int, float]]:
        """``(optimizer step, training loss)``, thinned to what a picture can show; finite ones only."""
        points = [(step + 1, value) for step, value in self.logged.get("train/loss", []) if math.isfinite(value)]
        return points[:: max(1, len(points) // CURVE_POINTS)]

    def training(self) -> dict[str, Any]:
        """Of a finished fit; None for what was not logged.

        ``seconds`` are the whole process's; ``step_seconds`` those of an optimizer step, the median of what was logged;
        ``peak_memory_bytes`` as the run logged it.
        """
        every = sorted(value for _, value in self.logged.get("speed/step_seconds", []))
        peak = [value for _, value in self.logged.get("memory/peak_mb", [])]
        return {
            "steps": int(read_json(self.place("fit") / DONE["fit"])["steps"]),
            "seconds": self.states["fit"].seconds,
            "step_seconds": every[len(every) // 2] if every else None,
            "peak_memory_bytes": round(max(peak) * 1e6) if peak else None,
        }


@dataclass(frozen=True)
class RecordedArm:
    """An arm as the plan has it, and its runs."""

    plan: dict[str, Any]
    runs: tuple[RecordedRun, ...]

    @property
    def name(self) -> str:
        """What it is called."""
        return self.plan["name"]

    @property
    def levels(self) -> dict[str, str]:
        """By axis."""
        return self.plan["levels"]

    def to_json(self) -> dict[str, Any]:
        """What the card says of it: the plan's, and what became of every job."""
        states = [{kind: state._asdict() for kind, state in run.states.items()} for run in self.runs]
        runs = [{**run, "states": own} for run, own in zip(self.plan["runs"], states, strict=True)]
        return {**self.plan, "runs": runs}

    def done(self, kind: str) -> list[RecordedRun]:
        """The runs whose job of this kind is done."""
        return [run for run in self.runs if run.done(kind)]


@dataclass(frozen=True)
class RecordedStudy:
    """A study's plan and what came of it."""

    directory: Path
    plan: dict[str, Any]
    arms: tuple[RecordedArm, ...]

    @property
    def base(self) -> RecordedArm:
        """The baseline."""
        return next(arm for arm in self.arms if arm.plan["is_baseline"])


def read_record(directory: Path) -> RecordedStudy:
    """Read ``plan.json``.

    Raises:
        ValueError: there is none, or it is not of this version.
    """
    path = directory / PLAN
    plan = read_json(path)
    if not isinstance(plan, dict) or plan.get("version") != VERSION:
        raise ValueError(f"{path}: not the plan of a study, version {VERSION}")
    arms = []
    for arm in plan["arms"]:
        keys = [(run["seed"], {kind: run[kind] for kind in KINDS}) for run in arm["runs"]]
        arms.append(RecordedArm(arm, tuple(RecordedRun(directory, *each) for each in keys)))
    return RecordedStudy(directory, plan, tuple(arms))


Name = TypeVar("Name", int, str)


def common(names: Sequence[Sequence[Name]]) -> list[Name]:
    """What all of them have, in the order of the first."""
    return [name for name in names[0] if all(name in each for each in names[1:])] if names else []
