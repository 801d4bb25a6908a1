"""The target in this process; what it answers, tests/engines/test_regenerate.py and test_regenerate_chats.py show."""

import json

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.answering.in_process import InProcess, is_json
from specdec.answering.settings import AnswerSettings
from specdec.target import Target
from tests.engines.chat_targets import FAMILIES, chat_tokenizer


@pytest.mark.parametrize(
    ("text", "sound"), [('{"a": [1, "ä"]}', True), ("NaN", False), ('{"a": ["\\ud800"]}', False)]
)
def test_what_a_file_can_hold(text: str, sound: bool) -> None:
    """A model may write any of these between the marks of a call."""
    assert (
        is_json(
            {"role": "assistant", "tool_calls": [{"function": {"arguments": json.loads(text)}}]}
        )
        == sound
    )


def test_a_call_that_no_file_can_hold_is_text() -> None:
    """It would end the run, and every one that goes on with it."""
    tokenizer = chat_tokenizer(FAMILIES["qwen3"])
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1,
    )  # fmt: skip
    target = Target(LlamaForCausalLM(config), tokenizer)
    engine = InProcess(target, AnswerSettings(), batch=1)
    for arguments, calls in (('{"a": 1}', 1), ('{"a": NaN}', 0)):
        call = f'{{"name": "add", "arguments": {arguments}}}'
        text = f"<think>\nhm\n</think>\n\n<tool_call>\n{call}\n</tool_call><|im_end|>"
        message = engine.message(tokenizer.encode(text, add_special_tokens=False))
        assert is_json(message) and len(message.get("tool_calls", [])) == calls
        assert calls or arguments in message["content"]
