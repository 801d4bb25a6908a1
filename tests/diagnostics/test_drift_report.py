"""Documents, intervals and the figures made of them, from numbers that can be checked by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.diagnostics import drift_plots
from specdec.diagnostics.calibration import CONFIDENCES, binned, calibration
from specdec.diagnostics.drift import drafter_names, drift_tables
from specdec.diagnostics.drift_figures import (
    drift_figures,
    drift_summary,
    strongest_row,
    sums_of,
)
from specdec.diagnostics.drift_measure import INPUTS, ROWS, SERIES, Document, drift_document
from specdec.diagnostics.waterfall import DOWN, OBSERVED, waterfall
from specdec.report.plots import DOUBLE, PaperFigure
from specdec.report.statistics import POSITIVE, interval
from specdec.report.tables import write_report
from tests.report.drawn import assert_whiskers_inside, texts_in

K, CHAINS, AUX = 3, 4, (0, 3)
NAMES = ["a", "b", "c"]


def sums(rms: list[float], reached: list[int]) -> Tensor:
    """All zero but for the state's RMS and conditional acceptance, of which every chain that is reached but one is."""
    at = {name: row for row, name in enumerate(SERIES)}
    found = torch.zeros(len(SERIES | ROWS), K, 2, dtype=torch.float64)
    found[..., 1] = CHAINS
    found[at["state_rms"], :, 0] = torch.tensor(rms, dtype=torch.float64) * CHAINS
    found[at["conditional_acceptance"], :, 1] = torch.tensor(reached, dtype=torch.float64)
    found[at["conditional_acceptance"], :, 0] = torch.tensor(
        [max(0, n - 1) for n in reached], dtype=torch.float64
    )
    return found


ALL = [sums([1, 2, 4], [4, 3, 2]), sums([2, 2, 2], [4, 1, 0]), sums([3, 5, 6], [4, 3, 2])]


BINS_OF_A_PROMPT = binned(
    torch.linspace(0, 1, 60, dtype=torch.float64).view(-1, K, 1).expand(-1, -1, len(CONFIDENCES)),
    torch.arange(60).view(-1, K) % 3 > 0,
)


def made(all_sums: list[Tensor] = ALL, trained: int | None = 2) -> Document:
    document = drift_document(
        NAMES,
        all_sums,
        [torch.full((len(INPUTS), 5, 2), 1.0 + n) for n in range(3)],
        AUX,
        trained,
        K,
    )
    return document | {"calibration": calibration([BINS_OF_A_PROMPT] * len(NAMES))}


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
    empty = torch.zeros(len(SERIES | ROWS), K, 2, dtype=torch.float64)
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
    # sums over prompts of 6, 9 and 12 at the steps
    assert found["state_rms_late_growth"]["mean"] == pytest.approx(12 / 9)
    assert found["state_rms_rise"]["mean"] == pytest.approx((12 - 9) / 3 / (K - 2))


def test_changes_without_the_first_step_need_three_steps() -> None:
    short = [figure.name for figure in drift_figures(2, None)]
    assert "out_rms_growth" in short
    assert "out_rms_late_growth" not in short and "out_rms_rise" not in short


def test_the_strongest_row_is_that_of_the_highest_mean_at_step_1() -> None:
    row_of_a, row_of_all = 7, 3
    each = [prompt.clone() for prompt in ALL]
    each[0][len(SERIES) + row_of_a, :, 0] = 0.4 * CHAINS
    for sums_FK2 in each:
        sums_FK2[len(SERIES) + row_of_all, 0, 0] = 0.2 * CHAINS
    assert strongest_row(made(each)) == row_of_all
    assert strongest_row(made()) is None


@pytest.mark.parametrize("trained", [2, None])
def test_the_report_and_the_picture(trained: int | None, tmp_path: Path) -> None:
    found = made(trained=trained)
    levels = {name: [[2, 1], [0]] for name in (*DOWN, OBSERVED)}
    found |= {"summary": drift_summary(found), "waterfall": waterfall(levels)}
    found["drafter"] = {"label": "drafter", "directory": "runs/a/drafter"}
    tables = drift_tables(found)
    figures = drift_plots.CAPTIONS.items()
    write_report(tmp_path / "report.md", "Drift", ["About."], figures, tables, {"a": 1})
    text = (tmp_path / "report.md").read_text()
    assert (
        text.count("![") == len(figures)
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


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, PaperFigure]:
    """The figures by file, not written."""
    figures: dict[str, PaperFigure] = {}

    def keep(figure: PaperFigure, path: Path) -> None:
        figures[path.name] = figure

    monkeypatch.setattr(drift_plots, "save_figure", keep)
    return figures


def two_drafters(tmp_path: Path) -> list[Document]:
    """Two drafters; the second gains where the first loses."""
    losing = {"perfect": [[3, 3], [3]], "vocabulary": [[3, 2], [2]], "true_features": [[2, 1], [1]]}
    losing |= {name: [[1, 1], [0]] for name in ("own_features", "own_tokens", "observed")}
    gaining = losing | {"own_tokens": [[2, 1], [1]], "observed": [[2, 1], [1]]}
    drifts = []
    for levels in (losing, gaining):
        drifts.append(made() | {"waterfall": waterfall(levels)})
    return drifts


def test_a_drift_figure_fits_the_page_with_all_intervals_and_no_text_over_another(
    tmp_path: Path, drawn: dict[str, PaperFigure]
) -> None:
    drift_plots.plot_drift(two_drafters(tmp_path), ["first", "second"], tmp_path)
    assert set(drawn) == set(drift_plots.CAPTIONS)
    for name, paper in drawn.items():
        assert paper.figure.get_figwidth() == DOUBLE, name
        boxes = [(text, box) for text, box in texts_in(paper.figure) if text.strip()]
        for index, (text, box) in enumerate(boxes):
            assert paper.figure.bbox.x0 <= box.x0 and box.x1 <= paper.figure.bbox.x1, (name, text)
            for other, other_box in boxes[index + 1 :]:
                assert not box.overlaps(other_box), (name, text, other)
        assert_whiskers_inside(paper.figure)


def test_a_bar_of_the_waterfall_says_its_loss_and_its_level(
    tmp_path: Path, drawn: dict[str, PaperFigure]
) -> None:
    drifts = two_drafters(tmp_path)
    drift_plots.plot_drift(drifts, ["first", "second"], tmp_path)
    paper = drawn["waterfall.png"]
    texts = [text.get_text() for text in paper.axes[0].texts]
    assert "lost 0.67 [-2.51, 3.84], leaves 3.33" in texts
    assert "gained 0.67 [-2.51, 3.84], leaves 2.33" in texts
    levels = [row.value for row in paper.rows if row.series == "first, level"]
    losses = [row.value for row in paper.rows if row.series == "first, loss"]
    assert levels[0] - sum(losses) == pytest.approx(levels[-2])
