"""Tokens that are kept, and when they are made anew."""

import json
import os
import shutil
import signal
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from pyarrow import ipc, memory_map

from specdec.data import chat, module, texts, token_cache, tokens
from specdec.data.module import ChatData, TextData
from specdec.data.token_cache import cached, determinants
from specdec.data.tokens import Encoded, EncodedDocument, TokenFiles, write_tokens
from specdec.utils.reading import SUMS
from tests.data.tiny import CHATML, LLAMA3, tiny_tokenizer, write_jsonl

SAID = [{"role": "user", "content": "two"}, {"role": "assistant", "content": "four"}]
ROWS = [{"messages": SAID}, {"messages": SAID * 2}, {"messages": SAID * 3}]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the tokens are kept."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def entries(cache: Path, kind: str = "tokens") -> list[Path]:
    return [path for path in (cache / kind).iterdir() if path.is_dir()]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many conversations were tokenized, each time."""
    counts: list[int] = []
    real = module.encode_chunks

    def encode_chunks(
        conversations: Iterable[Any], *args: Any, **more: Any
    ) -> Iterator[list[EncodedDocument]]:
        rows = list(conversations)
        counts.append(len(rows))
        return real(rows, *args, **more)

    monkeypatch.setattr(module, "encode_chunks", encode_chunks)
    return counts


def document(*ids: int, conversation: int = 0) -> EncodedDocument:
    """Of which the even ids are supervised."""
    ids_T = torch.tensor(ids, dtype=torch.int32)
    return EncodedDocument(
        ids_T, ids_T % 2 == 0, len(ids), int((ids_T % 2 == 0).sum()), conversation
    )


def read(path: Path, tokenizer: Any = None, **options: Any) -> ChatData:
    data = ChatData(str(path), str(path), **{"seq_len": 64} | options)
    data.prepare(tokenizer or tiny_tokenizer(CHATML))
    return data


def test_a_second_start_tokenises_and_writes_nothing(
    tmp_path: Path, cache: Path, counts: list[int]
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    first = read(path)
    assert counts == [3]  # the validation is the same file
    files = {file: file.stat().st_mtime_ns for file in cache.rglob("*")}
    for lock in cache.rglob("*.lock"):
        lock.unlink()  # none is made again: a cache that cannot be written will do
        del files[lock]
    for folder in {file.parent for file in files}:
        files.pop(folder, None)
    second = read(path)
    assert counts == [3] and len(entries(cache)) == len(entries(cache, "rows")) == 1
    assert all(file.stat().st_mtime_ns == time for file, time in files.items()) and not list(
        cache.rglob("*.lock")
    )
    for split, again in zip(first.splits, second.splits, strict=True):
        assert all(torch.equal(*columns) for columns in zip(split, again, strict=True))
    assert (
        second.splits.train.ids_BT.dtype == torch.int32
        and second.splits.train.loss_mask_BT.dtype == torch.bool
    )


def test_tokens_and_rows_are_mapped_and_those_of_lists_are_the_same(
    tmp_path: Path, cache: Path
) -> None:
    data = read(write_jsonl(tmp_path / "a.jsonl", ROWS))
    documents = data.documents(tiny_tokenizer(CHATML))[0]
    maps = Path("/proc/self/maps").read_text()
    assert all(str(cache / kind) in maps for kind in ("tokens", "rows"))
    assert all(
        torch.equal(*columns)
        for columns in zip(data.splits.train, data.pack(list(documents)), strict=True)
    )


def test_documents_are_written_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "GROUP", 8)
    alive: list[weakref.ref] = []
    most = 0

    def documents() -> Iterator[EncodedDocument]:
        nonlocal most
        for number in range(200):
            made = document(*range(number % 5), conversation=number)
            alive.append(weakref.ref(made.ids_T))
            most = max(most, sum(ref() is not None for ref in alive))
            yield made

    write_tokens(documents(), tmp_path / "a.arrow")
    assert most <= 2 * 8 + 1
    file = TokenFiles([tmp_path / "a.arrow"], "").all()
    assert [one.ids_T.tolist() for one in file] == [
        list(range(number % 5)) for number in range(200)
    ]
    assert [one.loss_mask_T.tolist() for one in file[7:9]] == [[True, False], [True, False, True]]
    # by any other reader of Arrow
    table = ipc.open_file(memory_map(str(tmp_path / "a.arrow"))).read_all()
    assert table["ids"].to_pylist() == [list(range(number % 5)) for number in range(200)]


def test_the_documents_of_a_conversation_stay_together(tmp_path: Path) -> None:
    numbers = [0, 0, 2, 3, 3, 3, 5, 6]  # of 1 and 4 nothing is left
    write_tokens(
        [document(i, i + 1, conversation=number) for i, number in enumerate(numbers)],
        tmp_path / "a",
    )
    file = TokenFiles([tmp_path / "a"], "").all()
    parts = file.split(lambda count: torch.arange(count) % 2 == 1)
    assert [part.numbers_N.tolist() for part in parts] == [[0, 1, 3, 4, 5, 7], [2, 6]]
    assert parts[0].lost | {"documents": 6, "conversations": 3} == parts[0].lost
    assert (
        parts[0].key != parts[1].key
        and parts[0].key == file.take(torch.tensor([0, 1, 3, 4, 5, 7])).key
    )


def test_whatever_changes_the_tokens_changes_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        "two files": lambda: determinants(
            [str(path), str(more)], None, "refuse", tiny_tokenizer(CHATML), 64
        ),
        "another": lambda: determinants(str(more), None, "refuse", tiny_tokenizer(CHATML), 64),
        "saved": lambda: determinants(str(saved), None, "refuse", tiny_tokenizer(CHATML), 64),
    }
    keys = {name: json.dumps(make()) for name, make in asked.items()}
    assert len(set(keys.values())) == len(keys)
    assert {name: json.dumps(make()) for name, make in asked.items()} == keys
    moved = path.rename(tmp_path / "b.jsonl")
    assert (
        json.dumps(determinants(str(moved), None, "refuse", tiny_tokenizer(CHATML), 64))
        == keys["same"]
    )
    write_jsonl(moved, [*ROWS, ROWS[0]])
    assert (
        json.dumps(determinants(str(moved), None, "refuse", tiny_tokenizer(CHATML), 64))
        != keys["same"]
    )
    next(saved.glob("*.arrow")).write_bytes(b"x")
    assert (
        json.dumps(determinants(str(saved), None, "refuse", tiny_tokenizer(CHATML), 64))
        != keys["saved"]
    )


def test_a_saved_folder_is_trained_on(tmp_path: Path, cache: Path, counts: list[int]) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    first = read(tmp_path / "saved")
    again = read(write_jsonl(tmp_path / "a.jsonl", ROWS))
    assert counts == [3, 3] and torch.equal(first.splits.train.ids_BT, again.splits.train.ids_BT)


def test_a_tokenizer_that_was_used_is_the_same(tmp_path: Path) -> None:
    path = str(write_jsonl(tmp_path / "a.jsonl", ROWS))
    tokenizer = tiny_tokenizer(CHATML, eos=True)
    before = determinants(path, None, "refuse", tokenizer, 64)
    tokenizer("two four", truncation=True, max_length=1)
    assert determinants(path, None, "refuse", tokenizer, 64) == before


def test_hub_data_is_known_by_its_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [datasets.Dataset.from_list(ROWS), datasets.Dataset.from_list(ROWS[:1])]
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **named: held[0])
    keys = [
        determinants("hub:some/chats:main:train", None, "refuse", tiny_tokenizer(CHATML), 64)
        for _ in range(2)
    ]
    held.pop(0)
    keys.append(
        determinants("hub:some/chats:main:train", None, "refuse", tiny_tokenizer(CHATML), 64)
    )
    assert keys[0] == keys[1] != keys[2]


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def turn(file: Path) -> None:
    """One bit in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, turn, Path.unlink])
@pytest.mark.parametrize(
    ("kind", "name"), [("tokens", "00000.arrow"), ("rows", "ids"), ("rows", SUMS)]
)
def test_a_damaged_entry_is_named(
    tmp_path: Path, cache: Path, kind: str, name: str, damage: Callable
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    read(path)
    (folder,) = entries(cache, kind)
    damage(folder / name)
    with pytest.raises(
        ValueError, match=rf"{folder}.*remove the folder {folder}, and it is made again"
    ):
        read(path)


def test_what_fails_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [*ROWS, {"messages": []}])
    with pytest.raises(ValueError, match="line 4"):
        read(path)
    assert not entries(cache)
    with pytest.raises(ValueError, match="no document is left"):
        cached(["none"], lambda begin, known: [])


def test_only_one_of_many_makes_it(cache: Path) -> None:
    count = 0

    def make(begin: int, known: dict[str, Any]) -> Iterator[list[EncodedDocument]]:
        nonlocal count
        count += 1
        yield [document(0, 1, 2)]

    found: list[Encoded] = []
    threads = [threading.Thread(target=lambda: found.append(cached([1], make))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count == 1 and len(found) == 4
    assert all(one[0].ids_T.tolist() == [0, 1, 2] for one in found)


def test_a_place_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "file"))
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"file/tokens.*not a directory"):
        read(path)


def test_texts_are_kept_too(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("two four " * 50)
    data = TextData(str(path), str(path), seq_len=16)
    data.prepare(tiny_tokenizer())
    assert len(entries(cache)) == 1 and "rows" in Path("/proc/self/maps").read_text()
    assert (
        tiny_tokenizer()
        .decode(data.splits.train.ids_BT.flatten()[:200].tolist())
        .startswith("two four two")
    )


# --- a process that ends while it tokenizes


MANY = [
    {"messages": [{"role": "user", "content": f"two {number}"}, *SAID[1:] * (1 + number % 3)]}
    for number in range(23)
]
MANY[4] = MANY[17] = {"messages": []}  # broken, before and behind the place where the process ends
MANY[5] = MANY[16] = {"messages": SAID[:1]}  # nobody answers


class Killed(BaseException):
    """As a process that ends: nothing catches it."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of two chunks of two conversations."""
    for place, name in (
        (chat, "CHUNK"),
        (module, "CHUNK"),
        (texts, "CHUNK"),
        (token_cache, "PART"),
    ):
        monkeypatch.setattr(place, name, 2)


def tokenized(monkeypatch: pytest.MonkeyPatch, ends_at: int | None = None) -> list[int]:
    """The numbers of the conversations that are tokenized from now on; the process ends before ``ends_at``."""
    numbers: list[int] = []
    real = chat.Shapes.rows

    def rows(self: Any, conversation: Any) -> Any:
        number = int(conversation.place.rpartition(" ")[2]) - 1
        if number == ends_at:
            raise Killed
        numbers.append(number)
        return real(self, conversation)

    monkeypatch.setattr(chat.Shapes, "rows", rows)
    return numbers


def end_before(monkeypatch: pytest.MonkeyPatch, path: Path, number: int) -> None:
    """Tokenize in a process that ends before this conversation."""
    with monkeypatch.context() as patch:
        tokenized(patch, number)
        with pytest.raises(Killed):
            read(path, broken="drop")


def content(cache: Path) -> dict[str, bytes]:
    """The files of the one entry of tokens."""
    (folder,) = entries(cache)
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.mark.parametrize("ends_at", [0, 3, 6, 8, 9, 20, 22])
def test_tokenizing_continues_behind_the_last_whole_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None, ends_at: int
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", MANY)
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "whole"))
    with monkeypatch.context() as patch:
        everything = tokenized(patch)
        read(path, broken="drop")
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "killed"))
    end_before(monkeypatch, path, ends_at)
    begun = next((tmp_path / "killed/tokens").glob("*.begun"), tmp_path / "none")
    parts = len(list(begun.glob("0*"))) if begun.exists() else 0
    with monkeypatch.context() as patch:
        rest = tokenized(patch)
        read(path, broken="drop")
    # four conversations to a part; the broken row is not one of them
    assert rest == everything[4 * parts :] and parts == everything.index(ends_at) // 4
    # the report says of all conversations what it says without an interruption
    assert content(tmp_path / "killed") == content(tmp_path / "whole")
    assert not list((tmp_path / "killed").rglob("*.begun"))


def test_texts_continue_behind_the_last_whole_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    rows = [{"text": f"two {number} four " * (1 + number % 4)} for number in range(11)]
    path = str(write_jsonl(tmp_path / "a.jsonl", rows))
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "whole"))
    TextData(path, path, seq_len=16).prepare(tiny_tokenizer())
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "killed"))
    real = module.iter_texts
    read_rows: list[int] = []

    def ends(patterns: Any) -> Iterator[Any]:
        for number, text in enumerate(real(patterns)):
            if number == 9:
                raise Killed
            yield text

    with monkeypatch.context() as patch:
        patch.setattr(module, "iter_texts", ends)
        with pytest.raises(Killed):
            TextData(path, path, seq_len=16).prepare(tiny_tokenizer())
    (begun,) = (tmp_path / "killed/tokens").glob("*.begun")
    assert sorted(part.name for part in begun.iterdir()) == ["00000", "00001"]
    encode_text = texts._document

    def counted(ids: list[int], eos: int | None, number: int) -> EncodedDocument:
        read_rows.append(number)
        return encode_text(ids, eos, number)

    monkeypatch.setattr(texts, "_document", counted)
    TextData(path, path, seq_len=16).prepare(tiny_tokenizer())
    assert read_rows == [8, 9, 10] and content(tmp_path / "killed") == content(tmp_path / "whole")


@pytest.mark.parametrize("damage", [cut, turn, Path.unlink])
@pytest.mark.parametrize("name", ["tokens.arrow", "about.json", SUMS])
def test_a_damaged_part_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None, caplog: pytest.LogCaptureFixture,
    name: str, damage: Callable,
) -> None:  # fmt: skip
    path = write_jsonl(tmp_path / "a.jsonl", MANY)
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "whole"))
    read(path, broken="drop")
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "killed"))
    end_before(monkeypatch, path, 20)
    (begun,) = (tmp_path / "killed/tokens").glob("*.begun")
    assert len(list(begun.glob("0*"))) == 4
    damage(begun / "00001" / name)
    read(path, broken="drop")
    assert any(f"{begun / '00001'}" in record.message for record in caplog.records)
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


def test_a_process_that_is_killed_leaves_what_the_next_one_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    """SIGKILL, after which no cleanup runs, at six places of one run."""
    path = write_jsonl(tmp_path / "a.jsonl", MANY)
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "whole"))
    read(path, broken="drop")
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "killed"))
    real = chat.Shapes.rows
    for ends_at in (2, 7, 11, 13, 14, 21):

        def rows(self: Any, conversation: Any, ends_at: int = ends_at) -> Any:
            if conversation.place.endswith(f"line {ends_at + 1}"):
                os.kill(os.getpid(), signal.SIGKILL)
            return real(self, conversation)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python 3.12, of a fork with threads
            child = os.fork()
        if child == 0:
            monkeypatch.setattr(chat.Shapes, "rows", rows)
            try:
                read(path, broken="drop")
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
    read(path, broken="drop")
    assert content(tmp_path / "killed") == content(tmp_path / "whole")
    assert not list((tmp_path / "killed").rglob("*.begun"))


def test_parts_of_other_code_are_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", MANY)
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    end_before(monkeypatch, path, 20)
    monkeypatch.setattr(token_cache, "loaded_code", lambda: {"files": "others"})
    rest = tokenized(monkeypatch)
    read(path, broken="drop")
    assert rest[0] == 0 and not list((tmp_path / "cache").rglob("*.begun"))


@pytest.mark.parametrize("name", ["", "00000"])
def test_a_link_in_place_of_parts_is_refused_and_nothing_behind_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None, name: str
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", MANY)
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    end_before(monkeypatch, path, 20)
    (begun,) = (tmp_path / "cache/tokens").glob("*.begun")
    victim = tmp_path / "victim"
    (victim / "00000").mkdir(parents=True)
    (victim / "00000" / "photo").write_text("mine")
    place = begun / name
    shutil.rmtree(place)
    place.symlink_to(victim / name)
    with pytest.raises(ValueError, match=f"{place}: it is a link"):
        read(path, broken="drop")
    assert (victim / "00000" / "photo").read_text() == "mine"
    assert len(list(victim.iterdir())) == 1


def test_another_file_among_the_parts_is_no_hindrance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", MANY)
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    end_before(monkeypatch, path, 20)
    (begun,) = (tmp_path / "cache/tokens").glob("*.begun")
    (begun / "9x").write_text("a")
    read(path, broken="drop")
    assert len(entries(tmp_path / "cache")) == 1 and not begun.exists()


def test_what_is_left_of_a_whole_entry_does_no_harm_in_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    read(path)
    (folder,) = entries(cache)
    left = folder.with_name(f"{folder.name}-0.begun")
    left.mkdir()

    def refused(path: Path) -> Any:
        raise ValueError(f"{path}: read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(token_cache, "locked", refused)
        read(path)
    assert left.exists()
    read(path)
    assert not left.exists()
