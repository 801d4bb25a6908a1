"""The card of a made study: what is in it, and what is never overwritten."""

import csv
import html.parser
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from specdec.card import write
from specdec.card.figures import draw, page
from specdec.card.render import latex, tex
from specdec.card.results import results
from specdec.card.study import read
from specdec.card.words import cautions
from specdec.cli import main
from specdec.shared import lock_now
from tests.card.made import GROWTHS, arms_of, make_study

WORTH = {"norm=on": 0.08, "K=4": 0.03}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two axes of two levels, three seeds; the last arm's fit failed with one seed, and its measures never began."""
    directory = make_study(tmp_path_factory.mktemp("study"), worth=WORTH, prompts=10)
    plan = json.loads((directory / "plan.json").read_text())
    keys = plan["arms"][-1]["runs"][2]
    shutil.rmtree(directory / "fits" / keys["fit"])
    (directory / "jobs" / keys["fit"] / "state.json").write_text('{"state": "failed", "message": "no <memory> left"}')
    for kind in ("evaluate", "drift", "robustness"):
        shutil.rmtree(directory / "measures" / keys[kind])
        (directory / "jobs" / keys[kind] / "state.json").unlink()
    return directory


@pytest.fixture(scope="module")
def card(study: Path) -> Path:
    return write(study)


def copied(study: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(study, tmp_path / "copy"))


def numbers(card: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((card / "card.json").read_text())
    return found


def test_all_five_forms_and_the_figures_are_there(card: Path) -> None:
    names = {path.name for path in card.iterdir()}
    assert names == {"card.md", "card.json", "card.csv", "card.tex", "card.html", "figures", "SHA256SUMS"}
    figures = {path.name for path in (card / "figures").glob("*.png")}
    assert figures == {
        "acceptance_length.png", "differences.png", "positions_1.png", "positions_2.png", "speedup.png", "outcomes.png",
        "drift.png", "robustness.png", "losses.png",
    }  # fmt: skip
    markdown = (card / "card.md").read_text()
    assert all(f"](figures/{name})" in markdown for name in figures)


def test_numbers_are_those_of_the_answers(card: Path, study: Path) -> None:
    found = numbers(card)
    one = found["growths"][GROWTHS[0]]["arms"]["norm=off K=1"]
    plan = json.loads((study / "plan.json").read_text())
    keys = [run["evaluate"] for run in plan["arms"][0]["runs"]]
    texts = [(study / "measures" / key / "answers.jsonl").read_text() for key in keys]
    rows = [json.loads(line) for text in texts for line in text.splitlines()]
    accepted = [count for row in rows if row["growth"] == GROWTHS[0] for count in row["accepted"]]
    assert one["acceptance_length"]["value"] == pytest.approx(1 + sum(accepted) / len(accepted))
    assert one["acceptance_length"]["low"] < one["acceptance_length"]["value"] < one["acceptance_length"]["high"]
    assert one["acceptance_length"]["seeds"] == 3 and one["acceptance_length"]["prompts"] == 10
    row = found["comparisons"][1]
    assert (row["arm"], row["growth"]) == ("norm=on K=1", GROWTHS[0])
    assert row["value"] == pytest.approx(row["b"] - row["a"]) and row["p_value"] <= row["p_holm"]
    assert {effect["effect"] for effect in found["effects"]} == {"norm=on", "K=4", "norm=on x K=4"}
    beyond = one["beyond"]
    assert beyond["trained_depth"] == 1 and beyond["difference"]["p_value"] is not None
    fit = found["training"]["norm=off K=1"]["0"]
    assert fit["tokens"] == 40 * 2 * 4 * 32 and fit["parameters"] == 200 + 80 + 12
    assert fit["trained_parameters"] == 92 and fit["peak_memory_bytes"] == 138_000_000


def test_drift_is_the_mean_over_chains_of_the_prompts_that_came_so_deep(card: Path, study: Path) -> None:
    found, arm = numbers(card)["drift"]["kl"]["arms"]["norm=off K=1"], read(study).arms[0]
    series = [run.measured("drift")["series"]["kl"] for run in arm.runs]
    for depth, first in ((0, 0), (5, 1)):
        pairs = [
            pair for one in series for pair in zip(one["values"][depth], one["weights"][depth], strict=True) if pair[1]
        ]
        mean = sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
        assert found[depth]["value"] == pytest.approx(mean) and found[depth]["prompts"] == 10 - first


def test_what_failed_is_shown_and_the_rest_compared(card: Path) -> None:
    found, text = numbers(card), (card / "card.md").read_text()
    assert "2 of 3 done (failed, not begun)" in text
    assert "seed 2: fit failed: no &lt;memory> left" in text
    assert "| &lt; 0.001 |" in text
    rows = [row for row in found["comparisons"] if row["arm"] == "norm=on K=4"]
    assert [row["common_seeds"] for row in rows] == [[0, 1]] * len(GROWTHS)
    assert all(effect["seeds"] == 2 for effect in found["effects"])
    assert "no &lt;memory&gt; left" in (card / "card.html").read_text()


def test_a_job_runs_while_its_lock_is_held(study: Path, tmp_path: Path) -> None:
    own = copied(study, tmp_path)
    key = read(own).arms[-1].runs[2].keys["evaluate"]
    folder = own / "jobs" / str(key)
    (folder / "state.json").write_text('{"state": "running"}')

    def name() -> str:
        return read(own).arms[-1].runs[2].states["evaluate"].name

    assert name() == "killed"
    with (folder / "lock").open("w") as stream:
        assert lock_now(stream) and name() == "running"
    assert name() == "killed"


def test_a_fraction_without_effects_says_why(card: Path) -> None:
    found = numbers(card)
    found["study"]["design"] = "fractional"
    assert not any("fraction" in line for line in cautions(found))
    found["effects"] = [row for row in found["effects"] if row["growth"] != GROWTHS[0]]
    told = f"{GROWTHS[0]}: arms of the fraction are missing, without which no effect can be told."
    assert told in cautions(found)


def test_the_page_asks_for_nothing_outside(card: Path) -> None:
    text = (card / "card.html").read_text()
    bare = re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "", text)
    assert not re.search(r"https?:|//[a-z]|@import|<script|<link|url\(", bare)

    class Reader(html.parser.HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []
            self.sources: list[str] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
            if tag not in ("meta", "img"):
                self.open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.open.pop() == tag

    reader = Reader()
    reader.feed(text)
    assert not reader.open
    assert len(reader.sources) == 9 and all(source.startswith("data:image/png;base64,") for source in reader.sources)


def test_the_csv_has_a_row_for_each_arm_growth_and_metric(card: Path) -> None:
    rows = list(csv.DictReader((card / "card.csv").read_text().splitlines()))
    assert len({(row["arm"], row["growth"], row["metric"], row["at"]) for row in rows}) == len(rows)
    lengths = [row for row in rows if row["metric"] == "acceptance_length"]
    assert len(lengths) == 4 * len(GROWTHS) and all(float(row["low"]) < float(row["value"]) for row in lengths)
    metrics = {row["metric"] for row in rows}
    assert {"difference", "interaction", "drift_state_rms", "robustness_kept", "training_seconds"} <= metrics


def test_latex_is_escaped(card: Path) -> None:
    found = numbers(card)
    found["study"]["name"] = "50%_of & $x^2 {#1} \\end"
    text = latex(found)
    assert "50\\%\\_of \\& \\$x\\textasciicircum{}2 \\{\\#1\\} \\textbackslash{}end" in text
    body = text[text.index("\\midrule") : text.index("\\bottomrule")]
    assert body.count("\\\\\n") == 1 + 4 * len(GROWTHS) - 1
    assert all(line.count(" & ") == 4 for line in body.splitlines()[1:])
    assert not re.search(r"(?<!\\)[_%#]", body)
    assert tex("a~b<c") == "a\\textasciitilde{}b\\textless{}c"


def test_a_card_is_written_again_only_for_a_reason(
    study: Path, card: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    own = copied(study, tmp_path)
    before = (own / "card" / "card.json").stat().st_mtime_ns
    assert main(["card", str(own)]) == 0
    assert capsys.readouterr().out == f"{own / 'card' / 'card.html'}\n"
    assert (own / "card" / "card.json").stat().st_mtime_ns == before
    plan = json.loads((own / "plan.json").read_text())
    shutil.rmtree(own / "measures" / plan["arms"][2]["runs"][0]["drift"])  # something changed
    (own / "card" / "card.md").write_text("my own remarks")
    assert main(["card", str(own)]) == 2
    assert "card.md: its SHA-256 is not that" in capsys.readouterr().err
    assert (own / "card" / "card.md").read_text() == "my own remarks"
    assert main(["card", str(own), "--force", "--detect", "0.2"]) == 0
    found = numbers(own / "card")
    assert found["statistics"]["detect"] == 0.2
    assert not (own / "card" / "card.md").read_text().startswith("my own")


def test_another_directory_is_not_taken_for_a_card(study: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.md").write_text("work")
    with pytest.raises(ValueError, match="is no card"):
        write(study, tmp_path)
    with pytest.raises(ValueError, match=r"plan\.json: no such file"):
        write(tmp_path)


def test_a_study_of_which_nothing_is_done_has_a_card(tmp_path: Path) -> None:
    directory = make_study(tmp_path / "study", {"norm": ["off", "on"]}, seeds=[0], curves=False)
    shutil.rmtree(directory / "fits")
    shutil.rmtree(directory / "measures")
    text = (write(directory) / "card.md").read_text()
    assert "No comparison could be made." in text and "norm=on is not compared: no evaluation of it is done." in text


def test_evaluations_of_other_prompts_are_refused(study: Path, tmp_path: Path) -> None:
    own = copied(study, tmp_path)
    place = next((own / "measures").glob("e1-*")) / "metrics.json"
    place.write_text(place.read_text().replace('"prompts_sha256": "ab"', '"prompts_sha256": "cd"'))
    with pytest.raises(ValueError, match="differ in their prompts"):
        results(read(own), 0.1)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """The figures, not written."""
    kept: dict[str, Figure] = {}

    def keep(figure: Figure, path: Path) -> None:
        kept[path.name] = figure

    for name in ("page", "positions", "series", "columns"):
        monkeypatch.setattr(f"specdec.card.figures.{name}.save", keep)
    return kept


@pytest.mark.parametrize("arms", [2, page.MOST_TOGETHER + 1])
def test_no_text_runs_over_another_or_off_the_page(tmp_path: Path, drawn: dict[str, Figure], arms: int) -> None:
    axes = {"recurrence": ["PreNorm", "PostNorm"], "a_long_name_of_an_axis": ["0", "1"], "loss": ["LKLambda", "SoftKL"]}
    own = arms_of(axes)[:arms]
    directory = make_study(tmp_path, axes, arms=own, seeds=[0, 1], prompts=5, growths=GROWTHS[1:])
    draw(results(read(directory), 0.1), tmp_path)
    assert len(drawn) == 8
    rows = {axes.get_subplotspec().get_gridspec().nrows for axes in drawn["drift.png"].axes}
    assert rows == ({4} if arms > page.MOST_TOGETHER else {2})
    for name, figure in drawn.items():
        boxes = [(text, box) for text, box in _texts(figure) if text.strip()]
        assert boxes, name
        for index, (text, box) in enumerate(boxes):
            assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, (name, text)
            assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, (name, text)
            for other, other_box in boxes[index + 1 :]:
                assert not box.overlaps(other_box), (name, text, other)


def _texts(figure: Figure) -> list[tuple[str, Any]]:
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    texts = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        if not axes.get_visible():
            continue
        assert axes.get_title() or len(figure.axes) == 1
        texts += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks():
                if low <= tick.get_loc() <= high:
                    texts += [label for label in (tick.label1, tick.label2) if label.get_visible()]
    return [(text.get_text(), text.get_window_extent(renderer)) for text in texts]
