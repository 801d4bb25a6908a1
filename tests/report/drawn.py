"""What is in a drawn figure: its texts and whiskers, where they are."""

from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from specdec.report.plots import paper_style


def texts_in(figure: Figure) -> list[tuple[str, Any]]:
    """All texts that can be seen, with their boxes in pixels."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    with paper_style():
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


def assert_whiskers_inside(figure: Figure) -> None:
    """Every interval ends within the axes that it is drawn in."""
    for axes in figure.axes:
        left, right = sorted(axes.get_xlim())
        bottom, top = sorted(axes.get_ylim())
        for collection in axes.collections:
            for segment in collection.get_segments():
                for x, y in segment:
                    assert left <= x <= right, (axes.get_title(), x, (left, right))
                    assert bottom <= y <= top, (axes.get_title(), y, (bottom, top))
