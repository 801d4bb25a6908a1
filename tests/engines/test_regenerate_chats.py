"""Targets that think, write channels and call tools, answering in this process: every token that they write is kept."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from specdec.cli import main
from tests.data.families import in_default_run
from tests.data.tiny import write_jsonl
from tests.engines.chat_targets import FAMILIES, TALKS, TOOLS, Talk, Turn, generated

MOST = 80  # tokens an answer
Regenerated = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def regenerated(chat_targets: Callable[[str], Path], tmp_path: Path) -> Regenerated:
    """The rows that a family's target makes of others."""

    def make(name: str, data: list[dict[str, Any]], *more: str) -> list[dict[str, Any]]:
        path = write_jsonl(tmp_path / "in.jsonl", data)
        argv = [
            "regenerate",
            "--target",
            str(chat_targets(name)),
            "--data",
            str(path),
            "--batch_size",
            "2",
        ]
        out = tmp_path / "out.jsonl"
        assert main([*argv, "--max_new_tokens", str(MOST), "--out", str(out), *more]) == 0
        return [json.loads(line) for line in out.read_text().splitlines()]

    return make


def answers(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [message for message in row["messages"] if message["role"] == "assistant"]


def as_object(arguments: Any) -> Any:
    """The arguments of a call, which servers write as text."""
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def check_words(message: dict[str, Any], turn: Turn, thinks: bool) -> None:
    """The readable message has the parts of what was written, each in its place."""
    assert message["content"].strip() == turn.text
    assert message.get("reasoning_content", "").strip() == (turn.thought if thinks else "")
    functions = [call["function"] for call in message.get("tool_calls", [])]
    called = [(function["name"], as_object(function["arguments"])) for function in functions]
    assert called == ([] if turn.arguments is None else [("add", turn.arguments)])


@pytest.mark.parametrize("name", in_default_run(FAMILIES, "deepseek_r1"))
def test_the_tokens_of_the_rows_are_those_that_transformers_generates(
    name: str, regenerated: Regenerated, chat_targets: Callable[[str], Path]
) -> None:
    family = FAMILIES[name]
    rows = regenerated(name, [talk.row(kind) for kind, talk in family.talks.items()])
    assert [row["id"] for row in rows] == list(family.talks)
    tokenizer = AutoTokenizer.from_pretrained(chat_targets(name))
    for row, talk in zip(rows, family.talks.values(), strict=True):
        messages = answers(row)
        prompts = [message["prompt_token_ids"] for message in messages]
        assert [message["token_ids"] for message in messages] == generated(
            chat_targets(name), prompts, MOST
        )
        texts = [tokenizer.decode(message["token_ids"]) for message in messages]
        assert texts == list(map(family.write, talk.turns))
        asked = tokenizer.apply_chat_template(
            [talk.asked[0]], tools=talk.tools, add_generation_prompt=True
        )
        assert prompts[0] == asked["input_ids"]
        for message, turn in zip(messages, talk.turns, strict=True):
            check_words(message, turn, family.thinks)
        remembered = family.remembered if talk.tools else talk.turns[0].text
        assert remembered is not None and remembered in tokenizer.decode(prompts[1])


def without_tokens(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: message[name] for name in message if not name.endswith("token_ids")}
        for message in messages
    ]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.remembered])
def test_a_row_ends_where_the_target_calls_otherwise(
    name: str, regenerated: Regenerated, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = TALKS["tools"]
    spoken = Talk(
        (talk.asked[0], {"role": "user", "content": "thanks"}),
        (Turn("", "5"), Turn("", "!")),
        TOOLS,
    )
    data = [talk.row("same"), talk.row("other", {"a": 2, "b": 4}), spoken.row("spoken")]
    same, other, answered = regenerated(name, data)
    assert [message["role"] for message in same["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert (
        same["messages"][2] == talk.asked[1]
        and same["messages"][1]["tool_calls"][0]["id"] == "call_1"
    )
    for row in (other, answered):  # the target's own call is kept, and is the last
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        assert row["messages"][1]["token_ids"] == same["messages"][1]["token_ids"]
    record = json.loads((tmp_path / "out.json").read_text())
    assert (record["counts"]["complete"], record["counts"]["ended"]) == (1, 2)
    reasons = [
        "the target called otherwise than the row",
        "the target called a tool where the row answers",
    ]
    assert record["ended"] == dict.fromkeys(reasons, 1)
    said = capsys.readouterr().out
    assert all(f"1 row ended early, kept up to that answer: {reason}" in said for reason in reasons)


@pytest.mark.parametrize("name", ["gpt_oss", "glm"])
def test_an_answer_that_is_cut_off_has_no_end(
    name: str, regenerated: Regenerated, chat_targets: Callable[[str], Path]
) -> None:
    (row,) = regenerated(
        name, [TALKS["plain"].row("a")], "--max_new_tokens", "6", "--truncated", "keep"
    )
    (message,) = answers(row)
    assert message["finish_reason"] == "length" and "weight" not in message
    assert [message["token_ids"]] == generated(chat_targets(name), [message["prompt_token_ids"]], 6)
    tokenizer = AutoTokenizer.from_pretrained(chat_targets(name))
    assert not set(message["token_ids"]) & set(
        tokenizer.convert_tokens_to_ids(list(FAMILIES[name].ends))
    )


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.switched])
def test_a_switch_of_thinking_is_used(
    name: str, regenerated: Regenerated, chat_targets: Callable[[str], Path]
) -> None:
    question = TALKS["plain"].asked[0]
    more = ["--thinking", "false", "--truncated", "keep"]
    (row,) = regenerated(name, [{"messages": [question]}], *more)
    tokenizer = AutoTokenizer.from_pretrained(chat_targets(name))
    prompt = tokenizer.apply_chat_template(
        [question], add_generation_prompt=True, enable_thinking=False
    )
    assert row["messages"][1]["prompt_token_ids"] == prompt["input_ids"]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.switched])
def test_a_template_without_a_switch_is_refused_before_anything_is_answered(
    name: str,
    chat_targets: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = write_jsonl(tmp_path / "in.jsonl", [TALKS["plain"].row("a")])
    argv = [
        "regenerate",
        "--target",
        str(chat_targets(name)),
        "--data",
        str(data),
        "--thinking",
        "true",
    ]
    assert main([*argv, "--out", str(tmp_path / "out.jsonl")]) == 2
    err = capsys.readouterr().err
    assert "thinking" in err and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_a_run_that_goes_on_writes_the_same_bytes(regenerated: Regenerated, tmp_path: Path) -> None:
    data = [talk.row(kind) for kind, talk in TALKS.items()]
    regenerated("gpt_oss", data)
    out, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.journal"
    whole = out.read_bytes()
    lines = journal.read_text().splitlines(keepends=True)
    assert len(lines) == 5
    for number in (5, 3, 2):
        journal.write_text("".join(lines[:number]))
        regenerated("gpt_oss", data)
        assert out.read_bytes() == whole
