"""The studies of ``conf/study``, on a target as deep as the embedded one."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.embedded.config import EmbeddedConfig
from specdec.sweep.arms import read_arms
from specdec.sweep.study import Study, read_study

STUDIES = sorted((Path(__file__).parents[2] / "conf" / "study").glob("*.yaml"))
ARMS = {"generations": 4, "drift": 16, "fusion": 8, "losses": 8, "data_scale": 12}


@pytest.fixture(autouse=True)
def embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its target a study needs the shape before anything begins."""
    shape = EmbeddedConfig()
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, num_hidden_layers=shape.num_layers,
                num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
                intermediate_size=shape.intermediate, max_position_embeddings=shape.max_position_embeddings,
            )
        )  # fmt: skip
    monkeypatch.setattr("specdec.sweep.arms._skeleton", lambda source: model)
    monkeypatch.setattr("sys.argv", ["specdec"])


def one_change_at_a_time(study: Study) -> Study:
    """Arms that differ from the baseline in one axis: every level is parsed once or more."""
    near = [each for each in study.design.combinations if sum(each[a] != study.baseline[a] for a in each) <= 1]
    return dataclasses.replace(study, design=dataclasses.replace(study.design, combinations=tuple(near)))


def test_these_are_shipped() -> None:
    assert {path.stem for path in STUDIES} == set(ARMS)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_study_says_its_command_its_time_and_what_to_expect_and_its_arms_are_legal(path: Path) -> None:
    comment = " ".join(line.removeprefix("# ") for line in path.read_text().splitlines() if line.startswith("#"))
    _, use, takes, expect = re.fullmatch(r"(.*) Use: (.*) Takes: (.*) Expect: (.*)", comment).groups()  # type: ignore[union-attr]
    assert use.startswith(f"specdec sweep conf/study/{path.name}")
    assert re.search(r"\d", takes) and len(expect) > 40
    study = read_study(path)
    assert study.name == path.stem and len(study.design.combinations) == ARMS[path.stem]
    assert len(study.seeds) >= 3
    arms = read_arms(one_change_at_a_time(study))
    assert study.baseline in [arm.levels for arm in arms]
    assert {arm.levels[axis.name] for arm in arms for axis in study.axes} == {
        level for axis in study.axes for level in axis.names
    }
