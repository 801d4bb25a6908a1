"""The card of a made study: its numbers, and what is in it."""

import csv
import html.parser
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from specdec.cli import main
from specdec.report.plots import PaperFigure, figure_files
from specdec.studies import figures
from specdec.studies.card import write_card
from specdec.studies.outcomes import ACCEPTANCE
from specdec.studies.results import read_record, results
from specdec.utils.locks import lock_now
from tests.report.drawn import assert_whiskers_inside, texts_in
from tests.studies.made import SHAPES, arms_of, attempt, lose, make_study

DRAWN = {
    "primary.png",
    "acceptance.png",
    "drift.png",
    "robustness.png",
    "positions.png",
    "steps.png",
}
FILES = {file for name in DRAWN for file in figure_files(name)}
WORTH = {"norm=on": 0.08, "K=4": 0.03}
PRIMARY = [
    {"outcome": f"acceptance_length.{SHAPES[1]}", "effect": {"norm": "on"}, "against": {"norm": "off"},
     "at": {"K": ["1"]}, "expect": "higher"},
    {"outcome": "kept.typos", "effect": {"K": "4"}, "against": {"K": "1"}, "at": {"norm": ["off"]}, "expect": None},
]  # fmt: skip


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two axes of two levels, three seeds; the last arm's fit failed with one seed, and its measures never began."""
    directory = make_study(
        tmp_path_factory.mktemp("study"), worth=WORTH, prompts=10, primary=PRIMARY
    )
    run = json.loads((directory / "plan.json").read_text())["arms"][-1]["runs"][2]
    for kind in ("fit", "evaluate", "drift", "robustness"):
        lose(directory, run, kind)
    attempt(directory, run["fit"], end="failed", seconds=1.0, message="no <memory> left")
    return directory


@pytest.fixture(scope="module")
def card(study: Path) -> Path:
    return write_card(study)


def copied(study: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(study, tmp_path / "copy"))


def numbers(card: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((card / "card.json").read_text())
    return found


def test_all_forms_and_the_figures_are_there(card: Path) -> None:
    names = {path.name for path in card.iterdir()}
    assert names == {"card.md", "card.json", "card.html", "data.parquet", "SHA256SUMS", *FILES}
    markdown = (card / "card.md").read_text()
    assert all(f"]({name})" in markdown for name in DRAWN)


def test_what_failed_is_shown_and_the_rest_compared(card: Path) -> None:
    found, text = numbers(card), (card / "card.md").read_text()
    assert "2 of 3 done (failed, not begun)" in text
    assert "seed 2: fit failed: no &lt;memory> left" in text
    assert "| &lt; 0.001 |" in text
    rows = [row for row in found["comparisons"] if row["arm"] == "norm=on K=4"]
    assert rows and all(
        row["seeds"] == 2 for row in (*rows, *found["effects"]) if row["family"] != "drift"
    )
    assert "no &lt;memory&gt; left" in (card / "card.html").read_text()


def test_a_job_runs_while_its_lock_is_held(study: Path, tmp_path: Path) -> None:
    own = copied(study, tmp_path)
    key = list(read_record(own).arms.values())[-1][2].folders["evaluate"].path.name
    attempt(own, key)

    def name() -> str:
        return list(read_record(own).arms.values())[-1][2].states["evaluate"]["name"]

    assert name() == "killed"
    with (own / "jobs" / key / "attempts.jsonl").open("rb") as stream:
        assert lock_now(stream) and name() == "running"
    assert name() == "killed"


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
            assert tag == "img" or self.open.pop() == tag

    reader = Reader()
    reader.feed(text)
    assert not reader.open
    links = [source[1:] for source in reader.sources if source.startswith("#")]
    assert links and all(f'<h2 id="{link}">' in text for link in links)
    rest = [source for source in reader.sources if not source.startswith("#")]
    assert len(rest) == len(DRAWN) and all(
        source.startswith("data:image/png;base64,") for source in rest
    )


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards have no figures."""
    monkeypatch.setattr("specdec.studies.card.draw_figures", lambda card, folder: {})


@pytest.mark.usefixtures("undrawn")
def test_the_card_alone(
    study: Path, card: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = copied(study, tmp_path)
    (own / "study.yaml").write_text("name: made\naxes: {norm: {off: {}, on: {}}}\n")
    before = (own / "card" / "card.json").stat().st_mtime_ns
    for given in ([str(own)], [str(own / "study.yaml"), "--out", str(own)]):
        assert main(["sweep", *given, "--card_only"]) == 0
        assert before < (before := (own / "card" / "card.json").stat().st_mtime_ns)
    (own / "plan.json").unlink()
    assert main(["sweep", str(own), "--card_only"]) == 2
    assert "plan.json: no such file" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "level",
    [
        "![x](http://evil/x.png)", "[x](javascript:alert(1))", "[x](http://evil/)", "<img/src=x>", "<http://evil/>",
        "\x1b[31mx", "a|b", "```", "\n```\n<b>x</b>\n[x](http://evil/)\n",
    ],
)  # fmt: skip
def test_a_level_of_any_name_is_shown_and_not_obeyed(level: str, tmp_path: Path) -> None:
    directory = make_study(tmp_path / "study", {"norm": ["off", level]}, seeds=[0], curves=False)
    place = write_card(directory)
    text = (place / "card.md").read_text()
    page = re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "", (place / "card.html").read_text())
    outside_code, code = re.split(r"^```$", text, flags=re.MULTILINE)[:2]
    assert code.startswith("\nspecdec sweep ") and text.count("\n```\n") == 2
    assert not re.search(r"\]\((http|javascript)|\]\(x|<(img|b|http)|\x1b", outside_code)
    sources = re.findall(r"(?:src|href)=\"([^\"]*)\"", page)
    assert all(source == "" or source.startswith("#") for source in sources)
    assert not re.search(r"<(b>|img/src|http)", page) and "\x1b" not in page


@pytest.mark.usefixtures("undrawn")
def test_a_study_of_which_nothing_is_done_has_a_card(tmp_path: Path) -> None:
    directory = make_study(tmp_path / "study", {"norm": ["off", "on"]}, seeds=[0], curves=False)
    shutil.rmtree(directory / "fits")
    shutil.rmtree(directory / "measures")
    text = (write_card(directory) / "card.md").read_text()
    assert (
        "No comparison could be made." in text and "norm=on is not compared: nothing of it" in text
    )
    assert "The study declares no primary contrasts: everything here is exploratory." in text


@pytest.mark.usefixtures("undrawn")
def test_a_fit_of_another_study_has_no_seconds_here(tmp_path: Path) -> None:
    directory = make_study(tmp_path / "study", {"norm": ["off", "on"]}, seeds=[0], curves=False)
    run = json.loads((directory / "plan.json").read_text())["arms"][0]["runs"][0]
    (directory / "jobs" / run["fit"] / "attempts.jsonl").unlink()
    training = (write_card(directory) / "card.md").read_text().partition("## Training")[2]
    assert training.count("in another study") == 1


@pytest.mark.usefixtures("undrawn")
def test_a_study_of_robustness_alone_compares_its_arms_and_tells_of_loops(tmp_path: Path) -> None:
    directory = make_study(tmp_path / "study", {"norm": ["off", "on"]}, seeds=[0])
    runs = [arm["runs"][0] for arm in json.loads((directory / "plan.json").read_text())["arms"]]
    for run in runs:
        lose(directory, run, "evaluate")
    place = directory / "measures" / runs[0]["robustness"] / "robustness.json"
    found = json.loads(place.read_text())
    lengths = {
        "acceptance_length": {"mean": 3.0},
        "acceptance_length_without_looping": {"mean": 2.0},
    }
    found["conditions"][1] |= {"looping_answers": 2, "looping_share": 0.5, **lengths}
    place.write_text(json.dumps(found))
    text = (write_card(directory) / "card.md").read_text()
    assert "is not compared" not in text
    assert (
        f"norm=off, {found['conditions'][1]['name']}: 50% of the answers repeat themselves" in text
    )


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, PaperFigure]:
    """The figures, not written."""
    kept: dict[str, PaperFigure] = {}

    def keep(figure: PaperFigure, path: Path) -> None:
        kept[path.name] = figure

    monkeypatch.setattr(figures, "save_figure", keep)
    return kept


def test_what_is_declared_at_a_draft_step_is_drawn_by_step(
    card: Path, tmp_path: Path, drawn: dict[str, PaperFigure]
) -> None:
    found = numbers(card) | {"quantities": []}
    title = next(curve["title"] for curve in found["curves"] if curve["axis"] == "draft step")
    for quantity, drawn in (
        (f"{title}, step 3", True),
        (f"{title} of another kind, step 3", False),
    ):
        declared = found | {"primary": [found["primary"][0] | {"quantity": quantity}]}
        files = [file for file, _ in figures.draw_figures(declared, tmp_path)["Primary contrasts"]]
        assert files == ["primary.png", *(["primary_steps.png"] if drawn else [])]


def test_pale_is_what_is_not_significant_and_nothing_else(
    card: Path, tmp_path: Path, drawn: dict[str, PaperFigure]
) -> None:
    figures.draw_figures(numbers(card), tmp_path)
    alphas = {
        name: {line.get_alpha() for axes in paper.axes for line in axes.lines} - {None, 1.0}
        for name, paper in drawn.items()
    }
    assert alphas == {name: set() for name in DRAWN} | {"primary.png": {figures.PALE}}
    verdicts = [row.series for row in drawn["primary.png"].rows]
    assert sorted(verdicts) == ["higher", "not significant"]


def test_an_arms_interval_that_is_wider_than_all_arms_lie_apart_stays_in_the_panel(
    card: Path, tmp_path: Path, drawn: dict[str, PaperFigure]
) -> None:
    content = numbers(card)
    (quantity,) = [row for row in content["quantities"] if row["name"].endswith(SHAPES[1])]
    for number, row in enumerate(quantity["arms"].values()):
        row |= {"value": 1.18 - number / 1000, "low": 1.09, "high": 1.27, "by_seed": {"0": 1.18}}
    figures.draw_figures(content, tmp_path)
    (axes, *_) = drawn["acceptance.png"].axes
    assert axes.get_xlim()[0] < 1.09 and axes.get_xlim()[1] > 1.27
    assert not any(line.get_alpha() for line in axes.lines)


def test_a_share_of_a_card_has_an_interval_between_0_and_1(tmp_path: Path) -> None:
    """Few passes come to position 5, so that an interval is cut at 1."""
    outcome = {
        **PRIMARY[0],
        "outcome": "accepted_at_5",
        "effect": {"K": "4"},
        "against": {"K": "1"},
    }
    given = {"seeds": [0, 1], "prompts": 3, "shapes": SHAPES[:1], "primary": [outcome | {"at": {}}]}
    directory = make_study(tmp_path, {"K": ["1", "4"]}, curves=False, **given)
    content = results(read_record(directory))
    (share,) = [row for row in content["quantities"] if row["unit"].startswith("share")]
    rows = share["arms"].values()
    assert rows and all(0 <= row["low"] <= row["value"] <= row["high"] <= 1 for row in rows)
    assert 1 in [row["high"] for row in rows]


def test_the_table_of_a_figure_lists_the_cards_numbers(card: Path) -> None:
    with (card / "acceptance.csv").open(newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["series"] == "all seeds"]
    quantities = [row for row in numbers(card)["quantities"] if row["family"] == ACCEPTANCE]
    written = [(row["panel"], row["x"], float(row["low"]), float(row["high"])) for row in rows]
    assert sorted(written) == sorted(
        (quantity["panel"], arm, row["low"], row["high"])
        for quantity in quantities
        for arm, row in quantity["arms"].items()
    )


def test_primary_contrasts_come_first_and_what_is_not_told_apart_is_one_table(card: Path) -> None:
    found, text = numbers(card), (card / "card.md").read_text()
    parts = dict(part.partition("\n")[::2] for part in text.split("\n## ")[1:])
    assert next(iter(parts)) == "Primary contrasts" and "](#not-significant)" in text
    assert (
        f"| acceptance length, {SHAPES[1]} | norm: on - off (K=1) | +" in parts["Primary contrasts"]
    )
    assert (
        "higher, as expected" in parts["Primary contrasts"]
        and "significant (Holm's p < 0.05): 1" in text
    )
    (null,) = [row for row in found["primary"] if row["verdict"] == "not significant"]
    exploratory = [
        row for row in (*found["comparisons"], *found["effects"]) if row["p_value"] is not None
    ]
    assert (
        parts["Not significant"].count("| primary |") == 1
        and null["quantity"] == "Acceptance kept, Typos"
    )
    weak = [row for row in exploratory if row["p_value"] >= 0.05]
    assert 0 < parts["Not significant"].count("| exploratory |") <= len(weak)
    assert "Not declared beforehand, and not corrected" in parts["Exploratory differences"]


@pytest.mark.parametrize("arms", [2, figures.MOST_IN_A_THIRD + 3])
def test_no_text_runs_over_another_or_off_the_page(
    tmp_path: Path, drawn: dict[str, PaperFigure], arms: int
) -> None:
    axes = {
        "recurrence": ["PreNorm", "PostNorm"],
        "a_long_name_of_an_axis": ["0", "1"],
        "loss": ["LKLambda", "SoftKL"],
    }
    own = arms_of(axes)[:arms]
    primary = {
        **PRIMARY[1],
        "effect": {"loss": "SoftKL"},
        "against": {"loss": "LKLambda"},
        "at": {},
    }
    given = {"seeds": [0, 1], "prompts": 5, "shapes": SHAPES[1:], "primary": [primary]}
    directory = make_study(tmp_path, axes, arms=own, **given)
    figures.draw_figures(results(read_record(directory)), tmp_path)
    assert set(drawn) == DRAWN
    for name, paper in drawn.items():
        figure = paper.figure
        boxes = [(text, box) for text, box in texts_in(figure) if text.strip()]
        assert boxes, name
        assert_whiskers_inside(figure)
        for index, (text, box) in enumerate(boxes):
            assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, (name, text)
            assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, (name, text)
            for other, other_box in boxes[index + 1 :]:
                assert not box.overlaps(other_box), (name, text, other)
