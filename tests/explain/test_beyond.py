"""Other ways to ask, the export and the engine."""

from pathlib import Path

import pytest
import torch

from specdec.drafter import DrafterSpec
from specdec.evaluation.prompts import Prompt
from specdec.explain import beyond
from specdec.explain.answers import Answered, answered
from specdec.explain.beyond import Perturbed, exported, of_engine, perturbed, under
from specdec.explain.levels import OWN_FEATURES, measure, passes
from specdec.export import export_drafter
from specdec.parity.asked import Answer
from specdec.parity.exported import opened
from specdec.robustness.parse import parse_conditions
from specdec.robustness.setting import Setting
from specdec.target import Target
from tests.explain import made
from tests.explain.made import DEPTH, NEW, PROMPTS
from tests.export.made import made_drafter
from tests.perfect import perfect_drafter


@pytest.mark.parametrize("name", ["eagle1", "eagle3_1"])
def test_an_export_accepts_what_its_drafter_does(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = made.unsure()
    drafter = made.erring(name, target, 0.2 if name == "eagle3_1" else 0.7)
    if drafter.config.head == "target":
        drafter.lm_head.weight.copy_(target.head_weight())
    where = export_drafter(drafter, target, tmp_path / "served")
    served = opened(where.directory, where.method, target)
    texts = answered(target, PROMPTS[:3], NEW, DEPTH)
    runs = [run[OWN_FEATURES] for run in measure(target, drafter, texts, DEPTH)]
    own = [[run[place] for place in passes(run)] for run in runs]
    assert sum(map(sum, own)) > 5
    calls: list[int] = []
    asked = beyond.engine
    monkeypatch.setattr(beyond, "engine", lambda *args: calls.append(len(args[3])) or asked(*args))
    found = [exported(target, served, text, DEPTH, passes(run)) for text, run in zip(texts, runs, strict=True)]
    assert found == own
    assert calls == [len(passes(run)) for run in runs]  # no place in vain
    wrong = [exported(target, served, text, DEPTH, [0, 1]) for text in texts]
    assert wrong == own  # whatever is guessed


def test_conditions_of_robustness(target_directory: Path) -> None:
    target = Target.load(target_directory)
    raw = [Prompt(str(number), None, None, None, text) for number, text in enumerate(["<s>def", "def"])]
    setting = Setting(target, raw, 4, 2)
    (one,) = perturbed(parse_conditions(["no_bos"]), setting)
    assert one.asked == [target.tokenizer.encode("def", add_special_tokens=False), None]
    torch.manual_seed(0)
    drafter = made_drafter(DrafterSpec(draft_vocab_size="all"), target)
    done: list[int] = []
    passes, none = under(one, target, drafter, 4, 2, done.append)
    assert sum(passes) + len(passes) >= 3 and none == [] and sum(done) == 2
    with pytest.raises(ValueError, match="perturb no_template: no prompt is written by a chat template"):
        perturbed(parse_conditions(["no_template"]), setting)


def test_noise_reaches_the_drafter_alone() -> None:
    target = made.sure()
    drafter = perfect_drafter(target, made.SPECS["eagle3_1"])
    (condition,) = parse_conditions(["noise_embedding:alpha=5"])
    noisy = under(Perturbed(condition, PROMPTS[:2]), target, drafter, NEW, DEPTH, lambda done: None)
    assert max(map(max, noisy)) <= DEPTH and sum(map(sum, noisy)) < 0.7 * DEPTH * sum(map(len, noisy))


def text(ids: list[int], kept: int, end: int | None) -> Answered:
    return Answered([7, *ids], 1, kept, end)


def test_an_engines_passes_end_where_decodings_do() -> None:
    ids = [1, 2, 3, 4, 5, 6]
    answer = Answer([7], ids, [1, 3, 4], [1, 0, 3], (2, 1, 1))
    assert of_engine(answer, text(ids, 6, None), 6, frozenset()) == [1, 0, 3]
    assert of_engine(answer, text(ids, 5, 5), 6, frozenset({5})) == [1, 0, 0]
    assert of_engine(answer, text(ids, 3, 3), 6, frozenset({3})) == [1]  # the end token was a draft
    assert of_engine(answer, text(ids, 1, 1), 6, frozenset({1})) == []
    assert of_engine(answer, text([*ids, 8, 9], 6, 7), 6, frozenset({8})) == [1, 0, 2]  # our target says 8 next
    assert of_engine(answer._replace(ids=[1, 2, 3, 4, 5, 5]), text([*ids, 8], 6, 7), 6, frozenset({8})) == [1, 0, 3]


def test_answers_begin_at_the_prompts_end() -> None:
    target = made.unsure()
    (found,) = answered(target, [PROMPTS[2]], 5, DEPTH)
    assert (found.prompt, found.kept, found.end, len(found.ids)) == (7, 5, None, 7 + 5 + DEPTH)
    assert list(found.anchors) == [6, 7, 8, 9] and list(found.slots(2)) == [6, 7, 8, 9, 10]
