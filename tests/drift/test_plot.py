"""The picture shows every drafter in every panel."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from specdec.drift.measure import measure
from specdec.drift.plot import PANELS, _is_told, _series, plot
from specdec.drift.report import report
from specdec.drift.results import Document, document
from specdec.drift.summary import difference, summary
from tests.drift.made import PROMPTS, SMALL, drafter, target, texts


@pytest.fixture(scope="module")
def found() -> list[tuple[str, Document]]:
    names = [name for name, _ in PROMPTS]
    out = []
    for name, trained in (("eagle3", 2), ("eagle3_1", 2), ("two_layer", None)):
        sums = [measure(target(), drafter(name), text, SMALL) for text in texts()]
        one = document(drafter(name).config, names, sums, trained, SMALL.depths)
        out.append((f"${name}", {**one, "summary": summary(one)}))
    return out


def test_what_is_drawn(found: list[tuple[str, Document]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    savefig = Figure.savefig

    def spy(self: Figure, *args: Any, **kwargs: Any) -> None:
        drawn.append(self)
        savefig(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", spy)
    paths = plot(found, tmp_path / "drift")
    assert [path.name for path in paths] == ["drift.png", "drift.pdf"]
    assert paths[0].read_bytes().startswith(b"\x89PNG") and paths[1].read_bytes().startswith(b"%PDF")
    figure = drawn[0]
    assert len(figure.axes) == sum(map(len, PANELS))
    for axes in figure.axes:
        assert axes.get_title() and axes.get_xlabel() and axes.get_ylabel()
    with pytest.raises(ValueError, match="no drafter to plot"):
        plot([], tmp_path / "none")


def test_the_trained_depth_is_marked(found: list[tuple[str, Document]]) -> None:
    axes = Figure().subplots()
    documents = [document for _, document in found[:2]]
    _series(axes, documents, "state_rms")
    assert [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"] == [2.5]
    lines = [line for line in axes.lines if line.get_linestyle() in ("-", "--")]
    assert [list(line.get_ydata()) for line in lines] == [one["series"]["state_rms"]["mean"] for one in documents]
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert [[round(x) for x in line.get_xdata()] for line in hollow] == [[3, 4]] * 2
    bare = Figure().subplots()
    _series(bare, [found[2][1]], "state_rms")  # trained to a depth that nobody knows
    assert not [line for line in bare.lines if line.get_linestyle() == ":"]
    assert not [x for line in bare.lines if line.get_markerfacecolor() == "white" for x in line.get_xdata()]


def test_steps_that_few_prompts_reach_are_left_out() -> None:
    assert _is_told([1, 2, 3, 4, 5]) and _is_told([0, 0, 1, 2, 3, 4, 5]) and _is_told([1, 2])
    assert not _is_told([0, 1, 2, 3, 4]) and not _is_told([0, 2])


def test_the_report(found: list[tuple[str, Document]]) -> None:
    text = report(found, "drift.png", {found[1][0]: difference(found[1][1], found[0][1])})
    assert text.count("![") == 1 and "trained depth unknown" in text and "trained to step 2" in text
    assert "## $eagle3_1 less $eagle3" in text and "| mean at step | 1 | 2 | 3* | 4* |" in text
    for _, one in found:
        for row in one["series"].values():
            assert row["title"].replace("|", "\\|") in text
