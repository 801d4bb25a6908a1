"""Documents, intervals and the figures made of them, from numbers that can be checked by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib import image
from torch import Tensor

from specdec.diagnostics.drift import drafter_names, drift_tables, plot_drift
from specdec.diagnostics.drift_measure import (
    INPUTS,
    SERIES,
    Document,
    drift_document,
    drift_figures,
    drift_summary,
    sums_of,
)
from specdec.diagnostics.waterfall import DOWN, OBSERVED, waterfall
from specdec.report.statistics import POSITIVE, interval
from specdec.report.tables import write_report

K, CHAINS, AUX = 3, 4, (0, 3)
NAMES = ["a", "b", "c"]


def sums(rms: list[float], reached: list[int]) -> Tensor:
    """All zero but for the state's RMS and conditional acceptance, of which every chain that is reached but one is."""
    at = {name: row for row, name in enumerate(SERIES)}
    found = torch.zeros(len(SERIES), K, 2, dtype=torch.float64)
    found[..., 1] = CHAINS
    found[at["state_rms"], :, 0] = torch.tensor(rms, dtype=torch.float64) * CHAINS
    found[at["conditional_acceptance"], :, 1] = torch.tensor(reached, dtype=torch.float64)
    found[at["conditional_acceptance"], :, 0] = torch.tensor(
        [max(0, n - 1) for n in reached], dtype=torch.float64
    )
    return found


ALL = [sums([1, 2, 4], [4, 3, 2]), sums([2, 2, 2], [4, 1, 0]), sums([3, 5, 6], [4, 3, 2])]


def made(all_sums: list[Tensor] = ALL, trained: int | None = 2) -> Document:
    return drift_document(
        NAMES,
        all_sums,
        [torch.full((len(INPUTS), 5, 2), 1.0 + n) for n in range(3)],
        AUX,
        trained,
        K,
    )


def test_every_prompts_values_are_kept() -> None:
    found = made()
    assert found["prompts"] == NAMES and found["chains"] == [CHAINS] * 3 and found["depths"] == K
    state = found["series"]["state_rms"]
    assert state["values"] == [[1, 2, 3], [2, 2, 5], [4, 2, 6]] and state["mean"] == pytest.approx(
        [2, 3, 4]
    )
    acceptance = found["series"]["conditional_acceptance"]
    assert acceptance["values"] == [[0.75] * 3, [2 / 3, 0, 2 / 3], [0.5, None, 0.5]]
    assert acceptance["weights"] == [[4, 4, 4], [3, 1, 3], [2, 0, 2]]
    assert acceptance["mean"] == pytest.approx([9 / 12, 4 / 7, 2 / 4])
    wanted = interval(np.array([[1.0, 1], [2, 1], [3, 1]]) * CHAINS, bounds=POSITIVE)
    assert wanted is not None and (state["low"][0], state["high"][0]) == (wanted.low, wanted.high)
    inputs = found["inputs"]
    assert inputs["places"] == [
        "embeddings",
        "layer 3",
        "states side by side",
        "the same, normed",
        "feature",
    ]
    assert list(inputs["series"]) == list(INPUTS) and len(inputs["series"]["sink_rms"]["mean"]) == 5
    again = sums_of(json.loads(json.dumps(found, allow_nan=False)), "conditional_acceptance")
    assert again[..., 0].tolist() == [[3, 3, 3], [2, 0, 2], [1, 0, 1]]
    empty = torch.zeros(len(SERIES), K, 2, dtype=torch.float64)
    without = made([ALL[0], empty, ALL[2]])
    assert without["prompts"] == ["a", "c"] and without["series"]["state_rms"][
        "mean"
    ] == pytest.approx([2, 3.5, 5])
    with pytest.raises(ValueError, match="no answer of the target is long enough"):
        made([empty] * 3)


def test_the_drift_summary() -> None:
    found = drift_summary(made())
    assert found["state_rms_growth"]["mean"] == pytest.approx(12 / 6)
    assert found["state_rms_growth"]["low"] <= 2 <= found["state_rms_growth"]["high"]
    assert found["acceptance_change"]["mean"] == pytest.approx(2 / 4 - 13 / 19)
    assert found["acceptance"]["mean"] == pytest.approx(15 / 23)
    assert found["acceptance_beyond"]["mean"] == pytest.approx(2 / 4)
    # where a share ends
    assert found["acceptance_beyond"]["high"] <= 1 and found["acceptance"]["high"] <= 1
    wide = drift_summary(made([sums([1, 1, 9], [4, 4, 4]), sums([9, 9, 1], [4, 1, 1]), ALL[2]]))
    assert wide["state_rms_growth"]["low"] == 0 and wide["acceptance_beyond"]["high"] == 1
    assert [one.name for one in drift_figures(K, None)][-1] == "acceptance"
    assert "acceptance_change" not in drift_summary(made(trained=3))


@pytest.mark.parametrize("trained", [2, None])
def test_the_report_and_the_picture(trained: int | None, tmp_path: Path) -> None:
    found = made(trained=trained)
    levels = {name: [[2, 1], [0]] for name in (*DOWN, OBSERVED)}
    found |= {"summary": drift_summary(found), "waterfall": waterfall(levels)}
    found["drafter"] = {"label": "drafter", "directory": "runs/a/drafter"}
    tables = drift_tables(found)
    write_report(tmp_path / "report.md", "Drift", ["About."], "drift.png", tables, {"a": 1})
    text = (tmp_path / "report.md").read_text()
    assert (
        text.count("![") == 1
        and f"trained depth {trained or 'unknown'}" in text
        and "| a | 1 |" in text
    )
    assert f"| 1 | 2 | {'3*' if trained else '3'} |" in text and "| layer 3 |" in text
    rows = dict(tables[1].rows)
    assert rows["RMS of the state fed back, step 3 over step 1"].startswith("2.00 [")
    assert drafter_names([found]) == ["drafter"]
    other = found | {"drafter": {"label": "drafter", "directory": "runs/b/drafter"}}
    # labels that are alike tell nothing
    assert drafter_names([found, other]) == ["runs/a/drafter", "runs/b/drafter"]
    plot_drift([found, other], tmp_path / "drift.png")
    assert image.imread(tmp_path / "drift.png").shape[1] > 1000
