import logging
from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from specdec.data.loader import Batch, Document
from specdec.data.module import ChatData, TextData
from specdec.data.texts import encode_texts, iter_texts
from specdec.data.token_data import TokenData
from specdec.evaluation.callback import document_prompts
from tests.data.test_prefix import beginning
from tests.data.tiny import CHATML, tiny_tokenizer, write_jsonl

# a resumed run saves elsewhere
pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")

ROWS, SEQ, BATCH = 11, 4, 2  # 6 batches an epoch, the last of one row


class Counting(TokenData):
    """Row i holds the id i, four times; the second half of each is supervised."""

    reads = 0

    def documents(self, tokenizer: Any) -> tuple[list[Document], list[Document]]:
        self.reads += 1
        mask = torch.tensor([False, False, True, True])
        made = [Document(torch.full((SEQ,), i), mask) for i in range(ROWS)]
        return made, made[:3]


class Toy(pl.LightningModule):
    """Remembers the rows it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.seen: list[list[int]] = []
        self.validated: list[list[int]] = []
        self.tokenizer = tiny_tokenizer()

    def training_step(self, batch: Batch, index: int) -> torch.Tensor:
        assert isinstance(batch, Batch)
        self.seen.append(batch.ids_BT[:, 0].tolist())
        return (self.weight * batch.ids_BT.float().mean()).sum()

    def validation_step(self, batch: Batch, index: int) -> None:
        self.validated.append(batch.ids_BT[:, 0].tolist())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def run(path: Path, epochs: int, ckpt_path: Path | None = None, **options: Any) -> Toy:
    module = Toy()
    callback = ModelCheckpoint(path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    settings = {
        "num_sanity_val_steps": 0,
        "val_check_interval": 4,
        "callbacks": [callback],
    } | options
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        max_epochs=epochs,
        default_root_dir=path,
        **settings,
    )
    data = Counting(SEQ, BATCH, seed=3)
    trainer.fit(
        module, data, ckpt_path=None if ckpt_path is None else str(ckpt_path), weights_only=True
    )
    return module


@pytest.mark.parametrize("step", [1, 5, 6, 13])
def test_a_resumed_run_sees_exactly_the_rows_that_were_left(tmp_path: Path, step: int) -> None:
    whole = run(tmp_path / "whole", 3)
    assert len(whole.seen) == 18
    rest = run(tmp_path / "rest", 3, ckpt_path=tmp_path / f"whole/step={step}.ckpt")
    assert rest.seen == whole.seen[step:]
    assert torch.equal(rest.weight, whole.weight)


def test_a_run_of_more_epochs_goes_on_after_one_that_ended(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 3, val_check_interval=1.0)
    run(tmp_path / "short", 2, val_check_interval=1.0)
    rest = run(
        tmp_path / "rest", 3, ckpt_path=tmp_path / "short/step=12.ckpt", val_check_interval=1.0
    )
    assert rest.seen == whole.seen[12:]


def test_a_shortened_epoch_and_a_sanity_check_leave_the_order_alone(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 2)
    checked = run(tmp_path / "checked", 2, num_sanity_val_steps=2, val_check_interval=1.0)
    assert checked.seen == whole.seen
    short = run(tmp_path / "short", 2, limit_train_batches=4)
    assert short.seen == whole.seen[:4] + whole.seen[6:10]


def test_reading_happens_once_and_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    data = Counting(SEQ, BATCH)
    with pytest.raises(ValueError, match="not read yet: call setup"):
        data.train_dataloader()
    with caplog.at_level(logging.INFO):
        data.prepare(None)
    data.prepare(None)
    assert data.reads == 1
    assert "train: 11 rows of 4 tokens, 50.0 % supervised, 0.0 % padding" in caplog.text


def test_ids_outside_the_vocabulary_are_refused() -> None:
    data = Counting(SEQ, BATCH)
    data.prepare(None)
    data.check_vocabulary(ROWS)
    with pytest.raises(ValueError, match=r"train data holds token id 9 \(8 such tokens\).*9 ids"):
        data.check_vocabulary(9)


def test_the_base_has_no_documents_and_a_row_has_two_tokens() -> None:
    with pytest.raises(NotImplementedError):
        TokenData().prepare(None)
    with pytest.raises(ValueError, match=r"data\.seq_len must be at least 2, not 1"):
        TokenData(seq_len=1)


def corpus(path: Path, count: int) -> str:
    for i in range(count):
        (path / f"{i:02}.txt").write_text(f"document {i} the sky is blue", encoding="utf-8")
    return f"{path}/*.txt"


def words(data: TextData, part: int) -> list[str]:
    tokenizer = tiny_tokenizer()
    return [tokenizer.decode(document.ids_T) for document in data.documents(tokenizer)[part]]


def test_texts_are_closed_once_and_wholly_supervised(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    monkeypatch.setattr("specdec.data.texts.CHUNK", 1)
    chunks = list(encode_texts(["the sky", "is blue<|eos|>"], tokenizer))
    documents = list(chain.from_iterable(chunks))
    assert [len(chunk) for chunk in chunks] == [1, 1]
    assert [tokenizer.decode(document.ids_T) for document in documents] == [
        "the sky<|eos|>",
        "is blue<|eos|>",
    ]
    assert all(document.loss_mask_T.all() for document in documents)
    bare = tiny_tokenizer(eos=False)
    assert bare.decode(next(encode_texts(["the sky"], bare))[0].ids_T) == "the sky"


@pytest.mark.parametrize("prefix", ["<|bos|>", "<|im_start|> <|bos|>"])
def test_every_piece_of_a_text_begins_as_the_tokenizer_begins_one(
    tmp_path: Path, prefix: str
) -> None:
    tokenizer = beginning(prefix)
    front = tokenizer.convert_tokens_to_ids(prefix.split())
    texts = ["the sky is blue and the grass is green " * 5, prefix.replace(" ", "") + "two", "four"]
    path = str(write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts]))
    data = TextData(path, path, seq_len=16)
    data.prepare(tokenizer)
    rows = data.splits.train
    said: list[int] = []
    for ids_T, documents_T in zip(rows.ids_BT, rows.documents_BT, strict=True):
        for number in range(int(documents_T.max()) + 1):
            ids = ids_T[documents_T == number].tolist()
            assert ids[: len(front)] == front and ids[len(front)] != front[0]
            said += ids[len(front) :]
    bare = [tokenizer.encode(text, add_special_tokens=False) for text in (texts[0], "two", "four")]
    assert said == [id_ for ids in bare for id_ in [*ids, tokenizer.eos_token_id]]
    goes_on = len(rows.ids_BT) - 1  # rows that begin within the first text
    context = int((~rows.loss_mask_BT & (rows.documents_BT >= 0)).sum())
    assert 0 < context <= goes_on * len(front) and context % len(front) == 0
    prompts = document_prompts(rows, 9, 64, 64, data.prefix)
    assert (
        all(len(front) < len(prompt) and prompt[: len(front)] == front for prompt in prompts)
        and len(prompts) > 2
    )


def test_whole_files_are_set_aside(tmp_path: Path) -> None:
    data = TextData(corpus(tmp_path, 20), val_fraction=0.1, seed=1)
    train, val = words(data, 0), words(data, 1)
    assert (len(train), len(val)) == (18, 2)
    assert sorted(train + val) == sorted(f"document {i} the sky is blue<|eos|>" for i in range(20))
    assert words(TextData(corpus(tmp_path, 20), val_fraction=0.1, seed=2), 1) != val


def test_a_text_file_is_one_document_and_a_row_is_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "b.txt").write_bytes("\ufeffone\r\ntwo é\u2028 three\n".encode())
    (tmp_path / "c.txt").write_text(" \n")
    rows = write_jsonl(
        tmp_path / "a.jsonl", [{"text": "x\u2028y"}, {"text": "z", "more": 1}, {"text": ""}]
    )
    texts = list(iter_texts(str(tmp_path / "*")))
    assert [item.place for item in texts] == [
        f"{rows}, line 1",
        f"{rows}, line 2",
        str(tmp_path / "b.txt"),
    ]
    assert [item.text for item in texts] == ["x\u2028y", "z", "one\r\ntwo é\u2028 three\n"]
    assert "left out 2 empty documents, 3 remain" in caplog.text
    with pytest.raises(ValueError, match=r"no documents in .*every file is empty"):
        list(iter_texts(str(tmp_path / "c*")))
    for row in ({"body": "a"}, {"text": 3}):
        with pytest.raises(
            ValueError,
            match=r"a\.jsonl, line 1: a row of text needs a string 'text', this has only",
        ):
            list(iter_texts(str(write_jsonl(rows, [row]))))


def chats(path: Path, count: int) -> str:
    rows = [
        {
            "messages": [
                {"role": "user", "content": "two " * (i % 3)},
                {"role": "assistant", "content": f"four {i}"},
            ]
        }
        for i in range(count)
    ]
    return str(write_jsonl(path, rows))


def test_whole_conversations_share_a_row(tmp_path: Path) -> None:
    data = ChatData(chats(tmp_path / "a.jsonl", 20), val_fraction=0.2, seq_len=64)
    data.prepare(tiny_tokenizer(CHATML))
    assert data.splits.train.documents_BT.max() == 3
    assert data.supervised_counts(400)[tiny_tokenizer().convert_tokens_to_ids("<|im_end|>")] == 16


def test_what_cannot_be_used_is_refused(tmp_path: Path) -> None:
    path = chats(tmp_path / "a.jsonl", 1)
    with pytest.raises(ValueError, match="cannot be split"):
        ChatData(path).prepare(tiny_tokenizer(CHATML))
    asked = str(
        write_jsonl(tmp_path / "b.jsonl", [{"messages": [{"role": "user", "content": "x"}]}])
    )
    with pytest.raises(
        ValueError, match="validation: of 1 conversation none has a supervised token"
    ):
        ChatData(path, asked).prepare(tiny_tokenizer(CHATML))
    with pytest.raises(ValueError, match="no chat template"):
        ChatData(path, path).prepare(tiny_tokenizer())


def test_every_layout_of_the_same_words_gives_the_same_rows(tmp_path: Path) -> None:
    layouts = (
        {"prompt": "two", "response": "four"},
        {"instruction": "two", "output": "four"},
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
    with pytest.raises(ValueError, match=r"line 1: .* are of no known layout \(alpaca: instr"):
        ChatData(path, path, layout="alpaca").prepare(tiny_tokenizer(CHATML))
    with pytest.raises(ValueError, match="there is no layout 'vicuna': choose one of messages"):
        ChatData(path, path, layout="vicuna")


def test_broken_rows_are_refused_or_dropped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = [{"role": "user", "content": "two, broken"}, {"role": "assistant", "content": "four"}]
    rows = [
        {"messages": said},
        {"messages": []},
        {"messages": said[1:]},
        {"prompt": "two", "response": "four"},
    ]
    path = str(write_jsonl(tmp_path / "a.jsonl", rows))
    with open(path, "a") as file:
        file.write('{"messages": [{"role": "us')  # a download that broke off
    with pytest.raises(
        ValueError, match="line 2: 'messages' must be a list of at least one message"
    ):
        ChatData(path, path).prepare(tiny_tokenizer(CHATML))
    data = ChatData(path, path, broken="drop", seq_len=64)
    documents = data.documents(tiny_tokenizer(CHATML))
    assert [len(part) for part in documents] == [2, 2]
    assert (
        "left out 3 broken rows:" in caplog.text
        and "line 2: 'messages' must be a list" in caplog.text
    )
    none = str(write_jsonl(tmp_path / "b.jsonl", [{"messages": said[1:]}]))
    with pytest.raises(
        ValueError, match=r"no conversation is left: .*line 1: message 1: it is the"
    ):
        ChatData(none, path, broken="drop").prepare(tiny_tokenizer(CHATML))
