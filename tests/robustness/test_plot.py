"""The figure."""

from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from specdec.robustness.plot import plot

FULL, POINT = {"mean": 0.8, "low": 0.6, "high": 0.9}, {"mean": 0.3, "low": None, "high": None}


def row(name: str, group: str, **values: Any) -> dict[str, Any]:
    usual = {"length_kept": FULL, "drafts_kept": FULL, "skipped": None, "acceptance_length": {"mean": 2.5}}
    return {"name": name, "title": name, "group": group, **usual, **values}


def record(label: str, *rows: dict[str, Any]) -> dict[str, Any]:
    return {"drafter": {"label": label}, "conditions": [row("clean", "clean"), *rows]}


ROWS = [
    row("no BOS", "template"),
    row("1 $ and _2", "noise", length_kept=POINT, drafts_kept=None),
    row("none", "noise", skipped="why not", length_kept=None, drafts_kept=None),
]


@pytest.mark.parametrize(
    "records", [[record("a", *ROWS)], [record(label, *ROWS) for label in "abc"], [record("a", ROWS[2])]]
)
def test_a_picture_with_something_on_it(records: list[dict[str, Any]], tmp_path: Path) -> None:
    plot(records, tmp_path / "figure.png")
    picture = matplotlib.image.imread(tmp_path / "figure.png")
    assert picture.shape[0] > 300 and picture.shape[1] > 1000 and (picture[..., :3] < 0.5).any()
