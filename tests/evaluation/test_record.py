import json
from pathlib import Path

import pytest

from specdec.evaluation.record import Answer, fault, read_answers, write_answers

ANSWER = Answer("7", "math", 5, (2, 1), (3, 3), 0.5, 1.0, 5, True)
TIMED = ANSWER._replace(context=(10, 13), draft_ms=(0.5, 0.25), verify_ms=(2.0, 3.0), category=None, identical=None)


def test_an_answer_cannot_be_changed_and_needs_no_times() -> None:
    assert hash(ANSWER) == hash(ANSWER._replace())
    assert (ANSWER.context, ANSWER.draft_ms, ANSWER.verify_ms) == ((), (), ())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    answers = [[ANSWER, TIMED, ANSWER._replace(prompt_id="ü\u2028x", accepted=(), drafted=())], [TIMED]]
    write_answers(tmp_path / "answers.jsonl", ["chain", "tree"], answers)
    assert read_answers(tmp_path / "answers.jsonl", 2) == answers
    first = json.loads((tmp_path / "answers.jsonl").read_text().split("\n")[0])
    assert (first["growth"], first["prompt_id"], first["accepted"]) == ("chain", "7", [2, 1])
    assert read_answers(tmp_path / "answers.jsonl", 3)[2] == []


@pytest.mark.parametrize(
    "changes",
    [
        {"drafted": (2,)}, {"drafted": (2, 0)}, {"accepted": (-1, 0)}, {"context": (1,)}, {"verify_ms": (1.0, -1.0)},
        {"draft_ms": (1.0, 2.0, 3.0)}, {"tokens": -1}, {"seconds": -0.5},
    ],
)  # fmt: skip
def test_impossible_answers_are_refused(changes: dict, tmp_path: Path) -> None:
    assert fault(ANSWER) is None and fault(TIMED) is None
    bad = ANSWER._replace(**changes)
    assert fault(bad)
    write_answers(tmp_path / "answers.jsonl", ["chain"], [[ANSWER, bad]])
    with pytest.raises(ValueError, match=r"answers.jsonl, line 2: not an answer of specdec evaluate: ") as error:
        read_answers(tmp_path / "answers.jsonl", 1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not an answer"),
        ("[]", "line 1: not an answer"),
        ('{"result": 0, "colour": "red"}', "colour"),
        ('{"growth": "chain"}', "result"),
        (json.dumps({"result": 1, **ANSWER._asdict()}), "no result 1"),
        (json.dumps({"result": 0, **ANSWER._asdict(), "tokens": "many"}), "line 1: not an answer"),
    ],
)
def test_a_file_of_another_kind_is_refused(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        read_answers(tmp_path / "x.jsonl", 1)


def test_no_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x.jsonl: no such file"):
        read_answers(tmp_path / "x.jsonl", 1)
