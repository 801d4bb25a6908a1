"""The contrasts that a study declares, as read, checked, planned and kept."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.studies.arms import Arm, read_arms
from specdec.studies.jobs import StudyPlan
from specdec.studies.outcomes import check_outcome
from specdec.studies.study import Study
from specdec.studies.study_file import read_study
from specdec.studies.worker import JobFolder
from tests.studies.conftest import MakePlan, Write, base


def outcome(name: str, **more: Any) -> list[dict[str, Any]]:
    return [{"outcome": name, "effect": {"fc_norm": "on"}, **more}]


def test_a_contrast_is_against_the_baseline_s_levels_unless_it_says_so(write: Write) -> None:
    given = [
        {
            "outcome": ["acceptance_length", "accepted_at_1-2"],
            "effect": {"fc_norm": "on"},
            "at": {"K": 1},
        },
        {
            "outcome": "acceptance_length",
            "effect": {"K": 1},
            "against": {"K": 2},
            "expect": "lower",
        },
        {"outcome": "acceptance_length", "effect": {"fc_norm": "on", "K": 1}},
    ]
    length, accepted, K, both = read_study(write(primary=given)).primary
    assert (length.against, length.at, accepted.outcome) == (
        {"fc_norm": "off"},
        {"K": ("1",)},
        "accepted_at_1-2",
    )
    assert [str(one) for one in (length, K, both)] == [
        "fc_norm: on - off (K=1)", "K: 1 - 2", "fc_norm=on K=1 - fc_norm=off K=2",
    ]  # fmt: skip
    arms = [frozenset({("fc_norm", norm), ("K", K)}) for norm in ("off", "on") for K in ("1", "2")]
    assert length.weights(arms) == {arms[0]: -1.0, arms[2]: 1.0}
    assert K.weights(arms) == {arms[0]: 0.5, arms[1]: -0.5, arms[2]: 0.5, arms[3]: -0.5}


@pytest.mark.parametrize(
    ("primary", "message"),
    [
        ([{"effect": {"fc_norm": "on"}}], "primary: give an outcome"),
        (
            outcome("acceptance_length", effect={}),
            "other levels of the same axes, not nothing against nothing",
        ),
        (
            outcome("acceptance_length", effect={"fc_norm": "off"}),
            "not fc_norm=off against fc_norm=off",
        ),
        (
            outcome("acceptance_length", effect={"norm": "on"}),
            "effect: no such key: norm; there are: fc_norm, K",
        ),
        (
            outcome("acceptance_length", at={"K": [1, 3]}),
            "primary: at: axis K has no level 3; it has: 1, 2",
        ),
        (outcome("acceptance_length", at={"fc_norm": "on"}), "fc_norm is what is compared"),
        (
            outcome("acceptance_length", expect="more"),
            "primary: expect: must be higher or lower, not more",
        ),
        (
            [*outcome("acceptance_length"), *outcome("acceptance_length")],
            "acceptance_length, fc_norm: on - off stands twice",
        ),
    ],
)
def test_a_wrong_primary_contrast_is_refused_in_one_line(
    write: Write, primary: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_study(write(primary=primary))


@pytest.fixture(scope="module")
def arm(
    target_directory: Path,
    text_file: Path,
    prompts_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Arm:
    """Of a study with drift and without robustness."""
    given = base(target_directory, text_file, prompts_file) | {"drift": {"depths": 4}}
    path = tmp_path_factory.mktemp("study") / "study.yaml"
    path.write_text(yaml.safe_dump(given, sort_keys=False))
    study = read_study(path)
    (only,) = read_arms(dataclasses.replace(study, combinations=study.combinations[:1]))
    return only


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("length", "outcome length: expected acceptance_length, acceptance_length_in_REGION"),
        ("accepted", "outcome accepted: expected"),
        ("accepted_in_code", "outcome accepted_in_code: expected"),
        (
            "acceptance_length_in_verse",
            "no region verse; there are: text, thought, tool_call, code",
        ),
        ("acceptance_length.chain:depth=9", "arm fc_norm=.* has no chain of 9; it has: chain of 2"),
        ("kept.no_bos", "the study has no robustness: add it"),
        ("acceptance_length_under.no_bos", "the study has no robustness: add it"),
        ("acceptance_length_under", "outcome acceptance_length_under: expected"),
        (
            "acceptance_length_beneath.no_bos",
            r"expected .*, kept.CONDITION or acceptance_length_under.C",
        ),
        ("accepted_at_2-3", "the draft shape has 2 positions"),
        ("accepted_at_2-1", "2-1 is no range of steps"),
        ("drift.kl_at_9", "drift has 4 steps"),
        ("drift.kl_at_3-2", "3-2 is no range of steps"),
        ("drift.ki_at_2", "has no ki; it has: sink_mass"),
        ("drift.kl+sink_mass_at_2", "a sum of nats and share of weight means nothing"),
    ],
)
def test_an_outcome_that_will_not_be_measured_is_refused(arm: Arm, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_outcome(name, arm)


def test_conditions_of_an_outcome_are_those_of_the_study(arm: Arm) -> None:
    """The clean prompts have a length, and no share that is kept."""
    conditions = {"conditions": ["no_bos", "context:tokens=64"]}
    measured = dataclasses.replace(
        arm, measures={"robustness": dataclasses.replace(arm.measures["drift"], config=conditions)}
    )
    for name in ("kept.no_bos", "acceptance_length_under.context:tokens=64"):
        check_outcome(name, measured)
    check_outcome("acceptance_length_under.clean", measured)
    for name in ("kept.clean", "acceptance_length_under.no_template"):
        with pytest.raises(ValueError, match=r"has no .*; it has: no_bos, context:tokens=64"):
            check_outcome(name, measured)


def test_a_wrong_primary_contrast_is_refused_before_anything_runs(planned: MakePlan) -> None:
    axes = {"fc_norm": {"off": {}, "on": {"model.drafter.norms.aux": "none"}}}
    with pytest.raises(ValueError, match="the study has no drift: add it"):
        planned(axes=axes, baseline=None, primary=outcome("drift.kl_at_2"))


def test_a_plan_keeps_primary_contrasts_and_says_if_they_changed_after_a_measure(
    tiny: tuple[Study, StudyPlan], write: Write, tmp_path: Path
) -> None:
    def written(name: str) -> tuple[StudyPlan, bool]:
        plan = dataclasses.replace(
            tiny[1], study=read_study(write(primary=outcome(name))), directory=tmp_path / "runs"
        )
        changed = plan.primary_changed()
        plan.write()
        return plan, changed

    plan, changed = written("acceptance_length")
    assert not changed and plan.to_json()["primary"] == [
        {"outcome": "acceptance_length", "effect": {"fc_norm": "on"}, "against": {"fc_norm": "off"}, "at": {},
         "expect": None}
    ]  # fmt: skip
    assert not written("accepted_at_2")[1]  # nothing was measured yet
    key = plan.runs[0][0]["evaluate"]
    last = JobFolder(plan.directory, "evaluate", key).last_file
    last.parent.mkdir(parents=True)
    last.touch()
    assert not written("accepted_at_2")[1]
    assert written("acceptance_length")[1] and written("accepted_at_2")[1]
