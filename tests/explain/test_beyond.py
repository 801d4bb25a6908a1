"""Other ways to ask, the export and the engine."""

from pathlib import Path

import pytest

from specdec.drafter import Drafter
from specdec.evaluation.prompts import Prompt
from specdec.explain import beyond
from specdec.explain.answers import Answered, answered
from specdec.explain.beyond import exported, of_engine, perturbed
from specdec.explain.levels import OWN_FEATURES, measure, passes
from specdec.export import export_drafter
from specdec.parity.asked import Answer
from specdec.parity.exported import opened
from specdec.target import Target
from tests.explain import made
from tests.explain.made import DEPTH, NEW, PROMPTS

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"


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


def chats(target_directory: Path) -> Target:
    target = Target.load(target_directory)
    target.tokenizer.chat_template = TEMPLATE
    return target


def test_prompts_asked_otherwise(target_directory: Path) -> None:
    target = chats(target_directory)
    turns = Prompt("a", None, ["Hi", "and?"], None, None)
    messages = Prompt("b", None, None, [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}], None)
    raw = Prompt("c", None, None, None, "<s>def")
    read = target.tokenizer.decode
    assert [read(ids) for ids in perturbed("no_template", [turns, messages], target)] == ["Hi", "y"]
    (ids,) = perturbed("system", [turns], target)
    assert read(ids) == "[system]You are a helpful assistant.[user]Hi[assistant]"
    assert [read(ids) for ids in perturbed("no_bos", [raw], target)] == ["def"]
    for name, prompt, why in (
        ("no_bos", turns, "no_bos: prompt a does not begin with"),
        ("no_template", raw, "no_template: prompt c is raw text"),
        ("system", raw, "system: prompt c: raw text takes no system prompt"),
        ("louder", raw, "there is no 'louder', choose from no_bos, no_template, system"),
    ):
        with pytest.raises(ValueError, match=why):
            perturbed(name, [prompt], target)


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
    assert isinstance(made.erring("eagle1", target, 0.1), Drafter)
