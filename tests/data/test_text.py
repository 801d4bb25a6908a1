from pathlib import Path

import pytest

from specdec.data.text import TextData, encode_texts
from tests.data.tiny import tiny_tokenizer, write_jsonl


def corpus(path: Path, count: int) -> str:
    for i in range(count):
        (path / f"{i:02}.txt").write_text(f"document {i} the sky is blue", encoding="utf-8")
    return f"{path}/*.txt"


def words(data: TextData, part: int) -> list[str]:
    tokenizer = tiny_tokenizer()
    return [tokenizer.decode(document.ids_T) for document in data.documents(tokenizer)[part]]


def test_texts_are_closed_once_and_wholly_supervised(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    documents = encode_texts(["the sky", "is blue<|eos|>"], tokenizer)
    assert [tokenizer.decode(document.ids_T) for document in documents] == ["the sky<|eos|>", "is blue<|eos|>"]
    assert all(document.loss_mask_T.all() for document in documents)
    bare = tiny_tokenizer(eos=False)
    assert bare.decode(encode_texts(["the sky"], bare)[0].ids_T) == "the sky"
    monkeypatch.setattr("specdec.data.text.CHUNK", 1)
    assert [d.ids_T.tolist() for d in encode_texts(["the sky", "is blue<|eos|>"], tokenizer)] == [
        document.ids_T.tolist() for document in documents
    ]


def test_whole_files_are_set_aside(tmp_path: Path) -> None:
    data = TextData(corpus(tmp_path, 20), val_fraction=0.1, seed=1)
    train, val = words(data, 0), words(data, 1)
    assert (len(train), len(val)) == (18, 2)
    assert sorted(train + val) == sorted(f"document {i} the sky is blue<|eos|>" for i in range(20))
    assert words(data, 1) == val
    assert words(TextData(corpus(tmp_path, 20), val_fraction=0.1, seed=2), 1) != val


def test_given_files_are_the_validation_and_the_test(tmp_path: Path) -> None:
    train = corpus(tmp_path, 2)
    val = str(write_jsonl(tmp_path / "val.jsonl", [{"text": "val"}]))
    test = str(write_jsonl(tmp_path / "test.jsonl", [{"text": "test"}, {"text": "more"}]))
    data = TextData([train], [val], [test], seq_len=8)
    data.prepare(tiny_tokenizer())
    tokenizer = tiny_tokenizer()
    assert [tokenizer.decode(rows.ids_BT[0][:1]) for rows in data.splits[1:]] == ["v", "t"]
    assert data.test_documents(tokenizer) is not None
    assert TextData([train]).test_documents(tokenizer) is None


def test_a_single_document_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"1 documents cannot be split.*give validation files \(val\)"):
        TextData(corpus(tmp_path, 1)).prepare(tiny_tokenizer())
