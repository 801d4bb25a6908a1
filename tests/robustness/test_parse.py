"""Conditions by their names."""

import pytest

from specdec.robustness.conditions import ALL
from specdec.robustness.conditions.context import Context
from specdec.robustness.conditions.no_bos import NoBos
from specdec.robustness.conditions.noise_hidden import NoiseHidden
from specdec.robustness.conditions.system_prompt import SystemPrompt
from specdec.robustness.conditions.thinking import Thinking
from specdec.robustness.parse import parse_conditions


def test_names_with_and_without_parameters() -> None:
    texts = ["no_bos", "noise_hidden:alpha=.5", "context:tokens=64", "system:text=long", "thinking:on=false", "no_bos"]
    expected = [NoBos(), NoiseHidden(0.5), Context(64), SystemPrompt("long"), Thinking(False)]
    assert parse_conditions(texts) == expected
    assert parse_conditions(["context"]) == [Context(n) for n in (512, 1024, 2048, 4096, 8192, 16384)]
    assert parse_conditions([]) == [one for kind in ALL for one in kind.usual()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("clean", "expected one of no_bos, no_template"),
        ("no_bos:x=1", "it takes no parameter"),
        ("context:tokens=-1", "tokens=NUMBER"),
        ("context:tokens=1.5", "tokens=NUMBER"),
        ("context:", "tokens=NUMBER"),
        ("context:tokens=1,tokens=2", "at most once"),
        ("context:tokens=0", "at least 1"),
        ("system:text=loud", r"text=short\|stranger\|long"),
        ("thinking:on=yes", r"on=true\|false"),
        ("noise_hidden:alpha=nan", "alpha=NUMBER"),
        ("noise_hidden:beta=1", "alpha=NUMBER"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_conditions([text])
