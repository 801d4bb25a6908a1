from pathlib import Path

import pytest
import torch

from specdec.data.chat_data import ChatData
from tests.data.tiny import CHATML, tiny_tokenizer, write_jsonl


def chats(path: Path, count: int) -> str:
    rows = [
        {"messages": [{"role": "user", "content": "two " * (i % 3)}, {"role": "assistant", "content": f"four {i}"}]}
        for i in range(count)
    ]
    return str(write_jsonl(path, rows))


def test_whole_packing_fills_rows_and_pad_gives_one_each(tmp_path: Path) -> None:
    path = chats(tmp_path / "a.jsonl", 20)
    counts = []
    for packing in ("whole", "pad"):
        data = ChatData(path, packing=packing, val_fraction=0.2, seq_len=64)
        data.prepare(tiny_tokenizer(CHATML))
        counts.append(data.supervised_counts(400))
        assert data.splits.train.documents_BT.max() == (0 if packing == "pad" else 3)
        if packing == "pad":
            assert [len(rows.ids_BT) for rows in data.splits] == [16, 4, 4]
    assert torch.equal(*counts)
    assert counts[0][tiny_tokenizer().convert_tokens_to_ids("<|im_end|>")] == 16


def test_validation_and_test_files(tmp_path: Path) -> None:
    paths = [chats(tmp_path / f"{name}.jsonl", count) for name, count in (("a", 3), ("b", 2), ("c", 1))]
    data = ChatData(*paths, packing="pad", seq_len=64)
    data.prepare(tiny_tokenizer(CHATML))
    assert [len(rows.ids_BT) for rows in data.splits] == [3, 2, 1]


def test_every_token_of_the_training_conversations_can_be_supervised(tmp_path: Path) -> None:
    path = chats(tmp_path / "a.jsonl", 6)
    answers, every = (ChatData(path, path, answer_only=only, seq_len=64) for only in (True, False))
    for data in (answers, every):
        data.prepare(tiny_tokenizer(CHATML))
    real = every.splits.train.documents_BT >= 0
    assert torch.equal(every.splits.train.loss_mask_BT, real)
    assert int(answers.splits.train.loss_mask_BT.sum()) < int(real.sum())
    assert torch.equal(every.splits.validation.loss_mask_BT, answers.splits.validation.loss_mask_BT)


def test_what_cannot_be_used_is_refused(tmp_path: Path) -> None:
    path = chats(tmp_path / "a.jsonl", 1)
    with pytest.raises(ValueError, match="packing is 'tight': choose one of whole, pad"):
        ChatData(path, packing="tight")
    with pytest.raises(ValueError, match="cannot be split"):
        ChatData(path).prepare(tiny_tokenizer(CHATML))
    asked = str(write_jsonl(tmp_path / "b.jsonl", [{"messages": [{"role": "user", "content": "x"}]}]))
    with pytest.raises(ValueError, match="validation: none of 1 conversations has a supervised token"):
        ChatData(path, asked).prepare(tiny_tokenizer(CHATML))
    with pytest.raises(ValueError, match="no chat template"):
        ChatData(path, path).prepare(tiny_tokenizer())


def test_every_layout_of_the_same_words_gives_the_same_rows(tmp_path: Path) -> None:
    layouts = (
        {"prompt": "two", "response": "four"},
        {"instruction": "two", "output": "four"},
        {"data": ["two", "four"]},
        {"conversations": [{"from": "human", "value": "two"}, {"from": "gpt", "value": "four"}]},
    )
    made = []
    for number, row in enumerate(layouts):
        path = str(write_jsonl(tmp_path / f"{number}.jsonl", [row]))
        data = ChatData(path, path, seq_len=64)
        data.prepare(tiny_tokenizer(CHATML))
        made.append(data.splits.train)
    for rows in made[1:]:
        assert all(torch.equal(*columns) for columns in zip(rows, made[0], strict=True))
    with pytest.raises(ValueError, match="line 1: layout alpaca needs instruction, output"):
        ChatData(path, path, layout="alpaca").prepare(tiny_tokenizer(CHATML))
    with pytest.raises(ValueError, match="layout is 'vicuna': choose one of messages"):
        ChatData(path, path, layout="vicuna")


@pytest.mark.parametrize("cache", [True, False])
def test_broken_rows_are_refused_or_dropped_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cache: bool
) -> None:
    said = [{"role": "user", "content": f"two {cache}"}, {"role": "assistant", "content": "four"}]
    rows = [{"messages": said}, {"messages": []}, {"messages": said[1:]}, {"prompt": "two", "response": "four"}]
    path = str(write_jsonl(tmp_path / "a.jsonl", rows))
    with open(path, "a") as file:
        file.write('{"messages": [{"role": "us')  # a download that broke off
    with pytest.raises(ValueError, match="line 2: 'messages' must be a list of at least one message"):
        ChatData(path, path, cache=cache).prepare(tiny_tokenizer(CHATML))
    for _ in range(2):
        caplog.clear()
        data = ChatData(path, path, broken="drop", packing="pad", seq_len=64, cache=cache)
        data.prepare(tiny_tokenizer(CHATML))
        assert [len(split.ids_BT) for split in data.splits] == [2, 2, 2]
        assert "3 broken rows were left out, as: " in caplog.text
        assert "line 2: 'messages' must be a list" in caplog.text and "line 3: message 1 is the assist" in caplog.text
    with pytest.raises(ValueError, match="broken is 'keep': choose refuse or drop"):
        ChatData(path, broken="keep")
    none = str(write_jsonl(tmp_path / "b.jsonl", [{"messages": said[1:]}]))
    with pytest.raises(ValueError, match=r"no conversation is left: .*line 1: message 1 is the"):
        ChatData(none, path, broken="drop", cache=cache).prepare(tiny_tokenizer(CHATML))
