"""Bars, their intervals and the check, on counts."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.diagnostics.waterfall import (
    DOWN,
    OBSERVED,
    waterfall,
    waterfall_table,
    waterfall_verdict,
)

DEPTH = 4
COUNTS = st.lists(st.integers(0, DEPTH), min_size=1, max_size=6)


def told(down: list[list[list[int]]], observed: list[list[int]]) -> dict[str, Any]:
    return waterfall(dict(zip(DOWN, down, strict=True)) | {OBSERVED: observed})


def clustered(prompts: int, rates: tuple[float, ...]) -> list[list[list[int]]]:
    """Counts by level and prompt; prompts differ by more than levels do."""
    chance = np.random.default_rng(0)
    shift = chance.normal(0, 0.2, prompts)
    return [
        [chance.binomial(DEPTH, min(1.0, max(0.0, rate + more)), 12).tolist() for more in shift]
        for rate in rates
    ]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(COUNTS, min_size=5, max_size=5), min_size=1, max_size=4))
def test_bars_telescope_whatever_is_counted(prompts: list[list[list[int]]]) -> None:
    found = told(
        [list(level) for level in zip(*prompts, strict=True)], [one[-1] for one in prompts]
    )
    lengths = {level["name"]: level["acceptance_length"]["mean"] for level in found["levels"]}
    losses = sum(bar["loss"]["mean"] for bar in found["bars"])
    assert losses == pytest.approx(lengths["perfect"] - lengths["own_tokens"])
    assert found["check"]["holds"] and found["check"]["same_passes"] == found["check"]["passes"]


def test_intervals_hold_their_means_and_pairing_narrows_them() -> None:
    down = clustered(30, (0.95, 0.9, 0.7, 0.5, 0.45))
    found = told(down, down[-1])
    lengths = [level["acceptance_length"] for level in found["levels"]]
    for one in [*lengths, *(bar["loss"] for bar in found["bars"])]:
        assert one["low"] <= one["mean"] <= one["high"]
    bar = found["bars"][2]["loss"]
    apart = sum((one["high"] - one["low"]) ** 2 for one in lengths[2:4]) ** 0.5
    assert bar["low"] > 0 and bar["high"] - bar["low"] < 0.8 * apart


def test_the_check_fails_where_decoding_accepts_something_else() -> None:
    down = clustered(20, (1, 0.9, 0.8, 0.7, 0.5))
    check = told(
        down, [[max(0, count - (n % 2)) for n, count in enumerate(own)] for own in down[-1]]
    )["check"]
    assert check["holds"] is False and check["same_passes"] < check["passes"]
    parted = [list(own) for own in down[-1]]
    parted[0][0] = (parted[0][0] + 1) % (DEPTH + 1)  # one close draft of 240 passes
    assert told(down, parted)["check"]["holds"]
    one_prompt = [[[4]], [[4]], [[3]], [[3]], [[2]]]  # without intervals, it must agree exactly
    assert (
        told(one_prompt, [[2]])["check"]["holds"] and not told(one_prompt, [[3]])["check"]["holds"]
    )


def test_what_is_told_is_json_and_becomes_a_table() -> None:
    down = clustered(12, (1, 0.9, 0.7, 0.72, 0.5))
    for found in (told(down, down[-1]), told([[[0]]] * 5, [[0]])):
        assert json.loads(json.dumps(found, allow_nan=False)) == found
        assert waterfall_verdict(found).startswith("The bars add up: ")
        assert [row[0] for row in waterfall_table(found, DEPTH).rows][-1] == "observed by decoding"
    with pytest.raises(ValueError, match="no target pass to measure"):
        told(down, [[], [], []] * 4)
