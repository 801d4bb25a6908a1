"""Arms as ``specdec fit`` would compose them, and what is refused before any begins."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.fit import configured
from specdec.plan import Configured
from specdec.sweep.arms import NOT_KEPT
from specdec.sweep.composing import arguments
from specdec.sweep.plan import Plan
from specdec.sweep.study import Study, read_study
from specdec.training.run_directory import RunDirectory
from tests.sweep.made import Write


@pytest.fixture(autouse=True)
def bare_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["specdec"])


def test_an_arm_is_what_fit_makes_of_the_same_arguments(tiny: tuple[Study, Plan]) -> None:
    study, plan = tiny
    arm = plan.arms[2]
    assert arm.name == "fc_norm=on K=1"
    flags = [setting.argument for setting in study.settings]
    given = [*flags, "--model.drafter.norms.aux=each", "--model.ttt_steps=1"]
    full = configured(Configured, "fit", given, RunDirectory()).full()
    assert arm.config == {key: value for key, value in full.items() if key not in NOT_KEPT}
    assert arm.design.norms.aux == "each" and arm.memory_bytes is not None and arm.memory_bytes > 0


def test_differences_are_those_of_specdec_diff(tiny: tuple[Study, Plan]) -> None:
    told = {arm.name: [" ".join(line.split()) for line in arm.differences] for arm in tiny[1].arms}
    assert told == {
        "fc_norm=off K=1": ["training.ttt_steps 2 1"],
        "fc_norm=off K=2": [],
        "fc_norm=on K=1": ["norms.aux none each", "training.ttt_steps 2 1"],
        "fc_norm=on K=2": ["norms.aux none each"],
    }


def test_levels_win_over_set_and_what_is_inside_a_part_comes_after_it(write: Write, tmp_path: Path) -> None:
    (tmp_path / "longer.yaml").write_text("model: {ttt_steps: 3}\ntrainer: {max_steps: 9}\n")
    (tmp_path / "level.yaml").write_text("model: {ttt_steps: 4}\n")
    axes = {
        "aux": {"a": {"model.drafter.norms.aux": "none"}, "b": {}},
        "preset": {"x": {"model.drafter": "conf/drafter/eagle3_1.yaml"}, "y": "level.yaml"},
    }
    path = write(axes=axes, baseline=None, fit=["longer.yaml"], set={"model.recompute": False, "trainer.max_steps": 2})
    study = read_study(path)
    given = arguments(study, {"aux": "a", "preset": "x"})
    assert given[:2] == ["--config", str(tmp_path / "longer.yaml")]
    assert given.index("--model.drafter=conf/drafter/eagle3_1.yaml") < given.index("--model.drafter.norms.aux=none")
    given = arguments(study, {"aux": "b", "preset": "y"})
    assert given[2:4] == ["--config", str(tmp_path / "level.yaml")] and "--model.recompute=false" in given
    axes["aux"]["b"] = {"model.recompute": True}
    given = arguments(read_study(write(axes=axes, baseline=None, set={"model.recompute": False})), {"aux": "b", "preset": "x"})  # fmt: skip # noqa: E501
    assert [arg for arg in given if "recompute" in arg] == ["--model.recompute=true"]


def axes(**levels: Any) -> dict[str, Any]:
    """One axis x with the levels a, as it is, and b."""
    return {"axes": {"x": {"a": {}, "b": levels}}, "baseline": None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (axes(**{"model.ttt_step": 1}), "arm x=b: unrecognized .*model.ttt_step=1; did you mean model.ttt_steps?"),
        (axes(**{"data.seqlen": 16}), "arm x=b: .*Option 'seqlen' is not accepted; did you mean data.seq_len?"),
        (axes(**{"model.ttt_steps": "many"}), 'arm x=b: .*"model.ttt_steps"'),
        (axes(**{"model.drafter.norms.output": False}), "arm x=b: recurrence PostNorm needs norms.output=true"),
        (axes(**{"model.drafter.attention_window": 16, "model.ttt_steps": 17}), "arm x=b: attention_window 16 is less"),
        (axes(**{"data.seq_len": 512}), "arm x=b: data.seq_len 512 exceeds the target's 256 positions"),
        (axes(**{"model.drafter.aux_layers": [1, 9]}), "arm x=b: .*9"),
        (axes(**{"model.target.source": "/nowhere"}), "arm x=b: /nowhere: no such directory"),
        (axes(**{"model.ttt_steps": 7}), "arms x=a and x=b come to the same training and the same measures"),
        (axes(**{"evaluate.growth": ["bush"]}), "arm x=b: evaluate: growth 'bush'"),
        (axes(**{"evaluate.target.dtype": "float23"}), "arm x=b: evaluate: unknown dtype 'float23'"),
        (axes(**{"evaluate.max_new_token": 5}), "arm x=b: evaluate: .*did you mean max_new_tokens?"),
        (axes(**{"drift.depths": 5}), "arm x=b: level b of axis x gives drift.depths, but the study has no drift"),
        (axes(**{"model.features.rows": 1}), "arm x=b: model.features is the study's to give"),
        (
            axes(**{"trainer.max_steps": 3}),
            "arm x=b: it trains on 192 tokens, the baseline, x=a, on 128 .trainer.max_st",
        ),
        (axes(**{"trainer.max_epochs": 1}), "arm x=b: trainer.max_epochs is 1, the baseline's none"),
        (axes(**{"trainer.max_time": "00:01:00:00"}), "arm x=b: trainer.max_time may end it early"),
        (
            axes(**{"trainer.callbacks": [{"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss"}}]}),
            "arm x=b: EarlyStopping, of trainer.callbacks, may end it early",
        ),
        ({"evaluate": {"prompts": "nowhere.jsonl"}}, "nowhere.jsonl: no such file"),
        ({"evaluate": {"prompts": "x", "prompts_count": 3}}, "evaluate: prompts_count is of embedded prompts"),
        ({"evaluate": {"prompts_count": 1}}, "evaluate: prompts_count is 1"),
    ],
)
def test_refused_with_the_arms_name(planned: Callable[..., Plan], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as found:
        planned(**changes, seeds=[0])
    assert "\n" not in str(found.value)


def test_what_contradicts_itself_is_refused(planned: Callable[..., Plan], tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("model: {ttt_steps: 3, drafter: conf/drafter/eagle3.yaml}\n")
    (tmp_path / "two.yaml").write_text("model: {drafter: conf/drafter/eagle3_1.yaml}\n")
    files = {"x": {"a": {}, "b": "one.yaml"}, "y": {"a": {}, "b": "two.yaml"}}
    message = r"arm x=b y=b: model.drafter.norms.aux is given by .*one.yaml \(axis x\) and by .*two.yaml \(axis y\)"
    alone: dict[str, Any] = {"set": {"model.drafter.draft_vocab_size": 32000}, "baseline": {"x": "b", "y": "b"}}
    with pytest.raises(ValueError, match=message):
        planned(axes=files, leave_out=[{"x": "a"}, {"y": "a"}], **alone)
    for key in ("model.ttt_steps", "model.drafter.norms"):
        given = {"model.ttt_steps": 1} if "ttt" in key else {key: {"aux": "each"}}
        with pytest.raises(ValueError, match=rf"arm x=b: set gives {key}, and so does .*one.yaml \(axis x\)"):
            planned(axes={"x": files["x"]}, baseline=None, set={**alone["set"], **given})


def test_one_study_has_one_target(planned: Callable[..., Plan], target_directory: Path, tmp_path: Path) -> None:
    other = shutil.copytree(target_directory, tmp_path / "other")
    same = shutil.copytree(target_directory, tmp_path / "same")
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config + "\n")
    assert planned(**axes(**{"model.target.source": str(same), "model.ttt_steps": 2}), seeds=[0])
    with pytest.raises(ValueError, match="arm x=b: it is evaluated on another target than the base"):
        planned(**axes(**{"model.target.source": str(other)}), seeds=[0])
    with pytest.raises(ValueError, match=r"arm x=b: .* or in another dtype"):
        planned(**axes(**{"evaluate.target.dtype": "bfloat16"}), seeds=[0])
    assert planned(**axes(**{"model.target.dtype": "bfloat16"}), seeds=[0])


def test_the_same_tokens_in_other_batches_are_equal(planned: Callable[..., Plan]) -> None:
    plan = planned(**axes(**{"data.batch_size": 4, "trainer.max_steps": 1}), seeds=[0])
    assert plan.unequal == ()


def test_data_may_differ_along_an_axis_of_data_alone(
    planned: Callable[..., Plan], text_file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.txt"
    other.write_text(text_file.read_text().replace("add", "sub"))
    levels = {"data": {"a": {}, "b": {"data.train": str(other)}}, "K": {"model.ttt_steps": [1, 2]}}
    plan = planned(axes=levels, baseline=None, seeds=[0], alone=8)
    assert plan.unequal == () and [job.threads for job in plan.jobs.values() if job.kind == "cache"] == [1, 1]
    levels["data"]["b"] = {"data.seq_len": 16}
    with pytest.raises(
        ValueError, match=r"arm data=b K=1: it trains on 64 tokens, .*data.seq_len is 16.*--allow_unequal"
    ):
        planned(axes=levels, baseline=None, seeds=[0], leave_out=[{"data": "b", "K": 2}])
    told = planned(axes=levels, baseline=None, seeds=[0], allow_unequal=True).unequal
    assert len(told) == 2 and told[0].startswith("arm data=b K=1: it trains on 64 tokens")
    levels["data"]["b"] = {"data.seed": 1}
    with pytest.raises(ValueError, match=r"the data is an axis, and epochs .* set trainer.max_steps"):
        planned(axes=levels, baseline=None, seeds=[0], set={"trainer.max_steps": -1, "trainer.max_epochs": 1})
