"""The size of figures, the files that they become, and what the CSV file says of them."""

import csv
import struct
from pathlib import Path

import pytest

from specdec.report import plots
from specdec.report.plots import DOUBLE, SINGLE, PaperFigure, Point
from tests.report.drawn import assert_whiskers_inside, texts_in

POINTS = {1: Point(0.5, 0.25, 0.75), 2: Point(0.4, None, None), 3: Point(0.3, 0.0, 0.9)}
LOOK = plots.style(0)


def drawn(width: float = DOUBLE) -> PaperFigure:
    """A curve of three points, and two rows."""
    with plots.paper_style():
        paper = PaperFigure(2, 2, 1.8, width)
        panel = paper.curves("Acceptance", "share of passes", "draft position")
        panel.curve("drafter", POINTS, LOOK, shift=0.1, hollow_beyond=2)
        names = ["chain of 3", "chain of 5"]
        rows = paper.dots("Speed", "tokens per second", "draft shape", names, 1.0)
        rows.dot("drafter", "chain of 3", 0, Point(1.18, 1.09, 1.27), LOOK)
        rows.dot("drafter", "chain of 5", 1, Point(1.17, 1.07, 1.28), LOOK)
        return paper


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a figure's files."""
    folder = tmp_path_factory.mktemp("figure")
    plots.save_figure(drawn(), folder / "x.png")
    return folder


def check_width(folder: Path, inches: float) -> None:
    (pixels,) = struct.unpack(">I", (folder / "x.png").read_bytes()[16:20])
    assert pixels == round(300 * inches)
    assert f'width="{72 * inches:g}pt"' in (folder / "x.svg").read_text()
    assert f"/MediaBox [ 0 0 {72 * inches:g} ".encode() in (folder / "x.pdf").read_bytes()


def test_a_wide_figure_is_as_wide_as_two_columns_at_300_dpi(saved: Path) -> None:
    check_width(saved, DOUBLE)


def test_a_narrow_figure_is_as_wide_as_a_papers_column_at_300_dpi(tmp_path: Path) -> None:
    plots.save_figure(drawn(SINGLE), tmp_path / "x.png")
    check_width(tmp_path, SINGLE)


def test_a_figure_becomes_four_files_with_the_same_bytes_each_time(
    saved: Path, tmp_path: Path
) -> None:
    plots.save_figure(drawn(), tmp_path / "x.png")
    for folder in (saved, tmp_path):
        assert {path.name for path in folder.iterdir()} == {*plots.figure_files("x.png")}
    for file in plots.figure_files("x.png"):
        assert (saved / file).read_bytes() == (tmp_path / file).read_bytes(), file


def test_a_figure_is_laid_out_before_its_files_are_drawn(tmp_path: Path) -> None:
    paper = drawn(SINGLE)
    plots.save_figure(paper, tmp_path / "x.png")
    page = paper.figure.bbox
    boxes = [box for text, box in texts_in(paper.figure) if text.strip()]
    for number, box in enumerate(boxes):
        assert page.x0 <= box.x0 <= box.x1 <= page.x1
        assert page.y0 <= box.y0 <= box.y1 <= page.y1
        assert not any(box.overlaps(other) for other in boxes[:number])


def test_text_in_svg_and_pdf_stays_text(saved: Path) -> None:
    assert "draft position</text>" in (saved / "x.svg").read_text()
    pdf = (saved / "x.pdf").read_bytes()
    assert b"/FontFile2" in pdf and b"/Subtype /Type3" not in pdf


def test_the_table_lists_what_is_drawn(saved: Path) -> None:
    rows = table(saved / "x.csv")
    assert rows[0] == {
        "panel": "Acceptance", "series": "drafter", "x": "1", "x_unit": "draft position", "value": "0.5",
        "low": "0.25", "high": "0.75", "unit": "share of passes",
    }  # fmt: skip
    assert (rows[1]["low"], rows[1]["high"]) == ("", "")
    figure = drawn().figure
    curve, dots = figure.axes
    heights = [y for line in curve.lines if line.get_marker() == "o" for y in line.get_ydata()]
    widths = [x for line in dots.lines if line.get_marker() == "o" for x in line.get_xdata()]
    assert [float(row["value"]) for row in rows] == [*heights, *widths]
    assert rows[4]["x"] == "chain of 5" and rows[4]["unit"] == "tokens per second"


def test_the_axis_holds_an_interval_that_is_far_wider_than_the_points() -> None:
    paper = drawn()
    assert_whiskers_inside(paper.figure)
    left, right = paper.axes[1].get_xlim()
    assert left < 1.07 and right > 1.28
    paper.axes[1].set_xlim(1.169, 1.184)
    with pytest.raises(AssertionError, match="Speed"):
        assert_whiskers_inside(paper.figure)


def test_points_beyond_the_trained_depth_are_hollow() -> None:
    lines = [line for line in drawn().axes[0].lines if line.get_marker() == "o"]
    faces = {line.get_markerfacecolor(): len(line.get_xdata()) for line in lines}
    assert faces == {LOOK["color"]: 2, "white": 1}


def test_lines_of_a_title_are_of_about_equal_length() -> None:
    text = "share of the passes that got this far"
    assert plots.label(text, 33) == "share of the passes\nthat got this far"
    assert plots.label(text, 40) == text
    assert plots.label("word " * 40, 10).endswith("...")
    assert plots.label("$x", 10) == r"\$x"


def test_places_are_whole_numbers_even_if_there_is_one() -> None:
    with plots.paper_style():
        panel = PaperFigure(1, 1, 1.8).curves("Acceptance", "share of passes", "draft position")
        for shift in (-0.075, 0.075):
            panel.curve("drafter", {1: Point(0.5, 0.25, 0.75)}, LOOK, shift=shift)
        low, high = panel.axes.get_xlim()
        ticks = panel.axes.get_xticks()
    assert [tick for tick in ticks if low <= tick <= high] == [1]
