"""The record of a decoded answer and its file; the target's own answers."""

import json
from pathlib import Path

import pytest

from specdec.decoding import PlainDecoder
from specdec.evaluation.answers import Answer, greedy_answers, read_answers, write_answers
from tests.tiny import tiny_target

ANSWER = Answer("7", "math", 5, (2, 1), (3, 3), 0.5, 1.0, 5, True)
TIMED = ANSWER._replace(draft_ms=(0.5, 0.25), verify_ms=(2.0, 3.0), category=None, identical=None)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    answers = [[ANSWER, TIMED, ANSWER._replace(prompt_id="ü\u2028x", accepted=(), drafted=())], [TIMED]]
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


def test_greedy_answers_are_plain_decodings() -> None:
    target, prompts = tiny_target(), [[3, 4, 5], [9], list(range(20))]
    found = greedy_answers(target, prompts, 12, batch=2)
    assert found == [PlainDecoder(target).generate(prompt, 12).ids for prompt in prompts]
    end = found[0][3]
    cut = greedy_answers(target, prompts[:1], 12, end=[end])[0]
    assert cut == found[0][: found[0].index(end) + 1]
