"""A journal survives a kill, and nothing of another work is taken for its own."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from specdec.utils.journal import Journal


def written(path: Path, settings: dict[str, Any], *entries: dict[str, Any]) -> list[dict[str, Any]]:
    with Journal(path, "test", settings) as journal:
        before = list(journal.entries)
        for entry in entries:
            journal.append(entry)
    return before


def test_work_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "journal.jsonl"
    assert written(path, {"a": 1}, {"row": 1}, {"row": 2}) == []
    assert written(path, {"a": 1}, {"row": 3}) == [{"row": 1}, {"row": 2}]
    assert written(path, {"a": 1}) == [{"row": 1}, {"row": 2}, {"row": 3}]


@pytest.mark.parametrize("torn", [b'{"ro', b'{"row": 9}', b"\xff\xff"])
def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    written(path, {}, {"row": 1})
    with path.open("ab") as file:
        file.write(torn)
    assert written(path, {}, {"row": 2}) == [{"row": 1}]
    assert written(path, {}) == [{"row": 1}, {"row": 2}]


def test_a_first_line_that_a_kill_cut_short_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    written(path, {"a": 1})
    for length in (0, 7):
        path.write_bytes(path.read_bytes()[:length])
        assert written(path, {"a": 1}, {"row": 1}) == [] and written(path, {"a": 1}) == [{"row": 1}]


def test_two_processes_do_not_write_one_journal(tmp_path: Path) -> None:
    with (
        Journal(tmp_path / "j", "test", {}),
        pytest.raises(ValueError, match="another process writes it"),
    ):
        written(tmp_path / "j", {})


def begun(kind: str, settings: dict[str, Any]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "j"
        with Journal(path, kind, settings):
            return path.read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (begun("other", {}), "no journal of test"),
        (begun("test", {"a": 2}), "begun otherwise: a 2 there, 1 now"),
        (begun("test", {"a": 1}) + "nonsense\n{}\n", "line 2: damaged"),
        (begun("test", {"a": 1}) + "[1]\n", "line 2: damaged"),
        (
            json.dumps({"journal": "test", "settings": {"a": 1}}) + "\n",
            "line 1: damaged, or of an earlier specdec",
        ),
        ("my notes", "no journal of test"),
    ],
)
def test_what_is_not_this_works_journal_is_refused_and_kept(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        written(path, {"a": 1}, {"row": 1})
    assert path.read_text() == text
