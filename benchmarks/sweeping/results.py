"""What the jobs of a sweep made, compared bit by bit with what another sweep's made."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specdec.files import sha256
from specdec.sweep.job import Job

LOSS = "train/loss"
COUNTS = ("prompt_id", "growth", "tokens", "accepted", "drafted", "context", "plain_tokens", "identical")


class Compared(NamedTuple):
    """Two sweeps beside each other."""

    name: str
    weights: int
    """Drafters whose files are equal, of the fits."""
    fits: int
    losses: int
    """Compared: of every step that a log has, once for every log that has it."""
    differing: int
    """Losses that differ, or that no log has."""
    answers: int
    """Evaluations whose tokens and accepted drafts are equal, pass by pass."""
    evaluations: int

    @property
    def holds(self) -> bool:
        """Whether nothing differs."""
        return self.weights == self.fits and self.differing == 0 < self.losses and self.answers == self.evaluations


def compare(name: str, jobs: Sequence[Job], whole: Path, other: Path) -> Compared:
    """Compare what the same jobs made in two studies."""
    fits = [job for job in jobs if job.kind == "fit"]
    measures = [job for job in jobs if job.kind == "evaluate"]
    weights = losses = differing = 0
    for job in fits:
        one, two = whole / job.directory, other / job.directory
        weights += sha256(_weights(one)) == sha256(_weights(two))
        expected, found = dict(_losses(one)), _losses(two)
        losses += len(found)
        differing += sum(expected.get(step) != loss for step, loss in found)
        differing += len(set(expected) - {step for step, _ in found})
    answers = sum(_answers(whole / job.directory) == _answers(other / job.directory) for job in measures)
    return Compared(name, weights, len(fits), losses, differing, answers, len(measures))


def _weights(run: Path) -> Path:
    return run / "drafter" / "model.safetensors"


def _losses(run: Path) -> list[tuple[int, str]]:
    """Steps and losses as they were written, of all logs of a run: there is one for every time it was begun."""
    found = []
    for path in sorted((run / "csv").glob("version_*/metrics.csv")):
        with path.open() as stream:
            found += [(int(row["step"]), row[LOSS]) for row in csv.DictReader(stream) if row.get(LOSS)]
    return found


def _answers(directory: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (directory / "answers.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in COUNTS} for row in rows]
