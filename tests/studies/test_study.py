"""A study file: what is read, which arms a design has, and what is refused before any arm is looked at."""

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.commands.pretraining import PretrainConfig
from specdec.studies.arms import argument, read_arms
from specdec.studies.study import Level, arm_name, combinations
from specdec.studies.study_file import read_study
from tests.studies.conftest import Write

ROOT = Path(__file__).parents[2]
AXIS = {"off": {"model.ttt_steps": 1}, "on": {"model.ttt_steps": 2}}
ARMS = {  # of the shipped studies
    "generations": 4, "drift": 4, "fusion": 8, "losses": 8, "data_scale": 12, "drift_real": 8, "robust_real": 4,
    "neighbours": 5, "fp8": 2, "first": 2, "recurrence": 5, "transplant": 4, "short_chains": 2, "crossing": 8,
    "calibration": 2,
}  # fmt: skip


def test_names_are_text_and_the_short_form_names_its_values(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model: {ttt_steps: 3}\n")
    (tmp_path / "s.yaml").write_text(
        "name: s\nfit: mine.yaml\naxes:\n  norm:\n    off: {model.drafter.norms.aux: none}\n"
        "    on: [mine.yaml, {model.recompute: true}]\n  K: {model.ttt_steps: [1, 2]}\n"
        "  loss: {model.loss: [LKAlpha, {class_path: SoftCrossEntropy}, conf/losses/own.yaml]}\n"
        "baseline: {norm: on, K: 1, loss: own}\nseeds: [7, 1, 2]\nfeatures: on_the_fly\ndesign: one_factor\n"
    )
    study = read_study(tmp_path / "s.yaml")
    assert [list(levels) for levels in study.axes.values()] == [
        ["off", "on"], ["1", "2"], ["LKAlpha", "SoftCrossEntropy", "own"]
    ]  # fmt: skip
    assert study.baseline == {"norm": "on", "K": "1", "loss": "own"} and study.seeds == (7, 1, 2)
    assert study.axes["norm"]["on"] == Level(
        (str(tmp_path / "mine.yaml"),), {"model.recompute": True}
    )
    assert argument(
        "model.loss", study.axes["loss"]["SoftCrossEntropy"].settings["model.loss"]
    ) == ('--model.loss={"class_path": "SoftCrossEntropy"}')
    assert study.text == (tmp_path / "s.yaml").read_text()


def test_a_grid_without_a_baseline_has_the_first_levels_and_few_seeds_must_be_asked_for(
    write: Write,
) -> None:
    assert read_study(write(baseline=None)).baseline == {"fc_norm": "off", "K": "1"}
    assert read_study(write(seeds=[3]), allow_few_seeds=True).seeds == (3,)


def axes_of(sizes: list[int]) -> dict[str, list[str]]:
    return {f"x{n}": [f"l{i}" for i in range(size)] for n, size in enumerate(sizes)}


@given(st.lists(st.integers(2, 4), min_size=1, max_size=4), st.data())
def test_what_a_design_has(sizes: list[int], data: st.DataObject) -> None:
    axes = axes_of(sizes)
    baseline = {axis: data.draw(st.sampled_from(levels)) for axis, levels in axes.items()}
    grid = {arm_name(each) for each in combinations("grid", axes, baseline)}
    assert grid == {
        " ".join(f"{axis}={level}" for axis, level in zip(axes, levels, strict=True))
        for levels in itertools.product(*axes.values())
    }
    one_factor = combinations("one_factor", axes, baseline)
    assert one_factor[0] == baseline and len(one_factor) == 1 + sum(size - 1 for size in sizes)
    assert all(
        sum(each[axis] != level for axis, level in baseline.items()) == 1 for each in one_factor[1:]
    )
    assert len({arm_name(each) for each in one_factor}) == len(one_factor)


@pytest.mark.parametrize(
    ("design", "left_out", "found"),
    [
        (
            "grid",
            [{"x0": "l1", "x1": "l2"}, {"x1": "l1"}],
            ["x0=l0 x1=l0", "x0=l0 x1=l2", "x0=l1 x1=l0"],
        ),
        ("grid", [{"x0": "l0", "x1": "l0"}], "the baseline, arm x0=l0 x1=l0, is left out"),
        ("one_factor", [{"x0": "l1", "x1": "l1"}], "x0=l1 x1=l1 is in no arm"),
    ],
)
def test_what_is_left_out(
    design: str, left_out: list[dict[str, str]], found: list[str] | str
) -> None:
    axes = axes_of([2, 3])
    baseline = {axis: levels[0] for axis, levels in axes.items()}
    if isinstance(found, list):
        assert [arm_name(each) for each in combinations(design, axes, baseline, left_out)] == found
    else:
        with pytest.raises(ValueError, match=found):
            combinations(design, axes, baseline, left_out)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axis": {}}, "no such key: axis; there are: name, fit"),
        ({"name": "a b"}, "name: a study needs a name"),
        ({"axes": {}}, "axes: a study needs at least one axis"),
        (
            {"axes": {"K": {"model.ttt_steps": [1]}}, "baseline": None},
            "axes.K: an axis needs at least two levels",
        ),
        (
            {"axes": {"K": {"model.ttt_steps": [1, 1]}}, "baseline": None},
            "axes.K: a level stands twice: 1, 1",
        ),
        (
            {"axes": {"K": {"a": {"model.ttt_steps": 1}, "b": 3}}},
            "axes.K.b: must be dotted keys, as .* a config file",
        ),
        (
            {"axes": {"K": {"a": "conf/nowhere.yaml", "b": {}}}},
            "axes.K.a: conf/nowhere.yaml: no such file",
        ),
        ({"axes": {"K": {"a": {"seed_everything": 1}, "b": {}}}}, "list them under seeds"),
        ({"axes": {"K": {"a": {"evaluate.limit": 1}, "b": {}}}}, "compared prompt by prompt"),
        ({"axes": {"K": {"a": {"model-x": 1}, "b": {}}}}, "'model-x' is no dotted key"),
        (
            {"axes": {"K": AXIS, "steps": json.loads(json.dumps(AXIS))}},
            "axes K and steps both give model.ttt_steps",
        ),
        (
            {"axes": {"K": {"model.loss": [{"class_path": "A", "init_args": {"b": 1}}, "B"]}}},
            "write the levels out",
        ),
        ({"design": "fractional"}, "design: must be grid or one_factor, not fractional"),
        (
            {"baseline": {"fc_nrom": "off", "K": 1}},
            "baseline: no such key: fc_nrom; there are: fc_norm, K",
        ),
        ({"baseline": {"fc_norm": "of", "K": 1}}, "axis fc_norm has no level of; it has: off, on"),
        ({"baseline": {"K": 1}}, "baseline: give a level of fc_norm too; it has: off, on"),
        ({"leave_out": [{}]}, "leave_out: must be a list of levels"),
        ({"seeds": [0, 1]}, "2 are too few .* or --allow_few_seeds"),
        ({"seeds": [0, 1, 1]}, "none of them twice"),
        ({"features": "cache"}, "must be cached or on_the_fly, not cache"),
        (
            {"set": {"evaluate.plain": True}},
            "set: evaluate.plain: what holds for the measures of all arms",
        ),
        ({"evaluate": {"drafter": "x"}}, "evaluate: drafter is the study's to give"),
        ({"fit": 3}, "fit and set: must be dotted keys, as .* a config file"),
    ],
)
def test_a_wrong_study_is_refused(write: Write, changes: dict[str, Any], message: str) -> None:
    path = write(**changes)
    with pytest.raises(ValueError, match=message) as found:
        read_study(path)
    assert str(found.value).startswith(f"{path}: ") and "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\naxes: {K: 1\n", "line 3: not valid YAML"),
        ("axes:\n  K:\n    a: {x: 1}\n    a: {x: 2}\n", "line 4: not valid YAML: 'a' stands twice"),
        ("[1, 2]\n", "must be a mapping"),
        ("name: \x07\n", "s.yaml: not valid YAML: unacceptable character"),
    ],
)
def test_what_is_no_yaml_mapping_is_told_by_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_study(tmp_path / "s.yaml")


def test_the_studies_of_the_page_are_studies(tmp_path: Path) -> None:
    whole, generations, primary = re.findall(
        r"```yaml\n(.*?)```", (ROOT / "docs" / "study.md").read_text(), re.DOTALL
    )
    (tmp_path / "study.yaml").write_text(whole)
    study = read_study(tmp_path / "study.yaml")
    assert len(study.combinations) == 7 and study.baseline == {"fc_norm": "off", "K": "4"}
    (tmp_path / "study.yaml").write_text(f"name: generations\n{generations}evaluate: {{}}\n")
    assert list(read_study(tmp_path / "study.yaml").axes["generation"]) == [
        "EAGLE-1",
        "EAGLE-2",
        "EAGLE-3",
    ]
    axes = {
        "fc_norm": {"off": {}, "on": {}},
        "norm_output": {"off": {}, "on": {}},
        "K": {"model.ttt_steps": [1, 4]},
    }
    (tmp_path / "study.yaml").write_text(f"name: both\naxes: {json.dumps(axes)}\n{primary}")
    assert [str(one) for one in read_study(tmp_path / "study.yaml").primary] == [
        "norm_output: on - off (K=4)", "norm_output: on - off (K=4)",
        "fc_norm=on norm_output=on - fc_norm=off norm_output=off (K=4)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in list(ARMS)[:5]), *list(ARMS)[5:]],
)
def test_the_arms_of_a_shipped_study_are_legal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a target as deep as the embedded one, also those that are for a chat model; every level is parsed once."""
    shape = PretrainConfig(out=Path("target"))
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, num_hidden_layers=shape.num_layers,
                num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
                intermediate_size=shape.intermediate, max_position_embeddings=shape.max_position_embeddings,
            )
        )  # fmt: skip
    monkeypatch.setattr("specdec.studies.arms._skeleton", lambda source: model)
    monkeypatch.setattr("sys.argv", ["specdec"])
    study = read_study(ROOT / "conf" / "study" / f"{name}.yaml")
    assert study.name == name and len(study.combinations) == ARMS[name]
    files = tuple(file.replace("chat.yaml", "quickstart.yaml") for file in study.common.files)
    study = dataclasses.replace(study, common=dataclasses.replace(study.common, files=files))
    wanted = {(axis, level) for axis, levels in study.axes.items() for level in levels}
    few, seen = [], set[tuple[str, str]]()
    while seen < wanted:
        few.append(max(study.combinations, key=lambda each: len(set(each.items()) - seen)))
        assert not set(few[-1].items()) <= seen, "a level of no arm"
        seen |= set(few[-1].items())
    assert len(read_arms(dataclasses.replace(study, combinations=tuple(few)))) == len(few)
    assert {path.stem for path in (ROOT / "conf" / "study").glob("*.yaml")} == set(ARMS)
