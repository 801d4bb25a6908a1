"""What ``regenerate`` writes is what training supervises: the tokens that the target generated, one for one."""

import copy
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from specdec.answering.dialogue import Dialogue, pack_ids
from specdec.cli import main
from specdec.data import ChatData
from specdec.data.chat import encode, read_conversations
from specdec.data.loader import Batch
from tests.data.families import in_default_run
from tests.data.tiny import write_jsonl
from tests.engines.chat_targets import FAMILIES, TALKS, asked_ids, generated, prompts_of

MOST = 80  # tokens an answer
ROW = 1024  # tokens

Ids = list[int]
Turns = list[tuple[Ids, Ids]]  # of every supervised turn what stands before it, and its tokens
Chats = Callable[[str], Path]


def turns_of(documents: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> Turns:
    """The supervised turns of documents, which are given as ids and masks."""
    turns = []
    for ids, mask in documents:
        edges = [
            place
            for place, (left, right) in enumerate(pairwise([False, *mask, False]))
            if left != right
        ]
        turns += [
            (list(ids[:a]), list(ids[a:b])) for a, b in zip(edges[::2], edges[1::2], strict=True)
        ]
    return turns


def encoded_turns(path: Path, tokenizer: Any) -> Turns:
    """What is supervised of a file's conversations."""
    documents = encode(read_conversations(str(path)), tokenizer, ROW)
    return turns_of(
        (document.ids_T.tolist(), document.loss_mask_T.tolist()) for document in documents
    )


def batch_turns(batch: Batch) -> Turns:
    """What is supervised in a batch, of each document by itself."""
    documents = []
    for ids_T, mask_T, documents_T in zip(*batch, strict=True):
        for number in range(int(documents_T.max()) + 1):
            document_T = documents_T == number
            documents.append((ids_T[document_T].tolist(), mask_T[document_T].tolist()))
    return turns_of(documents)


def written_turns(target: Path, name: str) -> Turns:
    """What transformers asks of a family's target, and what it generates then."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    family = FAMILIES[name]
    prompts = [
        prompt for talk in family.talks.values() for prompt in prompts_of(tokenizer, family, talk)
    ]
    return list(zip(prompts, generated(target, prompts, MOST), strict=True))


def changed(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """A file in which every assistant's message is changed."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["messages"] = [
            change(copy.deepcopy(message)) if message["role"] == "assistant" else message
            for message in row["messages"]
        ]
    return write_jsonl(path.with_name("changed.jsonl"), rows)


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A message as servers write it that give no ids."""
    return {
        key: value for key, value in message.items() if key not in ("token_ids", "prompt_token_ids")
    }


@pytest.fixture(scope="module")
def chats(chat_targets: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Chats:
    """The file that a family's target writes."""
    paths: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in paths:
            folder = tmp_path_factory.mktemp(f"chats_{name}")
            rows = [talk.row(kind) for kind, talk in FAMILIES[name].talks.items()]
            data = write_jsonl(folder / "in.jsonl", rows)
            argv = ["regenerate", "--target", str(chat_targets(name)), "--data", str(data)]
            assert (
                main([*argv, "--max_new_tokens", str(MOST), "--out", str(folder / "out.jsonl")])
                == 0
            )
            paths[name] = folder / "out.jsonl"
        return paths[name]

    return make


@pytest.mark.parametrize("name", in_default_run(FAMILIES, "deepseek_r1"))
def test_the_supervised_tokens_are_those_that_transformers_generates(
    name: str, chats: Chats, chat_targets: Callable[[str], Path], tmp_path: Path
) -> None:
    path = chats(name)
    tokenizer = AutoTokenizer.from_pretrained(chat_targets(name))
    expected = written_turns(chat_targets(name), name)
    assert [tokenizer.decode(ids) for _, ids in expected] == [
        FAMILIES[name].write(turn) for talk in FAMILIES[name].talks.values() for turn in talk.turns
    ]
    assert encoded_turns(path, tokenizer) == expected
    # by the template's form
    assert encoded_turns(changed(path, without_ids), tokenizer) == expected
    data = ChatData(str(path), val=str(changed(path, without_ids)), seq_len=ROW, batch_size=8)
    data.prepare(tokenizer)
    for split in data.splits:
        assert sorted(batch_turns(split)) == sorted(expected)
    (batch,) = data.train_dataloader()
    assert sorted(batch_turns(batch)) == sorted(expected)
    ids = torch.tensor([token for _, turn in expected for token in turn])
    assert torch.equal(
        data.supervised_counts(len(tokenizer)), torch.bincount(ids, minlength=len(tokenizer))
    )


def as_servers_say(message: dict[str, Any]) -> dict[str, Any]:
    """A message as vLLM's parsers leave it: with the line ends around the thought."""
    if message.get("reasoning_content") and not message.get("tool_calls"):
        return {
            **message,
            "content": f"\n\n{message['content']}",
            "reasoning_content": message["reasoning_content"] + "\n",
        }
    return message


@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3"])
def test_line_ends_that_a_server_leaves_around_a_thought_stand_once(
    name: str, chats: Chats, chat_targets: Callable[[str], Path]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_targets(name))
    path = changed(chats(name), lambda message: as_servers_say(without_ids(message)))
    assert [ids for _, ids in encoded_turns(path, tokenizer)] == [
        ids for _, ids in written_turns(chat_targets(name), name)
    ]


@pytest.mark.parametrize("name", in_default_run(FAMILIES, "deepseek_r1"))
def test_an_answer_that_a_server_does_not_read_trains_by_its_ids(
    name: str, chats: Chats, chat_targets: Callable[[str], Path]
) -> None:
    """Its text is then all that was written, without special tokens: a vLLM without parsers."""
    tokenizer = AutoTokenizer.from_pretrained(chat_targets(name))

    def unread(message: dict[str, Any]) -> dict[str, Any]:
        text = tokenizer.decode(message["token_ids"], skip_special_tokens=True)
        ids = {key: message[key] for key in ("prompt_token_ids", "token_ids")}
        return {"role": "assistant", "content": text, **ids}

    assert encoded_turns(changed(chats(name), unread), tokenizer) == written_turns(
        chat_targets(name), name
    )


def other_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose words were changed, and not its ids."""
    return {**message, "content": f"{message['content']}, or so"}


@pytest.mark.parametrize("name", in_default_run(FAMILIES, "deepseek_r1"))
def test_ids_that_are_not_the_messages_are_refused_or_seen(
    name: str, chats: Chats, chat_targets: Callable[[str], Path]
) -> None:
    path = chats(name)
    other = "qwen3" if name == "gpt_oss" else "gpt_oss"
    tokenizer = AutoTokenizer.from_pretrained(chat_targets(name))
    with pytest.raises(
        ValueError, match="message 2: its token_ids do not say what the message says"
    ) as refusal:
        encoded_turns(path, AutoTokenizer.from_pretrained(chat_targets(other)))
    assert "\n" not in str(refusal.value)
    expected = written_turns(chat_targets(name), name)
    for key in ("token_ids", "prompt_token_ids"):
        shorter = changed(path, lambda message, key=key: {**message, key: message[key][:-1]})
        assert encoded_turns(shorter, tokenizer) != expected  # the comparison sees it
    with pytest.raises(ValueError, match="its token_ids do not say what the message says"):
        encoded_turns(changed(path, other_text), tokenizer)


def test_a_call_that_a_server_could_not_read_trains_by_its_ids(
    chat_targets: Callable[[str], Path], tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_targets("llama3_1"))
    talk = TALKS["tools"]
    (conversation,) = read_conversations(str(write_jsonl(tmp_path / "in.jsonl", [talk.row("a")])))
    row = Dialogue.of(conversation)
    prompt = asked_ids(tokenizer, [talk.asked[0]], talk.tools)
    ids = tokenizer.encode(
        '{"name": "add", "parameters":[1,2]}<|eot_id|>', add_special_tokens=False
    )
    # as the server writes it anew
    call = {"type": "function", "function": {"name": "add", "arguments": "[1, 2]"}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    row.add(message=message, prompt_token_ids=pack_ids(prompt), token_ids=pack_ids(ids))
    path = write_jsonl(
        tmp_path / "out.jsonl", [{"messages": row.messages(ids=True), "tools": talk.tools}]
    )
    assert encoded_turns(path, tokenizer) == [(prompt, ids)]
