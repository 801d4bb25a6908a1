"""STUDY.yaml: what is read, and what is refused before any arm is looked at."""

import re
from pathlib import Path
from typing import Any

import pytest

from specdec.sweep.axes import Setting
from specdec.sweep.study import read_study
from tests.sweep.made import Write

AXIS = {"off": {"model.ttt_steps": 1}, "on": {"model.ttt_steps": 2}}


def test_names_are_text_and_the_short_form_names_its_values(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model: {ttt_steps: 3}\n")
    (tmp_path / "s.yaml").write_text(
        "name: s\nfit: mine.yaml\naxes:\n  norm:\n    off: {model.drafter.norms.aux: none}\n"
        "    on: [mine.yaml, {model.recompute: true}]\n  K: {model.ttt_steps: [1, 2]}\n"
        "  loss: {model.loss: [LKAlpha, {class_path: SoftCrossEntropy}, conf/losses/own.yaml]}\n"
        "baseline: {norm: on, K: 1, loss: own}\nseeds: [7, 1, 2]\nfeatures: on_the_fly\ndesign: one_factor\n"
    )
    study = read_study(tmp_path / "s.yaml")
    assert [axis.names for axis in study.axes] == [["off", "on"], ["1", "2"], ["LKAlpha", "SoftCrossEntropy", "own"]]
    assert study.baseline == {"norm": "on", "K": "1", "loss": "own"} and study.seeds == (7, 1, 2)
    assert study.axes[0].level("on").files == (str(tmp_path / "mine.yaml"),) == study.files
    assert study.axes[0].level("on").settings == (Setting("model.recompute", True),)
    assert study.axes[0].level("off").settings[0].argument == "--model.drafter.norms.aux=none"
    assert study.axes[2].level("SoftCrossEntropy").settings[0].argument == (
        '--model.loss={"class_path": "SoftCrossEntropy"}'
    )
    again = tmp_path / "again.yaml"
    again.write_text(study.text)
    assert read_study(again) == study  # what is written out is the same study


def test_a_grid_without_a_baseline_has_the_first_levels(write: Write) -> None:
    assert read_study(write(baseline=None)).baseline == {"fc_norm": "off", "K": "1"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axis": {}}, "no such key: axis; did you mean axes?"),
        ({"name": "a b"}, "name: a study needs a name"),
        ({"axes": {}}, "axes: a study needs at least one axis"),
        ({"axes": {"K": {"model.ttt_steps": [1]}}, "baseline": None}, "axes.K: an axis needs at least two levels"),
        ({"axes": {"K": {"model.ttt_steps": [1, 1]}}, "baseline": None}, "axes.K: 1 stands twice"),
        ({"axes": {"K": [1, 2]}}, "axes.K: must be levels with their dotted keys"),
        ({"axes": {"K": {"a": {"model.ttt_steps": 1}, "b": 3}}}, "axes.K.b: must be dotted keys, a config file"),
        ({"axes": {"K": {"a": "conf/nowhere.yaml", "b": {}}}}, "axes.K.a: conf/nowhere.yaml: no such file"),
        ({"axes": {"K": {"a": "model", "b": {}}}}, "axes.K.a: 'model' is neither a config file"),
        ({"axes": {"a b": AXIS}}, "axes.a b: an axis's name"),
        ({"axes": {"K": {"a b": {}, "c": {}}}}, "axes.K.a b: a level's name must be one word"),
        ({"axes": {"K": {"a": {"seed_everything": 1}, "b": {}}}}, "list them under seeds"),
        ({"axes": {"K": {"a": {"evaluate.limit": 1}, "b": {}}}}, "compared prompt by prompt"),
        ({"axes": {"K": {"a": {"evaluate": {}}, "b": {}}}}, "by dotted keys, such as evaluate.max_new_tokens"),
        ({"axes": {"K": {"a": {"model-x": 1}, "b": {}}}}, "'model-x' is no dotted key"),
        ({"axes": {"K": AXIS, "steps": AXIS}}, "axes K and steps both give model.ttt_steps"),
        ({"axes": {"K": {"model.loss": [{"class_path": "A", "init_args": {"b": 1}}, "B"]}}}, "write the levels out"),
        ({"baseline": {"fc_nrom": "off", "K": 1}}, "baseline: no such key: fc_nrom; did you mean fc_norm?"),
        ({"baseline": {"fc_norm": "of", "K": 1}}, "axis fc_norm has no level of; it has: off, on"),
        ({"baseline": {"K": 1}}, "baseline: give a level of fc_norm too; it has: off, on"),
        ({"baseline": None, "design": "one_factor"}, "baseline: give a level of fc_norm too"),
        ({"leave_out": [{"k": 1}]}, "leave_out: no such key: k; did you mean K?"),
        ({"leave_out": {"K": 1}}, "leave_out: must be a list"),
        ({"leave_out": [{}]}, "without a level would leave all arms out"),
        ({"leave_out": [{"K": 1}, {"K": 2}]}, "nothing is left of 4 arms"),
        ({"seeds": [0, 1]}, "2 are too few .* or --allow_few_seeds"),
        ({"seeds": []}, "0 are too few to tell an effect from chance: give at least 3$"),
        ({"seeds": [0, 1, 1]}, "names one twice"),
        ({"seeds": [0, 1, True]}, "must be a list of numbers"),
        ({"features": "cache"}, "must be cached or on_the_fly, not cache"),
        ({"set": {"evaluate.plain": True}}, "set: evaluate.plain: what holds for the measures of all arms"),
        ({"evaluate": {"drafter": "x"}}, "evaluate: drafter is the study's to give"),
        ({"evaluate": ["chain"]}, "evaluate: must be the arguments of specdec evaluate"),
        ({"fit": 3}, "fit: must be a list of config files"),
    ],
)
def test_refused(write: Write, changes: dict[str, Any], message: str) -> None:
    path = write(**changes)
    with pytest.raises(ValueError, match=message) as found:
        read_study(path)
    assert str(found.value).startswith(f"{path}: ") and "\n" not in str(found.value)


def test_few_seeds_only_if_asked_for(write: Write) -> None:
    assert read_study(write(seeds=[3]), allow_few_seeds=True).seeds == (3,)
    with pytest.raises(ValueError, match=r"give at least 3$"):
        read_study(write(seeds=[]), allow_few_seeds=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\naxes: {K: 1\n", "line 3: not a study"),
        ("name: a\nname: b\n", "line 2: not a study: 'name' stands twice"),
        ("axes:\n  K:\n    a: {x: 1}\n    a: {x: 2}\n", "line 4: not a study: 'a' stands twice"),
        ("[1, 2]\n", "must be a mapping"),
        ("name: \x07\n", "s.yaml: not a study: unacceptable character"),
    ],
)
def test_what_is_no_yaml_mapping_is_told_by_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_study(tmp_path / "s.yaml")
    with pytest.raises(ValueError, match="no such file"):
        read_study(tmp_path / "other.yaml")


def test_the_studies_of_the_page_are_studies(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "study.md").read_text()
    whole, generations = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "study.yaml").write_text(whole)
    study = read_study(tmp_path / "study.yaml")
    assert len(study.design.combinations) == 7 and study.baseline == {"fc_norm": "off", "K": "4"}
    (tmp_path / "study.yaml").write_text(f"name: generations\n{generations}evaluate: {{}}\n")
    assert read_study(tmp_path / "study.yaml").axes[0].names == ["EAGLE-1", "EAGLE-2", "EAGLE-3"]
