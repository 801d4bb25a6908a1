"""Drift over seeds."""

import json
from pathlib import Path

import numpy as np
import pytest

from specdec.card.curves import drift
from specdec.card.study import read
from specdec.drift.results import sums_of
from tests.card.made import make_study


def test_chains_that_came_so_far_count_where_another_seed_has_none(tmp_path: Path) -> None:
    """Leaving the prompt out would leave out the hard ones."""
    directory = make_study(tmp_path, {"norm": ["off", "on"]}, prompts=6)
    plan = json.loads((directory / "plan.json").read_text())
    paths = [directory / "measures" / run["drift"] / "drift.json" for run in plan["arms"][0]["runs"]]
    one = json.loads(paths[0].read_text())
    series = one["series"]["state_rms"]
    series["values"][5][2], series["weights"][5][2] = None, 0
    paths[0].write_text(json.dumps(one))
    found = drift(read(directory))["state_rms"]["arms"]["norm=off"][5]
    value, weight = np.stack([sums_of(json.loads(path.read_text()), "state_rms")[5] for path in paths]).sum((0, 1))
    assert found["prompts"] == 6 and found["value"] == pytest.approx(value / weight)
