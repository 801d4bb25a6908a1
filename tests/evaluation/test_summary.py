"""Figures by category and by region of the answer, by hand."""

import pytest

from specdec.evaluation.metrics import acceptance_length, interval_to_json
from specdec.evaluation.summary import by_category, by_region, pass_regions
from tests.evaluation.made import answer


def test_categories_stand_apart() -> None:
    found = [
        answer("a", (3, 1), category="math", tokens=10, plain_tokens=10),
        answer("b", (0,), category="math", tokens=10, plain_tokens=10, plain_seconds=4.0),
        answer("c", (), category="code", tokens=0, plain_tokens=0),
        answer("d", (2,)),
    ]
    groups = by_category(found)
    assert (
        list(groups) == ["code", "math"]
        and groups["code"]["acceptance_length"] is groups["code"]["speedup"] is None
    )
    assert (groups["math"]["prompts"], groups["math"]["passes"], groups["math"]["speedup"]) == (
        2,
        3,
        3.0,
    )
    assert groups["math"]["acceptance_length"] == interval_to_json(acceptance_length(found[:2]))


def test_a_pass_is_in_the_region_where_its_drafts_begin() -> None:
    # the prompt's pass commits token 0; then passes of 3, 1 and 2 tokens begin at tokens 1, 4 and 5
    regions = ["thought"] * 4 + ["text"] + ["tool call"] * 2
    assert pass_regions((2, 0, 1), regions) == ("thought", "text", "tool call")
    # the last pass may begin behind what was kept
    assert pass_regions((6, 0), ["code"] * 7) == ("code", "code")
    assert pass_regions((2, 0), ["text"] * 4) == () == pass_regions((2, 0), [])


def test_regions_stand_apart_and_share_all_tokens() -> None:
    found = [
        answer("a", (3, 1, 0), regions=("thought", "thought", "tool call")),
        answer("b", (2,)),
        answer("b", (0, 1), regions=("tool call", "text")),
    ]
    groups = by_region(found)
    assert list(groups) == ["text", "thought", "tool call"]
    counts = {name: (group["prompts"], group["passes"]) for name, group in groups.items()}
    assert counts == {"text": (1, 2), "thought": (1, 2), "tool call": (2, 2)}
    lengths = {name: group["acceptance_length"]["mean"] for name, group in groups.items()}
    assert lengths == {"text": 2.5, "thought": 3.0, "tool call": 1.0}
    shares = {name: group["tokens_share"] for name, group in groups.items()}
    assert shares == pytest.approx({"text": 5 / 13, "thought": 6 / 13, "tool call": 2 / 13})
    assert by_region(found[1:2]) == {}
