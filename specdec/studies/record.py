"""A study as it lies on the disk: its arms, what became of every job, and what the finished ones measured."""

import csv
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.evaluation.compare import SavedEvaluation, read_evaluation
from specdec.studies.plan import PLAN, VERSION
from specdec.studies.study import MEASURES
from specdec.studies.worker import JobFolder
from specdec.utils.files import read_json

Json = dict[str, Any]

MEASUREMENT = 1  # the version of drift.json and robustness.json
CURVE_POINTS = 400  # of a drawn loss curve


@dataclass(frozen=True)
class RecordedRun:
    """An arm with one seed, and by kind the folders of its jobs."""

    seed: int
    folders: dict[str, JobFolder]

    @functools.cached_property
    def states(self) -> dict[str, Json]:
        """By kind, what became of the jobs that there are.

        ``name`` is ``done``, ``running``, ``stopped``, ``killed``, ``failed`` or ``not begun``; ``message`` says why it
        failed; ``seconds`` are those of all attempts.
        """
        states = {}
        for kind, folder in self.folders.items():
            attempts = folder.attempts()
            last = attempts[-1] if attempts else {"end": "not begun"}
            name = last.get("end") or ("running" if folder.is_held() else "killed")
            if folder.is_done():
                name, last = "done", {}
            elif name in ("died", "done"):  # or whose file was removed
                name = "failed"
            seconds = sum(one.get("seconds") or 0.0 for one in attempts)
            states[kind] = {"name": name, "message": last.get("message"), "seconds": seconds}
        return states

    def done(self, kind: str) -> bool:
        """Whether there is a job of this kind and it is done."""
        return kind in self.folders and self.folders[kind].is_done()

    @functools.cached_property
    def evaluation(self) -> SavedEvaluation:
        """What its evaluation left."""
        return read_evaluation(self.folders["evaluate"].output)

    def measured(self, kind: str) -> Json:
        """``drift.json`` or ``robustness.json``.

        Raises:
            ValueError: it is of another version.
        """
        path = self.folders[kind].last_file
        found = read_json(path)
        if not isinstance(found, dict) or found.get("version") != MEASUREMENT:
            raise ValueError(f"{path}: not of version {MEASUREMENT}: measure again with this version of specdec")
        return found

    @functools.cached_property
    def logged(self) -> dict[str, dict[int, float]]:
        """By step everything that the training logged as CSV; of a step that was run again, the last."""
        found: dict[str, dict[int, float]] = {}
        paths = self.folders["fit"].output.glob("csv/version_*/metrics.csv")
        for path in sorted(paths, key=lambda path: int(path.parent.name.split("_")[1])):
            with path.open(encoding="utf-8", newline="") as file:
                for row in csv.DictReader(file):
                    for name, text in row.items():
                        if name != "step" and text and row.get("step"):
                            found.setdefault(name, {})[int(row["step"])] = float(text)
        return found

    def loss_curve(self) -> list[tuple[int, float]]:
        """``(optimizer step, training loss)``, thinned to what a picture can show; finite ones only."""
        logged = sorted(self.logged.get("train/loss", {}).items())
        points = [(step + 1, value) for step, value in logged if math.isfinite(value)]
        return points[:: max(1, len(points) // CURVE_POINTS)]

    def training(self) -> Json:
        """Steps and seconds of a finished fit, its process's start included, and its peak memory if it was logged."""
        memory = max(self.logged.get("memory/peak_mb", {}).values(), default=None)
        steps = int(read_json(self.folders["fit"].last_file)["steps"])
        return {
            "steps": steps,
            "seconds": self.states["fit"]["seconds"],
            "peak_memory_gb": None if memory is None else memory / 1000,
        }


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
        keys = [{kind: run[kind] for kind in ("fit", *MEASURES) if run[kind]} for run in arm["runs"]]
        folders = [{kind: JobFolder(directory, kind, key) for kind, key in own.items()} for own in keys]
        runs = [RecordedRun(run["seed"], own) for run, own in zip(arm["runs"], folders, strict=True)]
        arms.append(RecordedArm(arm, tuple(runs)))
    return RecordedStudy(plan, tuple(arms))
