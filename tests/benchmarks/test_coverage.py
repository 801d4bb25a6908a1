"""The simulation of a study's intervals runs, and its truths are what they are called."""

import numpy as np
import pytest

from benchmarks.coverage import (
    METHODS,
    MODELS,
    decode,
    markdown,
    of_power,
    of_prompts,
    of_study,
    truth,
)


def test_answers_end_when_they_are_long_enough() -> None:
    draw = np.random.default_rng(0)
    committed, passes = decode(np.full((2, 3, 40), 0.5), draw)
    assert committed.min() >= 96 and committed.max() < 96 + 6
    assert committed.sum() / passes.sum() == pytest.approx(
        1 + sum(0.5**k for k in range(1, 6)), rel=0.05
    )


@pytest.mark.slow
def test_a_simulation_says_what_held() -> None:
    draw = np.random.default_rng(1)
    rows = {
        "prompts": [of_prompts("long tail", 6, 20, 3, draw)],
        "studies": [of_study(MODELS[3], 2, 3, 20, 20, draw)],
        "power": [of_power(2, 3, 20, 20, draw)],
    }
    (of_one,), (of_two,), (power,) = rows.values()
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
    assert "| long tail | 6 |" in text and f"| {MODELS[3].name} | 2 | 3 | 20 |" in text
