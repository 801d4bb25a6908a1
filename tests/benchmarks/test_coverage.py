"""The simulation of a study's intervals runs, and its truths are what they are called."""

import numpy as np
import pytest

from benchmarks.coverage import METHODS, MODELS, decode, markdown, simulate, truth


def test_answers_end_when_they_are_long_enough() -> None:
    draw = np.random.default_rng(0)
    committed, passes = decode(np.full((2, 3, 40), 0.5), draw)
    assert committed.min() >= 96 and committed.max() < 96 + 6
    assert committed.sum() / passes.sum() == pytest.approx(1 + sum(0.5**k for k in range(1, 6)), rel=0.05)


def test_a_simulation_says_what_held() -> None:
    draw = np.random.default_rng(1)
    row = simulate(MODELS[6], 3, 20, 0.0, 20, 3, draw)
    assert all(0 <= row[name] <= 1 for name in METHODS) and row["difference"] == 0
    assert truth(MODELS[0], 0.3, draw)[1] > 0.2
    about = {"studies": 20, "resampled": 3, "date": "2000-01-01", "seconds": 1, "command": "python x"}
    text = "\n".join(markdown(about, [{"model": "x", "seeds": 3, "prompts": 20} | row]))
    assert "| x | 3 | 20 |" in text
