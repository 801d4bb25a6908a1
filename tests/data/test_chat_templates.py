"""What is supervised under the templates of TRL's newest release, beside an oracle that shares no code with it."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("trl")

from benchmarks.chat_oracle import verdicts
from benchmarks.chat_oracle.conversations import KINDS
from benchmarks.chat_oracle.expected import Expected
from benchmarks.chat_oracle.faults import planted_faults
from benchmarks.chat_oracle.tokenizers import sources, templates, tokenizer_of, twin_of
from benchmarks.chat_oracle.verdicts import FAILURES, Supervised, cell, expectation, ids_of, judge
from specdec.data.turns import rows_of
from tests.data.families import in_default_run
from tests.data.test_shapes import conversations, quick

QUICK = ("gptoss", "deepseek_r1_distill", "qwen3", "glm4moe", "llama3_1")


@pytest.mark.parametrize("name", in_default_run(templates(), *QUICK))
def test_every_row_is_supervised_as_the_model_writes_it_or_refused_with_the_reason(
    name: str,
) -> None:
    failures = [failure for kind in KINDS for failure in cell(name, kind).failures]
    assert not failures, "\n".join(failures)


def all_expected(name: str) -> list[Expected]:
    return [
        turn
        for kind, rows in KINDS.items()
        for k in range(len(rows))
        for turn in expectation(name, kind, k)
    ]


@pytest.mark.parametrize("name", in_default_run([*QUICK, "muse_glimmer", "cohere2"], *QUICK[:2]))
def test_what_the_oracle_expects_is_explained(name: str) -> None:
    for turn in all_expected(name):
        if not turn.choices:
            assert turn.reason
            continue
        made = Supervised(
            [
                ids_of(
                    turn.choices[0].prompt + turn.choices[0].turn, len(turn.choices[0].prompt), name
                )
            ],
            [],
        )
        (verdict,) = judge(name, [turn], made)
        assert verdict.mark in (verdicts.TWIN, verdicts.ENDS), verdict


def test_sixteen_kinds_of_conversation_and_most_templates_have_a_twin() -> None:
    assert len(KINDS) == 16
    assert len(templates()) >= 41
    assert sum(twin_of(name) is not None for name in templates()) >= 31


def made_of(*texts: tuple[str, str], reasons: tuple[str, ...] = ()) -> Supervised:
    return Supervised(
        [ids_of(prompt + turn, len(prompt), "qwen3") for prompt, turn in texts], list(reasons)
    )


def test_the_oracle_tells_what_is_wrong_with_a_run() -> None:
    (turn,) = expectation("qwen3", "plain", 0)
    prompt, words = turn.choices[0].prompt, turn.choices[0].turn

    def mark(*texts: tuple[str, str], reasons: tuple[str, ...] = ()) -> str:
        return judge("qwen3", [turn], made_of(*texts, reasons=reasons))[0].mark

    assert mark((prompt, words)) == verdicts.ENDS  # the twin marks the empty thought
    assert mark((prompt, words.removesuffix("<|im_end|>"))) == verdicts.DIFFERENT
    assert mark((prompt, words + "\n")) == verdicts.DIFFERENT
    assert mark((prompt[:-20], prompt[-20:] + words)) == verdicts.DIFFERENT
    assert mark((prompt + words[:2], words[2:])) == verdicts.DIFFERENT
    # in another context
    assert mark((prompt.replace("what is", "what"), words)) == verdicts.DIFFERENT
    assert mark((prompt, words), (prompt, words)) == verdicts.DIFFERENT  # twice
    assert mark() == verdicts.SILENT
    assert mark(reasons=("no",)) == verdicts.WRONGLY


FAULTY = ["qwen3", "glm4moe", "gptoss", "llama3_1", "gemma3", "phi3", "muse_glimmer"]
WHERE = {
    "tool dropped": ["result and answer"],
    "system dropped": ["system"],
    "thought dropped": ["thought"],
    "call dropped": ["object arguments"],
    "arguments lost": ["object arguments"],
    "tag moved back": ["plain"],
    "tag moved forward": ["plain"],
    "end tag moved": ["plain"],
}
NO_PLACE = {  # the template does not write it either: whether it is lost cannot be seen
    "tool dropped": ("gemma3", "phi3"),
    "thought dropped": ("llama3_1", "gemma3", "phi3"),
    "call dropped": ("gemma3", "phi3"),
    "arguments lost": ("gemma3", "phi3"),
}


def broken(name: str, template: str) -> Any:
    tokenizer = copy.deepcopy(tokenizer_of(name))
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("name", in_default_run(FAULTY, "glm4moe", "gemma3"))
def test_the_oracle_flags_every_planted_fault(name: str) -> None:
    for fault, template in planted_faults(sources()[name]).items():
        if name in NO_PLACE.get(fault, ()):
            continue
        failures = [
            failure
            for kind in WHERE.get(fault, ["plain", "turns"])
            for failure in cell(name, kind, tokenizer=broken(name, template)).failures
        ]
        assert failures, f"{name}: {fault}"


@pytest.mark.parametrize("name", ["qwen3", "gemma", "llama3"])
def test_tags_that_begin_too_late_are_flagged(name: str) -> None:
    twin = twin_of(name)
    assert twin is not None
    template = planted_faults(twin)["tag moved forward"]
    assert cell(name, "plain", tokenizer=broken(name, template)).failures


def test_every_failure_is_named() -> None:
    assert len(set(FAILURES)) == 4


@pytest.mark.parametrize(
    "name", in_default_run([*QUICK, "gemma4_v5", "muse_glimmer", "lfm2_2_5"], "qwen3")
)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_rows_by_shape_are_those_that_are_made_turn_by_turn(name: str, data: st.DataObject) -> None:
    shapes = quick(tokenizer_of(name))
    for item in data.draw(conversations(sources()[name])):
        assert shapes.rows(item) == rows_of(shapes.template, item)
