"""Decoding under conditions: lossless, repeatable, and only on what can be asked."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from specdec.decoding import Chain, Growth
from specdec.drafter import Drafter
from specdec.evaluation.benchmark import benchmark
from specdec.evaluation.prompts import Prompt
from specdec.evaluation.record import Answer
from specdec.robustness import run
from specdec.robustness.parse import parse_conditions
from specdec.robustness.run import Outcome, measure, plan, plan_clean
from specdec.robustness.setting import Setting
from tests.robustness.made import CHAT, OWN, RAW, Pair, copycat, setting

GROWTH = Chain(3)
PROMPTS = [CHAT, RAW, OWN]
EVERY = [
    "no_bos", "no_template", "bare", "template:family=gemma", "no_system", "system:text=short", "language:code=zh",
    "thinking:on=false", "context:tokens=60", "temperature:value=1.0", "noise_hidden:alpha=1.0",
    "noise_embedding:alpha=1.0",
]  # fmt: skip


def outcomes(pair: Pair, found: Setting, texts: Sequence[str], **how: Any) -> list[Outcome]:
    plans = [plan_clean(found), *(plan(one, found) for one in parse_conditions(texts))]
    return [row[0] for row in measure(found, [pair.drafter], GROWTH, plans, **how)]


def counted(outcome: Outcome) -> list[tuple[str, tuple[int, ...]]]:
    return [(one.prompt_id, one.accepted) for one in outcome.answers]


def test_every_condition_is_lossless(chat: Pair) -> None:
    found = outcomes(chat, setting(chat.target, PROMPTS, new=5), EVERY, batch=2, plain=True)
    assert len(found) == 1 + len(EVERY) and all(one.plan.skipped is None for one in found)
    for one in found:
        turns = {prompt.prompt_id: len(prompt.turns or [""]) for prompt in one.plan.prompts}
        assert len(one.answers) == sum(turns.values()) and all(answer.identical is True for answer in one.answers)
        assert set(turns) | set(one.left_out) == {"chat", "raw", "own"} and not set(turns) & set(one.left_out)


def test_noise_hurts_what_is_read_and_nothing_else() -> None:
    pair = copycat()
    found = setting(pair.target, [RAW, CHAT], new=12)
    texts = ["noise_embedding:alpha=0.3", "noise_hidden:alpha=9", "noise_embedding:alpha=0", "no_bos"]
    clean, embedding, hidden, none, _ = made = outcomes(pair, found, texts, plain=True, batch=2)
    assert all(accepted == GROWTH.depth for one in clean.answers for accepted in one.accepted)
    lengths = [sum(map(sum, (one.accepted for one in own.answers))) for own in (clean, embedding)]
    assert 0 < lengths[1] < lengths[0]
    assert counted(hidden) == counted(none) == counted(clean)
    assert all(answer.identical for own in made for answer in own.answers)


def test_no_noise_is_the_clean_run_and_the_batch_does_not_matter() -> None:
    pair = copycat()
    texts = ["noise_hidden:alpha=0", "noise_embedding:alpha=0", "noise_embedding:alpha=0.3", "temperature:value=1.0"]
    found = setting(pair.target, PROMPTS, new=8)
    alone, together = (outcomes(pair, found, texts, batch=batch, seed=4) for batch in (1, 3))
    assert counted(alone[0]) == counted(alone[1]) == counted(alone[2]) != counted(alone[3])
    assert [counted(one) for one in alone] == [counted(one) for one in together]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the benchmark was asked for."""
    seen: list[dict[str, Any]] = []

    def spy(target: Any, drafter: Drafter, growths: Sequence[Growth], prompts: Sequence[Prompt], most: int, **how: Any) -> list[list[Answer]]:  # fmt: skip # noqa: E501
        seen.append({"drafter": drafter, "prompts": prompts, **how})
        return benchmark(target, drafter, growths, prompts, most, **how)

    monkeypatch.setattr(run, "benchmark", spy)
    return seen


def test_fewer_long_texts_are_decoded_side_by_side(
    chat: Pair, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "SLOTS", 60)
    outcomes(chat, setting(chat.target, [RAW]), ["context:tokens=40", "context:tokens=300"], batch=8)
    assert [call["batch"] for call in calls] == [8, 7, 1]


def test_what_cannot_be_measured_is_not_decoded(chat: Pair, calls: list[dict[str, Any]]) -> None:
    found = outcomes(chat, setting(chat.target, [RAW]), ["no_template", "no_bos"])
    assert [one.plan.skipped for one in found] == [None, "no prompt is written by a chat template", None]
    assert found[1].answers == [] and found[1].left_out == {}
    assert len(calls) == 2


def test_a_later_turn_that_does_not_fit_leaves_its_prompt_out(chat: Pair) -> None:
    long = Prompt("long", None, ["a", "b" * 380], None, None)
    found = outcomes(chat, setting(chat.target, [long, CHAT]), ["context:tokens=100"])
    assert {one.prompt_id for one in found[0].answers} == {"long", "chat"}
    assert {one.prompt_id for one in found[1].answers} == {"chat"}
    assert "exceed the target's 512 positions" in found[1].left_out["long"]


def test_prompts_that_nobody_can_decode(chat: Pair) -> None:
    huge = Prompt("huge", None, None, None, "x" * 600)
    made = plan_clean(setting(chat.target, [huge, RAW]))
    assert made.prompts == [RAW] and "positions" in made.left_out["huge"]
    assert plan(parse_conditions(["no_bos"])[0], setting(chat.target, [huge, RAW])).prompts == [RAW]
    with pytest.raises(ValueError, match=r"prompt huge: .*positions; none of 1 can be decoded"):
        plan_clean(setting(chat.target, [huge]))


def test_progress_ends_at_all_of_it(chat: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []

    @contextlib.contextmanager
    def bar(what: str, unit: str, total: int) -> Iterator[Any]:
        told.append(-total)
        yield told.append

    monkeypatch.setattr(run, "progress", bar)
    found = setting(chat.target, PROMPTS, new=5)
    plans = [plan_clean(found), plan(parse_conditions(["no_template"])[0], found)]
    measure(found, [chat.drafter, chat.drafter], GROWTH, plans)
    assert sum(told) == 0 and len(told) == 1 + 2 * (3 + 2)
