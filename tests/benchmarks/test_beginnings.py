"""Which files the beginnings come from, and what is written of them."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import beginnings


@pytest.mark.parametrize(
    ("more", "row"),
    [([], {"id": "train:0", "text": "t"}), (["--held_out"], {"prompt_id": "held out:0", "prompt": "t"})],
    ids=["trained on", "held out"],
)
def test_nothing_held_out_is_trained_on(
    more: list[str], row: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(sources: str, count: int, tokens: int, *_: Any) -> list[dict[str, str]]:
        assert tokens == 9
        return [{"prompt_id": f"{sources}:{n}", "prompt": "t"} for n in range(count)]

    monkeypatch.setattr(beginnings, "corpus", lambda seed: SimpleNamespace(train="train", held_out="held out"))
    monkeypatch.setattr(beginnings, "TargetSource", lambda: SimpleNamespace(load_tokenizer=lambda: None))
    monkeypatch.setattr(beginnings, "cut_prompts", cut)
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["beginnings", "--out", str(out), "--count", "2", "--tokens", "9", *more])
    assert beginnings.main() == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 2 and rows[0] == row
