"""A study as it lies on the disk: its arms, what became of every job, and what the finished ones measured."""

import functools
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

    def training(self) -> Json:
        """Steps and seconds of a finished fit, its process's start included."""
        steps = int(read_json(self.folders["fit"].last_file)["steps"])
        return {"steps": steps, "seconds": self.states["fit"]["seconds"]}


@dataclass(frozen=True)
class RecordedStudy:
    """A study's plan, and of every arm by name what came of it: a run for each seed."""

    plan: Json
    arms: dict[str, list[RecordedRun]]

    @property
    def baseline(self) -> str:
        """The baseline's name."""
        return next(arm["name"] for arm in self.plan["arms"] if arm["is_baseline"])

    def done(self, kind: str) -> dict[str, list[RecordedRun]]:
        """Of every arm the runs whose job of this kind is done."""
        return {name: [run for run in runs if run.done(kind)] for name, runs in self.arms.items()}


def read_record(directory: Path) -> RecordedStudy:
    """Read ``plan.json``.

    Raises:
        ValueError: there is none, or it is not of this version.
    """
    path = directory / PLAN
    plan = read_json(path)
    if not isinstance(plan, dict) or plan.get("version") != VERSION:
        raise ValueError(f"{path}: not the plan of a study, version {VERSION}")

    def recorded(run: Json) -> RecordedRun:
        kinds = [kind for kind in ("fit", *MEASURES) if run[kind]]
        return RecordedRun(run["seed"], {kind: JobFolder(directory, kind, run[kind]) for kind in kinds})

    return RecordedStudy(plan, {arm["name"]: [recorded(run) for run in arm["runs"]] for arm in plan["arms"]})
