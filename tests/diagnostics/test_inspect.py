"""``specdec inspect`` from its command line."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specdec.cli import main
from specdec.data.loader import Document
from specdec.diagnostics.inspect import SUPERVISED, sample
from tests.data.families import family_tokenizer
from tests.data.tiny import CHATML, CHATML_TAGGED, tiny_tokenizer, write_jsonl

ASKED = {"role": "user", "content": "what is two plus two?"}
FOUR = {"role": "assistant", "content": "four"}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A target's directory, of which only the tokenizer is there: nothing else is loaded."""
    tiny_tokenizer(CHATML).save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def chats(path: Path, rows: list[dict[str, Any]]) -> Path:
    return write_jsonl(path, rows)


def inspect(target: Path, *args: Any) -> int:
    return main(["inspect", "--target", str(target), *map(str, args)])


def test_it_shows_what_is_supervised_and_what_is_lost(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = [{"messages": [ASKED, FOUR]}] * 3
    rows += [{"prompt": "two", "response": "four " * 40}, {"messages": [ASKED]}]
    path = chats(tmp_path / "a.jsonl", rows)
    out = tmp_path / "figures.json"
    options = ["--data", "ChatData", "--data.train", path, "--data.val", path, "--data.seq_len", 60]
    assert inspect(tokenizer, *options, "--samples", 2, "--json", out) == 0
    shown = capsys.readouterr().out
    assert shown.count("【four<|im_end|>】") == 2 and "training document 2" in shown
    record = json.loads(out.read_text())
    train = record["splits"]["train"]
    assert {key: train[key] for key in ("conversations", "silent", "cut", "documents", "supervised_runs")} == {
        "conversations": 5, "silent": 1, "cut": 1, "documents": 4, "supervised_runs": 4,
    }  # fmt: skip
    assert train["supervised_lost"] > 0 and train["tokens_lost"] == train["lengths"]["100%"] - 60
    assert train["runs_end_with"]["<|im_end|>"] == 0.75
    assert set(record["splits"]) == {"train", "validation"}


def test_broken_rows_may_be_left_out(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = chats(tmp_path / "a.jsonl", [{"messages": [ASKED, FOUR]}, {"no": "layout"}, {"messages": [ASKED, FOUR]}])
    with open(path, "a") as file:
        file.write('{"messages": ')
    options = ["--data", "ChatData", "--data.train", path, "--data.val", path, "--data.seq_len", 60]
    assert inspect(tokenizer, *options) == 2
    assert "a.jsonl, line 2: " in capsys.readouterr().err
    assert inspect(tokenizer, *options, "--data.broken", "drop") == 0


def test_it_reads_a_training_run_s_config(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = chats(tmp_path / "a.jsonl", [{"messages": [ASKED, FOUR]}] * 4)
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model:\n  target:\n    source: {tokenizer}\n  ttt_steps: 3\ntrainer:\n  max_steps: 5\n"
        f"data:\n  class_path: ChatData\n  init_args:\n    train: {path}\n    seq_len: 32\n"
    )
    assert main(["inspect", "--config", str(config), "--data.seq_len", "64"]) == 0
    shown = capsys.readouterr().out
    assert "packed rows" in shown and "3 " in shown


def test_text_is_looked_at_too(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("two plus two is four\n" * 20)
    assert (
        inspect(tokenizer, "--data", "TextData", "--data.train", f"{tmp_path}/*.txt", "--data.val_fraction", 0.5) == 0
    )
    shown = capsys.readouterr().out
    assert "100.0%" in shown and "conversations" not in shown


@pytest.mark.parametrize(
    ("template", "messages", "complaint"),
    [
        (CHATML, [ASKED], "train: none of 2 conversations has a supervised token"),
        (CHATML_TAGGED.replace("== 'assistant' %}{% gen", "== 'nobody' %}{% gen"), [ASKED, FOUR], "none of 2 conv"),
        (
            "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}",
            [ASKED, FOUR],
            "train: every token is supervised, prompts included",
        ),
    ],
)
def test_masks_of_nothing_and_of_everything_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str, messages: list[dict[str, Any]], complaint: str
) -> None:
    tiny_tokenizer(template).save_pretrained(tmp_path / "target")
    path = chats(tmp_path / "a.jsonl", [{"messages": messages}] * 2)
    assert inspect(tmp_path / "target", "--data", "ChatData", "--data.train", path, "--data.val", path) == 1
    captured = capsys.readouterr()
    assert complaint in captured.err and captured.out == ""
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "a.jsonl: no such file"),
        ("", "a.jsonl: holds no conversation"),
        ('{"text": "x"}\n', "a.jsonl, line 1: its columns (text) are of no known layout"),
        ('{"messages": [{"role": "user", "content": 3}]}\n', "a.jsonl, line 1: a message's text must be a string"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, complaint: str
) -> None:
    if content is not None:
        (tmp_path / "a.jsonl").write_text(content)
    assert inspect(tokenizer, "--data", "ChatData", "--data.train", tmp_path / "a.jsonl") == 2
    error = capsys.readouterr().err
    assert complaint in error and len(error.splitlines()) == 1


def test_a_target_without_a_template_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    path = chats(tmp_path / "a.jsonl", [{"messages": [ASKED, FOUR]}] * 2)
    assert inspect(tmp_path / "target", "--data", "ChatData", "--data.train", path) == 2
    assert "the target's tokenizer has no chat template" in capsys.readouterr().err


def test_supervised_words_are_coloured() -> None:
    tokenizer = family_tokenizer("qwen2_5")
    ids = tokenizer("<|im_start|>two four<|im_end|>", return_tensors="pt")["input_ids"][0]
    mask = ids >= 0
    mask[:3] = False
    panel = sample(Document(ids, mask), tokenizer, "a", 100, ("", ""))
    styles = {str(span.style): panel.renderable.plain[span.start : span.end] for span in panel.renderable.spans}
    assert styles[SUPERVISED].endswith("<|im_end|>") and styles["dim"].startswith("<|im_start|>")
    console = Console(width=60)
    with console.capture() as captured:
        console.print(sample(Document(ids, mask), tokenizer, "a", 2, ("【", "】")))
    assert f"{len(ids) - 2} more tokens" in captured.get()
