"""What one run of a study has left: the state of its jobs, and the files of its measures."""

import functools
from dataclasses import dataclass
from typing import Any

from specdec.diagnostics.drift_measure import VERSION as OF_DRIFT
from specdec.evaluation.compare import SavedEvaluation, read_evaluation
from specdec.studies.worker import JobFolder
from specdec.utils.reading import check_sums, read_json

Json = dict[str, Any]

MEASUREMENT = {"drift": OF_DRIFT, "robustness": 1}  # the versions of drift.json and robustness.json


@dataclass(frozen=True)
class RecordedRun:
    """An arm with one seed, and by kind the folders of its jobs."""

    seed: int
    folders: dict[str, JobFolder]

    @functools.cached_property
    def states(self) -> dict[str, Json]:
        """Each job's state: ``name`` (``done``, ``running``, ``stopped``, ``killed``, ``failed`` or ``not begun``),
        ``message`` (why it failed) and ``seconds`` of all its attempts.
        """
        states = {}
        for kind, folder in self.folders.items():
            attempts = folder.attempts()
            last = attempts[-1] if attempts else {"end": "not begun"}
            name = last.get("end") or ("running" if folder.is_held() else "killed")
            if folder.is_done():
                name = "done"
                last = {}
            elif name in ("died", "done"):  # or whose file was removed
                name = "failed"
            seconds = sum(attempt.get("seconds") or 0.0 for attempt in attempts)
            states[kind] = {"name": name, "message": last.get("message"), "seconds": seconds}
        return states

    def done(self, kind: str) -> bool:
        """Whether there is a job of this kind and it is done."""
        return kind in self.folders and self.folders[kind].is_done()

    @functools.cached_property
    def evaluation(self) -> SavedEvaluation:
        """The results of its evaluation."""
        return read_evaluation(self.folders["evaluate"].output)

    def measured(self, kind: str) -> Json:
        """``drift.json`` or ``robustness.json``; ValueError if it is of another version."""
        path = self.folders[kind].last_file
        check_sums(path.parent, "measure again", partial=True)
        measurement = read_json(path)
        if not isinstance(measurement, dict) or measurement.get("version") != MEASUREMENT[kind]:
            raise ValueError(
                f"{path}: not of version {MEASUREMENT[kind]}: measure again with this version of specdec"
            )
        return measurement

    def training(self) -> Json:
        """Optimizer steps and seconds of a finished fit, its process's start included."""
        return {
            "steps": int(read_json(self.folders["fit"].last_file)["steps"]),
            "seconds": self.states["fit"]["seconds"],
        }
