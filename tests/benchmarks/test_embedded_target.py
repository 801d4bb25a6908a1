"""The embedded target is trained, measured and described by one command."""

import json
from pathlib import Path

import pytest

from benchmarks import embedded_target
from benchmarks.embedded_target import CARD, make_target
from specdec.embedded import RECORD
from specdec.utils.reading import check_sums, read_json
from tests.commands.test_pretraining import recipe
from tests.embedded import conftest

small_library = conftest.small_library


def test_the_target_has_a_record_a_card_and_answers(
    small_library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    conftest.use_library(monkeypatch, small_library)
    monkeypatch.setattr(embedded_target, "ANSWERS", 3)
    monkeypatch.setattr(embedded_target, "BEGINNINGS", (12,))
    monkeypatch.setattr(embedded_target, "PROMPT_TOKENS", 24)
    monkeypatch.setattr(embedded_target, "NEW_TOKENS", 16)
    monkeypatch.chdir(tmp_path)
    assert make_target(recipe("model")) == 0
    check_sums(Path("model"), "")
    record = read_json(f"model/{RECORD}")
    assert len(record["attention_sink"]["heads"]) == 2 and 0 <= record["looping"] <= 1
    assert record["weights_sha256"] in Path("model", CARD).read_text()
    rows = [json.loads(line) for line in Path("model/answers.jsonl").read_text().splitlines()]
    assert len(rows) == record["answers"] > 0
    assert all(row["text"] and row["ended"] in (True, False) for row in rows)
    assert not Path("model.trained").exists()
    assert make_target(recipe("model")) == 0  # is there already
    with pytest.raises(ValueError, match="choose another --out"):
        make_target(recipe("model", seed=1))
