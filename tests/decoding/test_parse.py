"""Growths by their names."""

import pytest

from specdec.decoding import AdaptiveChain, Chain, DraftShape, DynamicTree, StaticTree, parse_shape


@pytest.mark.parametrize(
    ("text", "growth"),
    [
        ("chain", Chain()),
        ("chain:depth=3", Chain(3)),
        ("adaptive", AdaptiveChain()),
        ("adaptive:depth=4,min_product=.5", AdaptiveChain(4, 0.5)),
        ("adaptive:min_probability=0.25,min_product=0", AdaptiveChain(8, 0, 0.25)),
        ("tree", DynamicTree()),
        ("tree:depth=6,top_k=10,nodes=59", DynamicTree(6, 10, 59)),
        ("tree:nodes=20", DynamicTree(nodes=20)),
        ("static", StaticTree()),
    ],
)
def test_text_names_a_growth(text: str, growth: DraftShape) -> None:
    assert parse_shape(text) == growth and type(parse_shape(text)) is type(growth)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected one of chain, adaptive, tree, static"),
        ("star", "'star': expected one of chain"),
        ("Chain:depth=3", "expected one of chain"),
        ("chain:top_k=3", "'top_k=3' is not one of depth=NUMBER"),
        ("chain:depth=", "is not one of depth=NUMBER"),
        ("chain:depth=two", "'depth=two' is not one of"),
        ("tree:depth=2.5", "is not one of depth=NUMBER, top_k=NUMBER, nodes=NUMBER"),
        ("chain:depth=0", "depth must be at least 1"),
        (
            "adaptive:depth=2.5",
            "is not one of depth=NUMBER, min_product=NUMBER, min_probability=NUMBER",
        ),
        ("adaptive:0.4", "'0.4' is not one of"),
        ("adaptive:min_product=1.5", "min_product must be at most 1, not 1.5"),
        ("tree:nodes=1000", "candidates, not 1000"),
        ("static:", "'static:': static is EAGLE-1's tree and takes no parameters"),
        ("static:depth=3", "takes no parameters"),
    ],
)
def test_text_that_names_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_shape(text)
    assert "\n" not in str(caught.value)
