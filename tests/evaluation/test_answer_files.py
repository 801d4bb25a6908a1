"""The file of decoded answers."""

import json
from pathlib import Path

import pytest

from specdec.evaluation.metrics import Answer, read_answers, write_answers

ANSWER = Answer("7", "math", 5, (2, 1), (3, 3), 0.5, 1.0, 5, True)
TIMED = ANSWER._replace(draft_ms=(0.5, 0.25), verify_ms=(2.0, 3.0), category=None, identical=None)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    answers = [
        [ANSWER, TIMED, ANSWER._replace(prompt_id="ü\u2028x", accepted=(), drafted=())],
        [TIMED],
    ]
    write_answers(tmp_path / "answers.jsonl", ["chain", "tree"], answers)
    assert read_answers(tmp_path / "answers.jsonl", 2) == answers
    first = json.loads((tmp_path / "answers.jsonl").read_text().split("\n")[0])
    assert (first["shape"], first["prompt_id"], first["accepted"]) == ("chain", "7", [2, 1])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not an answer"),
        ("[]", "line 1: not an answer"),
        ('{"result": 0, "colour": "red"}', "colour"),
        (json.dumps({"result": 1, **ANSWER._asdict()}), "line 1: not an answer"),
        (None, "x.jsonl: no such file"),
    ],
)
def test_a_file_of_another_kind_is_refused(line: str | None, message: str, tmp_path: Path) -> None:
    if line is not None:
        (tmp_path / "x.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        read_answers(tmp_path / "x.jsonl", 1)
