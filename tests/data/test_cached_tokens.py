"""Tokens that are kept, and when they are made anew."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from specdec.data import chat, module
from specdec.data.chat import Encoded, cached, determinants
from specdec.data.loader import Document
from specdec.data.module import ChatData
from tests.data.tiny import CHATML, LLAMA3, tiny_tokenizer, write_jsonl

SAID = [{"role": "user", "content": "two"}, {"role": "assistant", "content": "four"}]
ROWS = [{"messages": SAID}, {"messages": SAID * 2}, {"messages": SAID * 3}]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the tokens are kept."""
    monkeypatch.setattr(chat, "cache_directory", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "tokens"


def entries(kept: Path) -> list[Path]:
    return list(kept.glob("*.safetensors"))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many conversations were tokenised, each time."""
    counts: list[int] = []
    real = module.encode

    def encode(conversations: list[Any], *args: Any) -> Encoded:
        counts.append(len(conversations))
        return real(conversations, *args)

    monkeypatch.setattr(module, "encode", encode)
    return counts


def read(path: Path, tokenizer: Any = None, **options: Any) -> ChatData:
    data = ChatData(str(path), str(path), **{"seq_len": 64} | options)
    data.prepare(tokenizer or tiny_tokenizer(CHATML))
    return data


def test_a_second_start_tokenises_nothing(tmp_path: Path, kept: Path, made: list[int]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    first = read(path)
    assert made == [3]  # the validation is the same file
    second = read(path)
    assert made == [3] and len(entries(kept)) == 1
    for split, again in zip(first.splits, second.splits, strict=True):
        assert all(torch.equal(*columns) for columns in zip(split, again, strict=True))
    assert second.splits.train.ids_BT.dtype == torch.int32 and second.splits.train.loss_mask_BT.dtype == torch.bool


def test_tokens_are_not_mapped(kept: Path) -> None:
    """Where their file is cut off, what is mapped is a SIGBUS, which no Python can catch."""
    document = Document(torch.arange(3), torch.ones(3, dtype=torch.bool))
    found = cached(["any"], lambda: Encoded([document], torch.tensor([3]), torch.tensor([3])))
    assert str(kept) not in Path("/proc/self/maps").read_text()
    assert found.documents[0].ids_T.tolist() == [0, 1, 2] and found.documents[0].loss_mask_T.all()


def test_whatever_changes_the_tokens_changes_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    more = write_jsonl(tmp_path / "more.jsonl", ROWS[1:])
    saved = tmp_path / "saved"
    datasets.Dataset.from_list(ROWS).save_to_disk(saved)
    longer = tiny_tokenizer(CHATML)
    longer.add_tokens(["<new>"])
    bos = tiny_tokenizer(CHATML)
    bos.bos_token = "<|im_end|>"
    asked: dict[str, Callable[[], list[Any]]] = {
        "same": lambda: determinants(str(path), None, "refuse", tiny_tokenizer(CHATML), 64),
        "length": lambda: determinants(str(path), None, "refuse", tiny_tokenizer(CHATML), 65),
        "layout": lambda: determinants(str(path), "messages", "refuse", tiny_tokenizer(CHATML), 64),
        "template": lambda: determinants(str(path), None, "refuse", tiny_tokenizer(LLAMA3), 64),
        "tokenizer": lambda: determinants(str(path), None, "refuse", longer, 64),
        "special": lambda: determinants(str(path), None, "refuse", bos, 64),
        "two files": lambda: determinants([str(path), str(more)], None, "refuse", tiny_tokenizer(CHATML), 64),
        "another": lambda: determinants(str(more), None, "refuse", tiny_tokenizer(CHATML), 64),
        "saved": lambda: determinants(str(saved), None, "refuse", tiny_tokenizer(CHATML), 64),
    }
    keys = {name: json.dumps(make()) for name, make in asked.items()}
    assert len(set(keys.values())) == len(keys)
    assert {name: json.dumps(make()) for name, make in asked.items()} == keys
    moved = path.rename(tmp_path / "b.jsonl")
    assert json.dumps(determinants(str(moved), None, "refuse", tiny_tokenizer(CHATML), 64)) == keys["same"]
    write_jsonl(moved, [*ROWS, ROWS[0]])
    assert json.dumps(determinants(str(moved), None, "refuse", tiny_tokenizer(CHATML), 64)) != keys["same"]
    next(saved.glob("*.arrow")).write_bytes(b"x")
    assert json.dumps(determinants(str(saved), None, "refuse", tiny_tokenizer(CHATML), 64)) != keys["saved"]


def test_a_saved_folder_is_trained_on(tmp_path: Path, kept: Path, made: list[int]) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    first = read(tmp_path / "saved")
    again = read(write_jsonl(tmp_path / "a.jsonl", ROWS))
    assert made == [3, 3] and torch.equal(first.splits.train.ids_BT, again.splits.train.ids_BT)


def test_a_tokenizer_that_was_used_is_the_same(tmp_path: Path) -> None:
    path = str(write_jsonl(tmp_path / "a.jsonl", ROWS))
    tokenizer = tiny_tokenizer(CHATML, eos=True)
    before = determinants(path, None, "refuse", tokenizer, 64)
    tokenizer("two four", truncation=True, max_length=1)
    assert determinants(path, None, "refuse", tokenizer, 64) == before


def test_hub_data_is_known_by_its_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [datasets.Dataset.from_list(ROWS), datasets.Dataset.from_list(ROWS[:1])]
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **named: held[0])
    keys = [determinants("hub:some/chats:main:train", None, "refuse", tiny_tokenizer(CHATML), 64) for _ in range(2)]
    held.pop(0)
    keys.append(determinants("hub:some/chats:main:train", None, "refuse", tiny_tokenizer(CHATML), 64))
    assert keys[0] == keys[1] != keys[2]


def test_a_damaged_entry_is_named(tmp_path: Path, kept: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    read(path)
    (entry,) = entries(kept)
    entry.write_bytes(entry.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{entry}: damaged, remove it"):
        read(path)


def test_only_one_of_many_makes_it(kept: Path) -> None:
    count = 0

    def make() -> Encoded:
        nonlocal count
        count += 1
        document = Document(torch.arange(3), torch.ones(3, dtype=torch.bool))
        return Encoded([document], torch.tensor([3]), torch.tensor([3]))

    found: list[Encoded] = []
    threads = [threading.Thread(target=lambda: found.append(cached([1], make))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count == 1 and len(found) == 4
    assert all(one.documents[0].ids_T.tolist() == [0, 1, 2] for one in found)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(chat, "cache_directory", lambda: tmp_path / "file")
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"file/tokens.*not a directory"):
        read(path)
