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


def differing(*labels: str) -> dict[str, Any]:
    rows = [{"name": "no BOS", "drafts_kept": FULL}, {"name": "1 $ and _2", "drafts_kept": None}]
    return {"differences": [{"drafter": label, "less": "a", "conditions": rows} for label in labels]}


@pytest.mark.parametrize(
    ("records", "compared"),
    [
        ([record("a", *ROWS)], None),
        ([record(label, *ROWS) for label in ("$a$", "_b", "c")], differing("_b", "c")),
        ([record("a", ROWS[2])], None),
    ],
)
def test_a_picture_with_something_on_it(
    records: list[dict[str, Any]], compared: dict[str, Any] | None, tmp_path: Path
) -> None:
    plot(records, compared, tmp_path / "figure.png")
    picture = matplotlib.image.imread(tmp_path / "figure.png")
    assert picture.shape[0] > 300 and picture.shape[1] > 1000 and (picture[..., :3] < 0.5).any()
