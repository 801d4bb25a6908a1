"""Counts by seed and prompt say what the evaluation's own metrics say."""

from pathlib import Path

import pytest

from specdec.card.counts import counted
from specdec.card.study import read
from specdec.evaluation.summary import summary
from tests.card.made import GROWTHS, make_study


def test_one_seed_s_figures_are_the_evaluation_s(tmp_path: Path) -> None:
    study = read(make_study(tmp_path, {"norm": ["off"]}, seeds=[0], curves=False))
    own = counted(study.base)[GROWTHS[1]]
    answers = study.base.runs[0].evaluation.answers[GROWTHS[1]]
    known = summary("tree", {}, answers)
    figures = {"length": own.length(), "rate": own.rate(), "speedup": own.speedup()}
    value = {name: figure.value for name, figure in figures.items() if figure}
    assert value["length"] == pytest.approx(known["acceptance_length"]["mean"])
    assert value["rate"] == pytest.approx(known["tokens_per_second"]["speculative"])
    assert value["speedup"] == pytest.approx(known["speedup"])
    for k, (joint, conditional) in enumerate(zip(*known["accepted_per_position"].values(), strict=True), start=1):
        one, two = own.joint(k), own.conditional(k, k)
        assert one is not None and one.value == pytest.approx(joint)
        assert two is not None and two.value == pytest.approx(conditional)
    assert own.depth == 6
