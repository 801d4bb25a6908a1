"""Random visibilities of packed rows, at any step of the unroll, of all nodes or of some."""

import torch
from hypothesis import strategies as st

from specdec.nn.view import Spans, View


@st.composite
def packed_visibilities(draw: st.DrawFn, most: int = 24) -> Spans:
    """Of a batch of two rows, under a window, with attention sinks or without, or none."""
    T = draw(st.integers(1, most))
    row = st.lists(st.integers(-1, 2), min_size=T, max_size=T).map(sorted)
    view = View.packed(torch.tensor([draw(row), draw(row)]))
    if draw(st.booleans()):
        nodes = st.lists(st.integers(0, T - 1), min_size=1, max_size=T, unique=True)
        kept = draw(nodes)
        other = draw(st.permutations(range(T)))[: len(kept)]
        view = view.of(torch.tensor([sorted(kept), sorted(other)]))
    view = view._replace(positions_BT=view.positions_BT + draw(st.integers(0, 3)))
    window = draw(st.integers(0, most))
    visible = (view.within(window, draw(st.integers(0, 4))) if window else view).visibility
    assert isinstance(visible, Spans)
    return visible
