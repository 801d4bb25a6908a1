"""Bars, their intervals and the check, on counts."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.explain import plot as plotting
from specdec.explain.report import number, report
from specdec.explain.waterfall import DOWN, OBSERVED, OWN_TOKENS, Level, Waterfall

DEPTH = 4
COUNTS = st.lists(st.integers(0, DEPTH), min_size=1, max_size=6)


def waterfall(down: list[list[list[int]]], observed: list[list[int]], **beyond: list[list[int]]) -> Waterfall:
    levels = [Level(name, own) for name, own in zip(DOWN, down, strict=True)]
    return Waterfall([*levels, Level(OBSERVED, observed), *(Level(name, own) for name, own in beyond.items())])


def clustered(prompts: int, rates: tuple[float, ...], seed: int = 0) -> list[list[list[int]]]:
    """Counts by level and prompt; prompts differ by more than levels do."""
    chance = np.random.default_rng(seed)
    shift = chance.normal(0, 0.2, prompts)
    return [[chance.binomial(DEPTH, min(1.0, max(0.0, rate + more)), 12).tolist() for more in shift] for rate in rates]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(COUNTS, min_size=5, max_size=5), min_size=1, max_size=4))
def test_bars_telescope_whatever_is_counted(prompts: list[list[list[int]]]) -> None:
    found = waterfall([list(level) for level in zip(*prompts, strict=True)], [one[-1] for one in prompts])
    lengths = {level.name: level.length.mean for level in found.levels}
    assert sum(bar.loss.mean for bar in found.bars) == pytest.approx(lengths["perfect"] - lengths[OWN_TOKENS])
    assert found.check.holds and found.check.same == found.check.passes


def test_intervals_hold_their_means_and_pairing_narrows_them() -> None:
    down = clustered(30, (0.95, 0.9, 0.7, 0.5, 0.45))
    found = waterfall(down, down[-1])
    for one in [*(level.length for level in found.levels), *(bar.loss for bar in found.bars)]:
        assert one.low is not None and one.high is not None and one.low <= one.mean <= one.high
    widths = [level.length.high - level.length.low for level in found.levels[2:4]]  # type: ignore[operator]
    bar = found.bars[2].loss
    assert bar.low is not None and bar.high is not None and bar.low > 0
    assert bar.high - bar.low < 0.8 * sum(value**2 for value in widths) ** 0.5


def test_the_check_fails_where_decoding_accepts_something_else() -> None:
    down = clustered(20, (1, 0.9, 0.8, 0.7, 0.5))
    fewer = [[max(0, count - (number % 2)) for number, count in enumerate(own)] for own in down[-1]]
    found = waterfall(down, fewer)
    assert not found.check.holds and found.check.same < found.check.passes
    assert found.told(DEPTH)["check"]["holds"] is False
    parted = [list(own) for own in down[-1]]
    parted[0][0] = (parted[0][0] + 1) % (DEPTH + 1)  # one close draft of 240 passes
    assert waterfall(down, parted).check.holds


def test_one_prompt_has_no_intervals_and_must_agree_exactly() -> None:
    down = [[[4]], [[4]], [[3]], [[3]], [[2]]]
    found = waterfall(down, [[2]])
    assert found.check.holds and found.bars[1].loss == (1.0, None, None)
    assert not waterfall(down, [[3]]).check.holds


def test_prompts_without_a_pass_are_left_out_of_what_lies_beyond() -> None:
    down = clustered(3, (1, 0.9, 0.8, 0.7, 0.5))
    found = waterfall(down, down[-1], exported=[down[-1][0], [], down[-1][2]])
    (bar,) = found.beyond
    assert (bar.upper, bar.name, bar.loss.mean) == (OBSERVED, "exported", 0.0)
    with pytest.raises(ValueError, match="no prompt has a target pass in both"):
        found.levels[0].less(Level("none", [[], [], []]))
    with pytest.raises(ValueError, match="no target pass to measure"):
        _ = Level("none", [[], []]).length


def test_what_is_told_is_json_and_becomes_a_report_and_a_picture(tmp_path_factory: pytest.TempPathFactory) -> None:
    out = tmp_path_factory.mktemp("explain")
    down = clustered(12, (1, 0.9, 0.7, 0.72, 0.5))
    beyond = {"perturbed no_bos": clustered(12, (0.3,))[0], "exported": down[-1], "engine": down[-2]}
    for number_, found in enumerate([waterfall(down, down[-1], **beyond), waterfall([[[0]]] * 5, [[0]])]):
        told = {"depth": DEPTH, **found.told(DEPTH), "prompts": list("abc"), "skipped": [], "provenance": {}}
        told |= {"target": {}, "drafter": {}, "settings": {"a": 1}}
        assert json.loads(json.dumps(told, allow_nan=False)) == told
        plotting.plot(told, out / f"{number_}.png")
        assert (out / f"{number_}.png").stat().st_size > 10_000
        text = report(told, "x.png")
        assert "The bars add up: " in text and '| settings | {"a": 1} |' in text
        assert ("perturbed: no_bos" in text) == (number_ == 0)


def test_numbers_are_written_without_a_negative_zero() -> None:
    assert number({"mean": -0.001, "low": -0.2, "high": 0.0}) == "0.00 [-0.20, 0.00]"
    assert number({"mean": -0.0012, "low": None, "high": None}, 3) == "-0.001"
    assert number(None) == ""
