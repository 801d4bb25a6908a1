"""Several drafters measured side by side: their names, and what is told of each."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec.evaluation.pair import Pair
from specdec.files import read_json


def labelled(directories: Sequence[str], labels: Sequence[str]) -> list[str]:
    """A name for every drafter: those given, or the shortest ends of their directories that differ.

    Raises:
        ValueError: names or directories that are not as many, not different, or no names of folders.
    """
    if labels:
        if len(labels) != len(directories) or len(set(labels)) < len(labels):
            raise ValueError(f"--labels: {len(labels)} names for {len(directories)} drafters: give each one of its own")
        if wrong := [label for label in labels if not label or label.strip(".") == "" or "/" in label]:
            raise ValueError(f"--labels {wrong[0]!r}: a folder is named so: give a name without a slash")
        return list(labels)
    parts = [Path(directory).resolve().parts[1:] for directory in directories]
    for length in range(1, max(map(len, parts)) + 1):
        ends = ["-".join(one[-length:]) for one in parts]
        if len(set(ends)) == len(ends):
            return ends
    raise ValueError("--drafter: one directory is given twice")


def told(label: str, directory: str, pair: Pair) -> dict[str, Any]:
    """Which drafter a result is of."""
    return {
        "label": label,
        "directory": directory,
        "weights_sha256": read_json(Path(directory) / "config.json")["weights_sha256"],
        "made_for_this_target": pair.made_for_each_other,
        **pair.drafter.config.to_json(),
    }
