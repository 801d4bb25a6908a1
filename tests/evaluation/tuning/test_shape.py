"""Candidate shapes."""

import pytest

from specdec.decoding import parse_growth
from specdec.evaluation.tuning.shape import WIDTHS, Shape, candidates, deepest, shapes


def test_every_candidate_is_a_growth_that_the_command_line_names() -> None:
    found = list(shapes(WIDTHS, 48))
    assert len(found) == len(set(found)) > 150
    for shape in found:
        growth = shape.growth
        assert parse_growth(shape.text) == growth
        assert (growth.depth, growth.nodes_drafted) == (shape.depth, shape.nodes)
        assert shape.depth <= min(shape.nodes, deepest(shape.top_k)) and shape.nodes <= candidates(shape.top_k)


def test_candidates_stay_within_what_was_measured() -> None:
    assert {shape.top_k for shape in shapes((1, 3), 12)} == {1, 3}
    assert max(shape.nodes for shape in shapes(WIDTHS, 12)) == 12
    assert list(shapes((1,), 3)) == [Shape(1, 1, 1), Shape(1, 2, 2), Shape(1, 3, 3)]


@pytest.mark.parametrize("top_k", WIDTHS)
def test_the_largest_growth_of_a_width_has_all_its_candidates(top_k: int) -> None:
    whole = Shape(top_k, deepest(top_k), candidates(top_k))
    assert whole.growth.nodes_drafted == candidates(top_k)
    if top_k > 1:
        with pytest.raises(ValueError, match="candidates"):
            _ = whole._replace(nodes=candidates(top_k) + 1).growth
