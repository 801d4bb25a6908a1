"""The engine in this process: what a chat target says, read back by the data module that trains on it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.cli import main
from specdec.data.chat import encode_conversations
from specdec.data.conversations import read_conversations
from specdec.data.documents import read_jsonl
from specdec.data.text import TextData
from specdec.decoding import PlainDecoder
from specdec.target import Target
from tests.data.tiny import write_jsonl
from tests.regeneration.made import LEARNT, SYSTEM, asked, messages


def run(target: Path, data: Path, out: Path, *more: str) -> int:
    argv = ["regenerate", "--target", str(target), "--data", str(data), "--out", str(out), "--max_new_tokens", "40"]
    return main([*argv, "--batch_size", "3", *more])


def rows(out: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_jsonl(out)]


def record(out: Path) -> dict[str, Any]:
    return json.loads(out.with_suffix(".json").read_text())


def test_the_targets_own_words_take_the_place_of_others(chat_target: Path, chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert run(chat_target, chats, out) == 0
    assert rows(out) == [{"id": f"row-{n}", "messages": messages(said)} for n, said in enumerate(LEARNT)]
    told = record(out)
    assert told["counts"] == {
        "rows": 4, "done": 4, "truncated": 0, "failed": 0, "skipped": 0, "written": 4, "cut_before_a_tool_call": 0,
    }  # fmt: skip
    assert told["answers"]["number"] == 6 and told["answers"]["read_back_as_other_tokens"] == 0
    assert told["asking"]["temperature"] == 0 and told["asking"]["max_new_tokens"] == 40
    assert len(told["target"]["fingerprint"]) == 64 and told["target"]["engine"] == "transformers"
    assert "specdec regenerate" in told["provenance"]["command"] and told["sessions"] == 1
    assert told["seconds"] > 0 and told["last_session"]["tokens"] == told["answers"]["tokens"]


def test_a_broken_row_may_be_left_out(chat_target: Path, chats: Path, tmp_path: Path) -> None:
    out, broken = tmp_path / "out.jsonl", tmp_path / "broken.jsonl"
    broken.write_text(chats.read_text() + '{"conversations": [{"from": ["x"], "value": "y"}]}\n')
    assert run(chat_target, broken, out) == 2
    assert run(chat_target, broken, out, "--broken", "drop") == 0
    assert len(rows(out)) == len(LEARNT)
    (left_out,) = record(out)["left_out"]
    assert left_out.startswith(f"{broken}, line 5: unknown speaker")


def test_training_sees_the_tokens_that_were_generated(chat_target: Path, chats: Path, tmp_path: Path) -> None:
    """What ChatData supervises is what the target generates greedily, turn after turn, end of turn included."""
    out = tmp_path / "out.jsonl"
    assert run(chat_target, chats, out) == 0
    target = Target.load(chat_target)
    tokenizer, decoder, ends = target.tokenizer, PlainDecoder(target), target.eos_token_ids
    documents = encode_conversations(read_conversations(str(out)), tokenizer, 256)
    for said, document in zip(LEARNT, documents, strict=True):
        history: list[dict[str, Any]] = []
        expected: list[int] = []
        for question in asked(said)[::2]:
            history.append(question)
            prompt = tokenizer.apply_chat_template(history, add_generation_prompt=True, tokenize=False)
            ids = decoder.generate(tokenizer.encode(prompt, add_special_tokens=False), 40, ends).ids
            assert ids[-1] == tokenizer.eos_token_id and tokenizer.eos_token_id not in ids[:-1]
            expected += ids
            history.append({"role": "assistant", "content": tokenizer.decode(ids[:-1])})
        assert document.ids_T[document.loss_mask_T].tolist() == expected


def test_system_and_tools_stay(chat_target: Path, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    more = [{"role": "user", "content": "call"}, call, {"role": "tool", "content": "4"}]
    path = write_jsonl(
        tmp_path / "in.jsonl",
        [
            {"conversations": [SYSTEM, *asked(LEARNT[0])], "tools": tools},
            {"messages": [*asked(LEARNT[1]), *more], "tools": tools},
            {"messages": more},
        ],
    )
    out = tmp_path / "out.jsonl"
    assert run(chat_target, path, out) == 0
    first, second = rows(out)
    assert first["messages"] == [SYSTEM, *messages(LEARNT[0])] and first["tools"] == tools
    assert second["messages"] == messages(LEARNT[1]) and second["tools"] == tools
    told = record(out)
    assert told["counts"]["cut_before_a_tool_call"] == 1
    assert told["skipped"] == {"a tool is called in the first answer": 1}


def test_answers_that_run_out_of_tokens(
    chat_target: Path, chats: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out, short = tmp_path / "out.jsonl", ["--max_new_tokens", "6"]
    assert run(chat_target, chats, out, *short) == 0
    left = {row["id"] for row in rows(out)}
    counts = record(out)["counts"]
    assert 0 < counts["truncated"] < 4 and len(left) == counts["written"] == counts["done"] == 4 - counts["truncated"]
    assert "--truncated keep" in caplog.text
    assert run(chat_target, chats, out, *short, "--truncated", "keep") == 0  # nothing is asked again
    assert record(out)["last_session"]["tokens"] == 0 and record(out)["sessions"] == 2
    whole = {row["id"]: row["messages"] for row in rows(out)}
    assert list(whole) == [f"row-{n}" for n in range(4)]
    ended = whole["row-3"][-1]["content"]  # after its first six tokens
    assert LEARNT[3][1].startswith(ended) and ended != LEARNT[3][1]


def test_what_fails_is_told_and_left_out(chat_target: Path, chats: Path, tmp_path: Path) -> None:
    data = write_jsonl(
        tmp_path / "in.jsonl", [{"messages": asked(LEARNT[0])}, {"id": "long", "messages": asked(["the sky " * 200])}]
    )
    out = tmp_path / "out.jsonl"
    assert run(chat_target, data, out) == 1  # half of all, and a tenth may
    assert run(chat_target, data, out, "--max_failed", "0.5") == 0
    assert len(rows(out)) == 1
    told = record(out)
    assert told["counts"]["failed"] == 1
    assert told["failed"]["long"].startswith(f"{data}, line 2: a prompt of ")
    assert "exceed the target's 256 positions" in told["failed"]["long"]


def test_nothing_made_is_a_failure(chat_target: Path, chats: Path, tmp_path: Path) -> None:
    assert run(chat_target, chats, tmp_path / "out.jsonl", "--max_new_tokens", "1") == 1
    assert rows(tmp_path / "out.jsonl") == []


def test_drawn_answers_depend_on_seed_row_and_turn_alone(chat_target: Path, tmp_path: Path) -> None:
    same = [{"id": f"{n}", "messages": [{"role": "user", "content": "the"}]} for n in range(8)]
    data = write_jsonl(tmp_path / "in.jsonl", same)
    hot = ["--temperature", "2", "--max_new_tokens", "4", "--truncated", "keep", "--max_failed", "1"]
    made = []
    for name, more in (("a", []), ("b", ["--batch_size", "8"]), ("c", ["--seed", "1"])):
        run(chat_target, data, tmp_path / f"{name}.jsonl", *hot, *more)
        made.append(rows(tmp_path / f"{name}.jsonl"))
    assert made[0] == made[1] != made[2]
    assert len({row["messages"][-1]["content"] for row in made[0]}) > 2


def test_plain_text_goes_on(target_directory: Path, text_file: Path, tmp_path: Path) -> None:
    """A target without a chat template: the first tokens, and what it says after them."""
    texts = [text_file.read_text()[start:] for start in (0, 37, 81, 150, 222)]
    data = write_jsonl(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    out = tmp_path / "out.jsonl"
    more = ["--prompt_tokens", "9", "--max_new_tokens", "20", "--truncated", "keep"]
    assert run(target_directory, data, out, *more) == 0
    target = Target.load(target_directory)
    tokenizer, decoder = target.tokenizer, PlainDecoder(target)
    found = rows(out)
    for text, row in zip(texts, found, strict=True):
        prompt = tokenizer.encode(text)[:9]
        ids = decoder.generate(prompt, 20, target.eos_token_ids).ids
        assert row["text"] == tokenizer.decode([*prompt, *ids]) and text.startswith(tokenizer.decode(prompt))
    train, _ = TextData(str(out), str(out)).documents(tokenizer)
    assert len(train) == 5 and all(torch.is_tensor(document.ids_T) for document in train)
    assert run(target_directory, data, tmp_path / "chat.jsonl") == 2  # these are no conversations


def test_a_target_without_a_chat_template(
    target_directory: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(target_directory, chats, tmp_path / "out.jsonl") == 2
    assert "the target's tokenizer has no chat template" in capsys.readouterr().err
