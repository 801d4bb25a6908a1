"""A study as it lies on the disk: its arms, what became of every job, and what the finished ones measured."""

import csv
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.evaluation.compare import SavedEvaluation, read_evaluation
from specdec.studies.plan import DONE, FOLDERS, PLAN, VERSION
from specdec.studies.worker import JobFolder
from specdec.utils.files import read_json

Json = dict[str, Any]

MEASUREMENT = 1  # the version of drift.json and robustness.json
CURVE_POINTS = 400  # of a drawn loss curve


@dataclass(frozen=True)
class RecordedRun:
    """An arm with one seed."""

    directory: Path
    seed: int
    keys: dict[str, str | None]
    """Of the job of each kind; None where the study has none."""

    @functools.cached_property
    def states(self) -> dict[str, Json]:
        """By kind, what became of the jobs that there are.

        ``name`` is ``done``, ``running``, ``stopped``, ``killed``, ``failed`` or ``not begun``; ``message`` says why it
        failed; ``seconds`` are those of all attempts.
        """
        return {kind: self._state(kind, key) for kind, key in self.keys.items() if key is not None}

    def _state(self, kind: str, key: str) -> Json:
        folder = JobFolder(self.directory, key)
        attempts = folder.attempts()
        name, message = "not begun", None
        if (self.place(kind) / DONE[kind]).is_file():
            name = "done"
        elif attempts:
            last = attempts[-1]
            name, message = last.end or ("running" if folder.is_held() else "killed"), last.message
            name = {"died": "failed", "done": "failed"}.get(name, name)  # whose file was removed
        return {"name": name, "message": message, "seconds": sum(one.seconds or 0.0 for one in attempts)}

    def place(self, kind: str) -> Path:
        """Where the job of a kind leaves what it makes."""
        return self.directory / FOLDERS.get(kind, "measures") / str(self.keys[kind])

    def done(self, kind: str) -> bool:
        """Whether there is a job of this kind and it is done."""
        return kind in self.states and self.states[kind]["name"] == "done"

    @functools.cached_property
    def evaluation(self) -> SavedEvaluation:
        """What its evaluation left."""
        return read_evaluation(self.place("evaluate"))

    def measured(self, kind: str) -> Json:
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

    def training(self) -> Json:
        """Steps and seconds of a finished fit, the whole process's, and its peak memory if it was logged."""
        peak = [value for _, value in self.logged.get("memory/peak_mb", [])]
        steps = int(read_json(self.place("fit") / DONE["fit"])["steps"])
        memory = max(peak) / 1000 if peak else None
        return {"steps": steps, "seconds": self.states["fit"]["seconds"], "peak_memory_gb": memory}


@dataclass(frozen=True)
class RecordedArm:
    """An arm as the plan has it, and its runs."""

    plan: Json
    runs: tuple[RecordedRun, ...]

    @property
    def name(self) -> str:
        """What it is called."""
        return self.plan["name"]

    def done(self, kind: str) -> list[RecordedRun]:
        """The runs whose job of this kind is done."""
        return [run for run in self.runs if run.done(kind)]


@dataclass(frozen=True)
class RecordedStudy:
    """A study's plan and what came of it."""

    directory: Path
    plan: Json
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
        runs = [RecordedRun(directory, run["seed"], {kind: run[kind] for kind in DONE}) for run in arm["runs"]]
        arms.append(RecordedArm(arm, tuple(runs)))
    return RecordedStudy(directory, plan, tuple(arms))
