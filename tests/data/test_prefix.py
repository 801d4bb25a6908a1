"""What a tokenizer puts in front of a text stands there once."""

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from specdec.data.prefix import text_prefix, undoubled
from specdec.data.template import template_of, text_ids
from tests.data.tiny import LLAMA3, TWO_TURNS, tiny_tokenizer


def beginning(prefix: str, template: str | None = None) -> Any:
    """A tokenizer that puts special tokens in front of a text."""
    tokenizer = tiny_tokenizer(template)
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in prefix.split()]
    single = f"{prefix} $A <|eos|>".strip()
    ids.append(("<|eos|>", tokenizer.eos_token_id))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=single, special_tokens=ids
    )
    return tokenizer


@pytest.mark.parametrize("prefix", ["<|bos|>", "<|im_start|> <|bos|>", ""])
def test_a_prefix_is_what_stands_before_the_text(prefix: str) -> None:
    tokenizer = beginning(prefix)
    ids = tokenizer.convert_tokens_to_ids(prefix.split())
    assert text_prefix(tokenizer) == ids
    said = tokenizer.encode("two", add_special_tokens=False)
    for text in ("two", prefix.replace(" ", "") + "two"):
        assert text_ids(tokenizer, text) == [*ids, *said, tokenizer.eos_token_id]


def test_a_tokenizer_that_adds_nothing_takes_nothing_off() -> None:
    tokenizer = tiny_tokenizer()
    bos = tokenizer.bos_token_id
    assert text_prefix(tokenizer) == [] and text_ids(tokenizer, "<|bos|><|bos|>two")[:2] == [
        bos,
        bos,
    ]
    assert (
        undoubled([1, 1, 2], [1]) == [1, 2]
        and undoubled([1, 2, 1], [1]) == [1, 2, 1]
        and undoubled([], [1]) == []
    )


def test_a_conversation_keeps_what_the_template_writes() -> None:
    tokenizer = beginning("<|bos|>", LLAMA3)
    rendered = tokenizer.apply_chat_template(TWO_TURNS[:1], add_generation_prompt=True)["input_ids"]
    assert (
        template_of(tokenizer).prompt_ids(TWO_TURNS[:1]) == rendered
        and rendered.count(tokenizer.bos_token_id) == 1
    )
