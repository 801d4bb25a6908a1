"""The simulation of a study's intervals runs, and its truths are what they are called."""

import numpy as np
import pytest

from benchmarks.coverage import (
    AGAINST_BASELINE,
    METHODS,
    MODELS,
    NOISY,
    decode,
    figures,
    grid,
    markdown,
    null_rows,
    of_contrast,
    of_null,
    of_power,
    of_prompts,
    of_study,
    study,
    truth,
)


def test_answers_end_when_they_are_long_enough() -> None:
    draw = np.random.default_rng(0)
    committed, passes = decode(np.full((2, 3, 40), 0.5), draw)
    assert committed.min() >= 96 and committed.max() < 96 + 6
    assert committed.sum() / passes.sum() == pytest.approx(
        1 + sum(0.5**k for k in range(1, 6)), rel=0.05
    )


def test_null_studies_compare_what_they_say() -> None:
    """Each half of the arms is one level of the axis that comes first."""
    for weights in (*grid("half"), *grid("first"), *AGAINST_BASELINE):
        assert sum(weights) == pytest.approx(0) and sum(map(abs, weights)) == pytest.approx(2)
    within = [[*map(bool, weights)] for weights in grid("half")]
    assert within[0] == [True] * 4 + [False] * 4 and within[4] == [True] * 8
    assert grid("first")[0] == [-0.5, -0.5, 0, 0, 0.5, 0.5, 0, 0]
    assert len(null_rows()) == 16
    # as a card's contrasts, these are of their own arms alone
    arms = figures(*study(MODELS[3], 8, 3, 40, 0.0, np.random.default_rng(0)))
    assert {of_contrast(arms, weights).pooled for weights in AGAINST_BASELINE} == {0}
    assert {of_contrast(arms, weights).pooled for weights in grid("half")[:4]} <= {0, 4}


@pytest.mark.slow
def test_false_verdicts_are_no_more_than_promised_where_half_of_the_arms_are_noisy() -> None:
    """400 studies; where Satterthwaite's degrees of freedom are taken and nothing is pooled, it is above 10 %."""
    found = of_null(grid("half"), NOISY[0], 3, 2, 400, np.random.default_rng(7))
    assert found["error"] <= 0.06 + 0.024  # what 400 studies can say
    assert found["tests"] == 10 and found["detectable"] > 0


@pytest.mark.slow
def test_a_simulation_says_what_held() -> None:
    draw = np.random.default_rng(1)
    rows = {
        "prompts": [of_prompts("long tail", 6, 20, 3, draw)],
        "studies": [of_study(MODELS[3], 2, 3, 20, 20, draw)],
        "power": [of_power(2, 3, 20, 20, draw)],
        "null": [
            {"design": "grid", "model": "trainings differ", "noise": "all arms alike"}
            | of_null(grid("half"), MODELS[3], 3, 1, 20, draw)
        ],
    }
    (of_one,), (of_two,), (power,), (null,) = rows.values()
    assert 0.5 < of_one["ours"] <= 1 and all(0.5 < of_two[name] <= 1 for name in METHODS)
    assert (
        power["difference"] == pytest.approx(power["detectable"], rel=0.2)
        and 0.4 < power["found"] <= 1
    )
    assert truth(MODELS[0], 0.3)[1] > 0.2 and truth(MODELS[0])[1] == 0
    about = {
        "studies": 20,
        "resampled": 3,
        "date": "2000-01-01",
        "seconds": 1,
        "command": "python x",
    }
    text = "\n".join(markdown(about, rows))
    assert f"| all arms alike | 3 | 5 | {100 * null['error']:.1f} |" in text
    assert "| long tail | 6 |" in text and f"| {MODELS[3].name} | 2 | 3 | 20 |" in text
