"""Arms as ``specdec fit`` would compose them, and what is refused before any begins."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from specdec.commands.fit import Configured, configured
from specdec.studies.arms import NOT_KEPT, argument, arguments, arm_differences, check_equal
from specdec.studies.jobs import StudyPlan
from specdec.studies.study import Study
from specdec.studies.study_file import read_study
from specdec.training.run_directory import RunDirectory
from tests.studies.conftest import MakePlan, Write


def test_an_arm_is_what_fit_makes_of_the_same_arguments(
    tiny: tuple[Study, StudyPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    study, plan = tiny
    arm = plan.arms[2]
    assert arm.name == "fc_norm=on K=1"
    flags = [argument(*each) for each in study.common.settings.items()]
    given = [*flags, "--model.drafter.norms.aux=each", "--model.ttt_steps=1"]
    monkeypatch.setattr("sys.argv", ["specdec"])
    full = configured(Configured, "fit", given, RunDirectory()).full()
    assert arm.config == {key: value for key, value in full.items() if key not in NOT_KEPT}
    assert arm.drafter.norms.aux == "each" and arm.trained_parameters > 0


def test_what_an_arm_changes_is_told_in_the_parts_own_terms(tiny: tuple[Study, StudyPlan]) -> None:
    plan = tiny[1]
    assert {arm.name: arm_differences(plan.baseline, arm) for arm in plan.arms} == {
        "fc_norm=off K=1": ["model.ttt_steps: 2 to 1"],
        "fc_norm=off K=2": [],
        "fc_norm=on K=1": ["norms.aux: none to each", "model.ttt_steps: 2 to 1"],
        "fc_norm=on K=2": ["norms.aux: none to each"],
    }


def test_levels_win_over_set_and_what_is_inside_a_part_comes_after_it(
    write: Write, tmp_path: Path
) -> None:
    (tmp_path / "longer.yaml").write_text("model: {ttt_steps: 3}\ntrainer: {max_steps: 9}\n")
    (tmp_path / "level.yaml").write_text("model: {ttt_steps: 4}\n")
    axes = {
        "aux": {"a": {"model.drafter.norms.aux": "none"}, "b": {}},
        "preset": {"x": {"model.drafter": "conf/drafter/eagle3_1.yaml"}, "y": "level.yaml"},
    }
    path = write(
        axes=axes,
        baseline=None,
        fit=["longer.yaml"],
        set={"model.recompute": False, "trainer.max_steps": 2},
    )
    study = read_study(path)
    given = arguments(study, {"aux": "a", "preset": "x"})
    assert given[:2] == ["--config", str(tmp_path / "longer.yaml")]
    assert given.index("--model.drafter=conf/drafter/eagle3_1.yaml") < given.index(
        "--model.drafter.norms.aux=none"
    )
    given = arguments(study, {"aux": "b", "preset": "y"})
    assert (
        given[2:4] == ["--config", str(tmp_path / "level.yaml")]
        and "--model.recompute=false" in given
    )
    axes["aux"]["b"] = {"model.recompute": True}
    given = arguments(read_study(write(axes=axes, baseline=None, set={"model.recompute": False})), {"aux": "b", "preset": "x"})  # fmt: skip # noqa: E501
    assert [arg for arg in given if "recompute" in arg] == ["--model.recompute=true"]


def axes(**levels: Any) -> dict[str, Any]:
    """One axis x with the levels b, which is read first, and a, the baseline, as it is."""
    return {"axes": {"x": {"b": levels, "a": {}}}, "baseline": {"x": "a"}}


ALONE: dict[str, Any] = axes(**{"model.ttt_steps": 2}) | {"leave_out": [{"x": "b"}]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (axes(**{"model.ttt_step": 1}), "arm x=b: unrecognized .*model.ttt_step=1"),
        (axes(**{"data.seqlen": 16}), "arm x=b: .*Option 'seqlen' is not accepted"),
        (
            axes(**{"model.drafter.norms.output": False}),
            "arm x=b: recurrence PostNorm needs norms.output=true",
        ),
        (
            axes(**{"model.drafter.attention_window": 16, "model.ttt_steps": 17}),
            "arm x=b: attention_window 16 is less",
        ),
        (
            axes(**{"data.seq_len": 512}),
            "arm x=b: data.seq_len 512 exceeds the target's 256 positions",
        ),
        (axes(**{"model.target.source": "/nowhere"}), "arm x=b: /nowhere: no such directory"),
        (
            axes(**{"model.ttt_steps": 4}),
            "arms x=b and x=a come to the same training and the same measures",
        ),
        (axes(**{"evaluate.shape": ["bush"]}), "arm x=b: evaluate: .*'bush'"),
        (
            axes(**{"evaluate.max_new_token": 5}),
            "arm x=b: evaluate: unrecognized arguments: --max_new_token=5",
        ),
        (
            axes(**{"evaluate.temperatures": [0, 1]}),
            "arm x=b: evaluate: temperatures: a study has one",
        ),
        (
            axes(**{"evaluate.suite": ["gsm8k"]}),
            "arm x=b: evaluate: suite: a study has one set of prompts",
        ),
        (
            ALONE | {"drift": {"depths": 8, "max_new_tokens": 8}},
            "drift: depths is 8: it must be below max_new_tokens, 8",
        ),
        (
            axes(**{"drift.depths": 5}),
            "arm x=b: level b of axis x gives drift.depths, but the study has no drift",
        ),
        (axes(**{"model.features.rows": 1}), "arm x=b: model.features is the study's to give"),
        (
            axes(**{"trainer.max_steps": 3}),
            "arm x=b: it trains on 192 tokens, the baseline, x=a, on 128:",
        ),
        (
            axes(
                **{
                    "trainer.callbacks": [
                        {"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss"}}
                    ]
                }
            ),
            "arm x=b: trainer.max_time or EarlyStopping may end it early",
        ),
        (ALONE | {"evaluate": {"prompts": "nowhere.jsonl"}}, "nowhere.jsonl: no such file"),
        (
            ALONE | {"evaluate": {"prompts": "x", "prompts_count": 3}},
            "evaluate: prompts_count is of embedded prompts",
        ),
        (ALONE | {"evaluate": {"prompts_count": 1}}, "evaluate: prompts_count is 1"),
        (
            axes(**{"evaluate.attention_window": 8}),
            "arm x=b: evaluate: attention_window must be full or at least 16, not 8",
        ),
        (
            axes(**{"evaluate.attention_sinks": 4}),
            "arm x=b: evaluate: attention_sinks 4 keep tokens beyond a window, .* full: set both",
        ),
        (
            axes(
                **{
                    "model.drafter": "conf/drafter/dflash.yaml",
                    "model.drafter.draft_vocab_size": "all",
                    "model.ttt_steps": 15,
                    "evaluate.attention_window": 32,
                }
            ),
            r"evaluate: attention_window and .* \(entry KVInjection\) .*: leave both options out",
        ),
    ],
)
def test_an_illegal_arm_is_refused_with_its_name(
    planned: MakePlan, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as found:
        planned(**changes, seeds=[0])
    assert "\n" not in str(found.value)


@pytest.mark.slow
def test_arms_of_other_windows_share_their_training(planned: MakePlan) -> None:
    """Each window is a separate measure of one drafter, with another key."""
    levels = {
        "full": {},
        "narrow": {"evaluate.attention_window": 32, "evaluate.attention_sinks": 4},
    }
    plan = planned(axes={"window": levels}, baseline=None, seeds=[0])
    kinds = [job.kind for job in plan.jobs.values()]
    assert kinds.count("fit") == 1 and kinds.count("evaluate") == 2
    full, narrow = plan.arms
    assert arm_differences(full, narrow) == [
        "evaluate.attention_window: none to 32",
        "evaluate.attention_sinks: none to 4",
    ]
    assert narrow.drafter.attention_window == "full"
    of_all = {"attention_window": 32, "attention_sinks": 4}
    plan = planned(evaluate=of_all, seeds=[0])
    for arm in plan.arms:
        assert of_all.items() <= arm.measures["evaluate"].config.items()


def test_one_study_has_one_target(
    planned: MakePlan, target_directory: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(target_directory, tmp_path / "other")
    same = shutil.copytree(target_directory, tmp_path / "same")
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config + "\n")
    levels = {"here": {}, "moved": {"model.target.source": str(same), "model.ttt_steps": 2}}
    levels["trained"] = {"model.target.dtype": "bfloat16", "evaluate.target.dtype": "float32"}
    assert planned(axes={"x": levels}, baseline=None, seeds=[0])
    with pytest.raises(
        ValueError, match="arm x=b: it is evaluated on another target than the base"
    ):
        planned(**axes(**{"model.target.source": str(other)}), seeds=[0])
    with pytest.raises(ValueError, match=r"arm x=b: .* or in another dtype"):
        planned(**axes(**{"evaluate.target.dtype": "bfloat16"}), seeds=[0])


@pytest.mark.slow
def test_data_may_differ_along_an_axis_of_data_alone(
    planned: MakePlan, text_file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.txt"
    other.write_text(text_file.read_text().replace("add", "sub"))
    levels = {"a": {}, "b": {"data.train": str(other)}}
    levels["wide"] = {"data.batch_size": 4, "trainer.max_steps": 1}  # as many tokens
    plan = planned(axes={"data": levels}, baseline=None, seeds=[0])
    assert plan.unequal == () and [job.kind for job in plan.jobs.values()].count("cache") == 2
    plan = planned(**axes(**{"data.seq_len": 16}), seeds=[0], allow_unequal=True)
    (told,) = plan.unequal
    assert told.startswith("arm x=b: it trains on 64 tokens")
    with pytest.raises(ValueError, match=r"arm x=b: it trains on 64 tokens, .*--allow_unequal"):
        check_equal(plan.baseline, plan.arms)
    with pytest.raises(
        ValueError, match=r"arm x=b: its length is not in steps, .* by trainer.max_steps"
    ):
        planned(
            **axes(**{"data.seed": 1}),
            seeds=[0],
            set={"trainer.max_steps": -1, "trainer.max_epochs": 1},
        )
