"""``specdec doctor --samples``: training documents, and what of them is supervised."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig

from specdec.cli import main
from specdec.data.loader import Document
from specdec.diagnostics import doctor
from specdec.diagnostics.doctor import SUPERVISED, marked
from tests.data.families import family_tokenizer
from tests.data.tiny import CHATML, CHATML_TAGGED, tiny_tokenizer, write_jsonl

ASKED = {"role": "user", "content": "what is two plus two?"}
FOUR = {"role": "assistant", "content": "four"}
CHATS = ["--data", "ChatData", "--data.train"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A target's directory, of which only tokenizer and config are there: nothing else is loaded."""
    tiny_tokenizer(CHATML).save_pretrained(tmp_path / "target")
    LlamaConfig(vocab_size=300, num_hidden_layers=7).save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def samples(target: Path, *args: Any, count: int = 2) -> int:
    return main(["doctor", "--target", str(target), "--samples", str(count), *map(str, args)])


def test_it_shows_what_is_supervised_and_tells_what_is_lost(
    tokenizer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows: list[dict[str, Any]] = [{"messages": [ASKED, FOUR]}] * 3
    rows += [{"prompt": "two", "response": "four " * 40}, {"messages": [ASKED]}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    assert samples(tokenizer, *CHATS, path, "--data.val", path, "--data.seq_len", 60) == 0
    shown = capsys.readouterr().out
    assert shown.count("【four<|im_end|>】") == 2 and "training document 2" in shown
    cells = {
        line.split("│")[1].strip(): line.split("│")[2].strip()
        for line in shown.splitlines()
        if "│" in line[:1]
    }
    assert cells["documents"] == cells["supervised runs"] == "4"
    assert cells["which end with"].startswith("'<|im_end|>' 75%") and cells[
        "packed rows"
    ].startswith("3, ")
    assert cells["tokens of a document: least, median, 95 %, most"].endswith(", 60")
    assert (
        "5 conversations, 1 cut to 60 tokens" in caplog.text
        and "dropped 1 of 5 rows, without a supervised token" in caplog.text
    )


def test_it_reads_a_training_run_s_config(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": [ASKED, FOUR]}] * 4)
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model:\n  target:\n    source: {tokenizer}\n  ttt_steps: 3\ntrainer:\n  max_steps: 5\n"
        f"data:\n  class_path: ChatData\n  init_args:\n    train: {path}\n    seq_len: 64\n"
    )
    assert main(["doctor", "--config", str(config), "--data.seq_len", "32", "--samples", "0"]) == 0
    shown = capsys.readouterr().out
    assert "packed rows" in shown and "training document" not in shown


def test_samples_of_plain_text(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("two plus two is four\n" * 20)
    assert (
        samples(
            tokenizer,
            "--data",
            "TextData",
            "--data.train",
            f"{tmp_path}/*.txt",
            "--data.val_fraction",
            0.5,
        )
        == 0
    )
    assert "100.0% supervised" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("template", "messages", "complaint"),
    [
        (CHATML, [ASKED], "train: of 2 conversations none has a supervised token"),
        (
            CHATML_TAGGED.replace("== 'assistant' %}{% gen", "== 'nobody' %}{% gen"),
            [ASKED, FOUR],
            "message 2: the {% generation %} tags of the chat template mark nothing of it",
        ),
        (None, [ASKED, FOUR], "the target's tokenizer has no chat template"),
    ],
)
def test_masks_of_nothing_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str | None, messages: list[dict[str, Any]],
    complaint: str,
) -> None:  # fmt: skip
    tiny_tokenizer(template).save_pretrained(tmp_path / "target")
    LlamaConfig(vocab_size=300, num_hidden_layers=7).save_pretrained(tmp_path / "target")
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": messages}] * 2)
    assert samples(tmp_path / "target", *CHATS, path, "--data.val", path) == 2
    captured = capsys.readouterr()
    assert complaint in captured.err and captured.out == ""
    assert len(captured.err.splitlines()) == 1


def test_documents_give_the_terminal_no_orders() -> None:
    tokenizer = tiny_tokenizer()
    ids = torch.tensor(tokenizer.encode("a\x1b[2Jb", add_special_tokens=False))
    assert "\x1b" in tokenizer.decode(ids)
    assert "\x1b" not in marked(Document(ids, ids >= 0), tokenizer, ("", "")).plain


def test_supervised_words_are_coloured(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = family_tokenizer("qwen2_5")
    ids = tokenizer("<|im_start|>two four<|im_end|>", return_tensors="pt")["input_ids"][0]
    mask = ids >= 0
    mask[:3] = False
    text = marked(Document(ids, mask), tokenizer, ("", ""))
    styles = {str(span.style): text.plain[span.start : span.end] for span in text.spans}
    assert styles[SUPERVISED].endswith("<|im_end|>") and styles["dim"].startswith("<|im_start|>")
    monkeypatch.setattr(doctor, "SHOWN", 2)
    console = Console(width=60)
    with console.capture() as captured:
        console.print(marked(Document(ids, mask), tokenizer, ("【", "】")))
    assert f"{len(ids) - 2} more tokens" in captured.get()
