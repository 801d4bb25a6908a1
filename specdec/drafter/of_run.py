"""Whether a drafter in a training run's directory is that run's own: both say which run it was."""

from pathlib import Path

from specdec.utils.reading import read_json

RUN = "run"  # a key of a run's record, and of its drafters' config.json
RECORD = "provenance.json"
FOLDERS = ("drafter", "drafter_best")


def run_of_record(directory: Path) -> str | None:
    """Return which run a directory is of; None if it has no record of a training run."""
    record = directory / RECORD
    facts = read_json(record) if record.is_file() else None
    run = facts.get(RUN) if isinstance(facts, dict) else None
    return run if isinstance(run, str) else None


def check_of_run(directory: Path, remedy: str = "move it out of that run") -> None:
    """Compare which run a drafter is of with that in whose directory it lies.

    Raises:
        ValueError: they differ: the record of the training next to it is another drafter's.
    """
    place = directory.resolve()
    if place.name not in FOLDERS:
        return
    run = run_of_record(place.parent)
    stored = read_json(place / "config.json")
    if run is not None and (not isinstance(stored, dict) or stored.get(RUN) != run):
        raise ValueError(
            f"{directory}: not the drafter that the run in {place.parent} trained, though it lies there: {remedy}"
        )
