"""A sound set-up passes: every shipped design, text and chats, 32 and 16 bits, cached features."""

from pathlib import Path

import pytest

from specdec.doctor.checks import CHECKS
from specdec.doctor.examine import made
from specdec.doctor.finding import Verdict
from specdec.features import Cached
from specdec.training.losses import LKLambda, SmoothL1, SoftCrossEntropy, Term, WeightedSum
from tests.data.tiny import CHATML_TAGGED, DROPS_THINKING, tiny_tokenizer
from tests.doctor.made import CONF, Tiny, chats, design, faults, learner, subject, target, text
from tests.features.made import fill

ALL = [name for name in CHECKS if name != "overfit"]
EAGLE1 = WeightedSum([Term(SmoothL1()), Term(SoftCrossEntropy(), 0.1)])
PRESETS = sorted(path.stem for path in (CONF / "drafter").glob("*.yaml"))
STEPS = {"eagle1": 1, "eagle2": 1}


@pytest.mark.parametrize("name", PRESETS)
def test_every_shipped_design(name: str, tmp_path: Path) -> None:
    loss = EAGLE1 if name in STEPS else SoftCrossEntropy()
    checked = subject(text(tmp_path), learner(design(name), ttt_steps=STEPS.get(name, 2), loss=loss))
    found = [one for check in ALL for one in made(check, checked)]
    assert [one for one in found if one.verdict is Verdict.FAULTY] == []
    assert {one.check for one in found} == set(ALL)
    sound = {one.what for one in found if one.verdict is Verdict.SOUND}
    assert len(sound) >= 25, "most of it can be checked"


def test_chats(tmp_path: Path) -> None:
    """Also where the drafter's parts are frozen on purpose, and a loss holds a weight constant."""
    module = learner(train_embed=True, train_head=False, loss=LKLambda())
    checked = subject(chats(tmp_path), module)
    found = [one for check in ALL for one in made(check, checked)]
    assert [one for one in found if one.verdict is Verdict.FAULTY] == []
    told = [one.what for one in found if one.check == "masks" and one.verdict is Verdict.SOUND]
    assert any("generation prompt" in what and "conversations" in what for what in told)
    assert any("hold every answer's words" in what for what in told)


@pytest.mark.parametrize("template", [CHATML_TAGGED, DROPS_THINKING])
def test_templates_that_mark_or_rewrite(template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer(template)
    monkeypatch.setattr(target("float32"), "_tokenizer", tokenizer)
    assert faults(subject(chats(tmp_path)), ["masks"]) == []


def test_what_asks_for_every_token_is_no_fault(tmp_path: Path) -> None:
    checked = subject(chats(tmp_path, answer_only=False))
    found = made("masks", checked)
    assert [one.verdict for one in found][-1] is Verdict.UNCHECKED and "answer_only" in found[-1].said
    assert faults(checked, ["masks"]) == []


def test_a_target_in_bfloat16(tmp_path: Path) -> None:
    checked = subject(text(tmp_path), learner(target=Tiny(dtype="bfloat16")))
    assert faults(checked, ALL) == []


def test_cached_features(tmp_path: Path) -> None:
    data = text(tmp_path)
    data.prepare(target("float32").tokenizer)
    directory = fill(tmp_path / "cache", target("float32"), data)
    checked = subject(data, learner(features=Cached(str(directory))))
    assert faults(checked, ["taps", "labels"]) == []
    checked.source.close()
