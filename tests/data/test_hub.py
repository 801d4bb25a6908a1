"""Rows by their name on the Hub, without the Hub."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets.exceptions import DatasetNotFoundError

from specdec.evaluation.prompts import load_prompts
from specdec.evaluation.rows import read_rows, stem

SUMS = [{"question": "1 + 1?", "answer": "2"}, {"question": "1 + 2?", "answer": "3"}]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the Hub was asked for; it has sums."""
    seen: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str, *, split: str, revision: str | None) -> datasets.Dataset:
        seen.append((name, config, split, revision))
        return datasets.Dataset.from_list(SUMS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return seen


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("hub:openai/gsm8k:main:test", ("openai/gsm8k", "main", "test", None)),
        ("hub:openai/gsm8k@1a2b:main:train[:80]", ("openai/gsm8k", "main", "train[:80]", "1a2b")),
    ],
)
def test_repository_config_split_and_revision(
    asked: list[tuple[Any, ...]], source: str, wanted: tuple[Any, ...]
) -> None:
    assert [row.values for row in read_rows(source)] == SUMS
    assert asked == [wanted]
    assert stem(source) == "gsm8k"


def test_prompts_come_from_the_hub(asked: list[tuple[Any, ...]], tmp_path: Path) -> None:
    (tmp_path / "more.jsonl").write_text(json.dumps({"id": "row-2", "turns": ["x"]}))
    prompts = load_prompts(["hub:openai/gsm8k:main:test", tmp_path / "more.jsonl"])
    assert [(prompt.prompt_id, prompt.category, prompt.turns) for prompt in prompts] == [
        ("row-1", "gsm8k", ["1 + 1?"]), ("gsm8k:row-2", "gsm8k", ["1 + 2?"]), ("more:row-2", None, ["x"]),
    ]  # fmt: skip


def test_a_directory_of_data_is_read_like_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through ``datasets`` itself, which takes a directory for a repository's name."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    assert [row.values for row in read_rows(f"hub:{tmp_path / 'sums'}:default:test")] == SUMS
    with pytest.raises(ValueError, match=r"sums:default:train: not to be had .*train") as caught:
        list(read_rows(f"hub:{tmp_path / 'sums'}:default:train"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["hub:gsm8k", "hub:openai/gsm8k:test", "hub:", "hub:a/b:c:", "hub:a/b@:c:d"])
def test_a_name_that_says_too_little_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match=r"write hub:REPOSITORY:CONFIG:SPLIT, as hub:openai/gsm8k:main:test"):
        load_prompts([source])


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub\n(OfflineModeIsEnabled)"),
        DatasetNotFoundError("Dataset 'openai/gsm8k' doesn't exist\non the Hub"),
        ValueError("BuilderConfig 'x' not found.\nAvailable: ['main']"),
        RuntimeError("Dataset scripts are no longer\nsupported"),
    ],
)
def test_what_cannot_be_had_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def load_dataset(*args: Any, **more: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"^hub:openai/gsm8k:main:test: not to be had from the Hub") as caught:
        load_prompts(["hub:openai/gsm8k:main:test"])
    assert "\n" not in str(caught.value) and str(error).split()[-1] in str(caught.value)
