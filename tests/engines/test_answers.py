"""The target in this process; what it answers, tests/engines/test_regenerate.py and test_regenerate_chats.py show."""

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.engines.answers import InProcess, RegenerateConfig, is_json
from specdec.engines.dialogue import Dialogue, Turn, unpacked
from specdec.target import Target


@pytest.mark.parametrize(("text", "sound"), [('{"a": [1, "ä"]}', True), ("NaN", False), ('{"a": ["\\ud800"]}', False)])
def test_what_a_file_can_hold(text: str, sound: bool) -> None:
    """A model may write any of these between the marks of a call."""
    assert is_json({"role": "assistant", "tool_calls": [{"function": {"arguments": json.loads(text)}}]}) == sound


class Unwritable:
    """A template that reads every answer as a call of a number that JSON does not have."""

    def prompt_ids(self, *asked: Any) -> list[int]:
        return [3, 4, 5]

    def answer(self, ids: list[int]) -> dict[str, Any]:
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": float("nan")}}],
        }


def test_an_answer_that_no_file_can_hold_is_text(target: Target) -> None:
    """It would end the run, and every one that goes on with it."""
    engine = InProcess(target, RegenerateConfig(data=[], out=Path("x.jsonl"), max_new_tokens=4))
    engine.template = Unwritable()  # type: ignore[assignment]
    (answer,) = engine.answers([Dialogue("a", "", [Turn([{"role": "user", "content": "the sky"}])])])
    assert answer.calls == [] and answer.failed is None
    assert answer.text == target.tokenizer.decode(unpacked(str(answer.token_ids)))
