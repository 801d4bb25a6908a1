from pathlib import Path
from typing import Any

import matplotlib.image
import matplotlib.pyplot
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from specdec.evaluation.plot import plot
from specdec.evaluation.record import Answer
from specdec.evaluation.summary import summary


def results(count: int, prompts: int = 12, plain: float = 2.0, depth: int = 5) -> list[dict[str, Any]]:
    generator = np.random.default_rng(0)
    found = []
    for index in range(count):
        answers = []
        for prompt in range(prompts):
            accepted = tuple(generator.integers(0, depth + 1, size=20).tolist())
            tokens = sum(accepted) + 20
            answers.append(
                Answer(str(prompt), None, tokens, accepted, (depth,) * 20, 1.0, plain, tokens if plain else 0, None)
            )
        found.append(summary(f"growth number {index} of the table", {}, answers))
    return found


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved, so that a test can look at them."""
    kept: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *arguments: Any, **options: Any) -> None:
        kept.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return kept


@pytest.mark.parametrize("count", [1, 3, 10])
def test_a_picture_with_something_on_it(tmp_path: Path, drawn: list[Figure], count: int) -> None:
    path = tmp_path / "new" / "acceptance.png"
    found = results(count)
    plot({"results": found}, path)
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[0] >= 500
    assert pixels.shape[1] == 1800
    assert 0.005 < (pixels[..., :3].min(-1) < 0.9).mean() < 0.6  # neither blank nor black
    assert [file.name for file in path.parent.iterdir()] == ["acceptance.png"]
    assert not matplotlib.pyplot.get_fignums()
    length, joint, speed, conditional = drawn[0].axes
    assert len(joint.lines) == len(conditional.lines) == count
    for line, result in zip(joint.lines, found, strict=True):
        assert line.get_ydata().tolist() == result["accepted_per_position"]["joint"]
    assert len(speed.patches) == 2 * count
    assert len(length.get_yticks()) == count
    assert all(axes.get_xlabel() or axes is joint for axes in drawn[0].axes)


def test_no_text_runs_over_another_or_off_the_page(tmp_path: Path, drawn: list[Figure]) -> None:
    found = results(6)
    found[0]["growth"] = "a_very_long_name_without_any_space_" * 4
    found[1]["growth"] = "a long name of many words, " * 6
    plot({"results": found}, tmp_path / "acceptance.png")
    figure = drawn[0]
    renderer = FigureCanvasAgg(figure).get_renderer()
    page = figure.bbox
    boxes = []
    for axes in figure.axes:
        texts = [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            shown = [
                tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high and tick.label1.get_visible()
            ]
            texts += [tick.label1 for tick in shown]
        boxes += [(text, text.get_window_extent(renderer)) for text in texts if text.get_text().strip()]
    boxes += [(text, text.get_window_extent(renderer)) for text in figure.legends[0].get_texts()]
    for index, (text, box) in enumerate(boxes):
        assert page.x0 <= box.x0, text
        assert box.x1 <= page.x1, text
        assert page.y0 <= box.y0, text
        assert box.y1 <= page.y1, text
        for other, other_box in boxes[index + 1 :]:
            assert not box.overlaps(other_box), (text, other)


def test_what_was_not_measured_is_said(tmp_path: Path, drawn: list[Figure]) -> None:
    plot({"results": results(1, prompts=1, plain=0.0)}, tmp_path / "acceptance.png")
    length, _, speed, _ = drawn[0].axes
    assert "plain not measured" in [text.get_text() for text in speed.texts]
    assert "interval" not in length.get_xlabel()


def test_nothing_drafted_and_strange_names_can_be_drawn(tmp_path: Path, drawn: list[Figure]) -> None:
    found = results(2, depth=0)
    found[0]["growth"], found[1]["growth"] = "_cost $x^2 and $y_", ""
    plot({"results": found}, tmp_path / "acceptance.png")
    first = drawn[0].legends[0].get_texts()[0]
    assert first.get_text().strip() == r"_cost \$x^2 and \$y_"


def test_no_result_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no result to plot"):
        plot({"results": []}, tmp_path / "acceptance.png")
    assert not list(tmp_path.iterdir())


def test_a_picture_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "acceptance.png"
    path.write_bytes(b"old")

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(ValueError, match="no space left on the device"):
        plot({"results": results(1)}, path)
    assert path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1
