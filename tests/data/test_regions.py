"""Regions of an answer: thought, tool call, code and text, for the chat templates that TRL ships."""

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("trl")

from benchmarks.chat_oracle.tokenizers import templates, tokenizer_of
from specdec.data.answers import CallFrame, ThoughtFrame
from specdec.data.messages import Message
from specdec.data.regions import CALL, CODE, TEXT, THOUGHT, spans, token_regions
from specdec.data.said import TurnError
from specdec.data.template import Template
from tests.data.families import in_default_run

ASKED: Message = {"role": "user", "content": "what?"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_forecast",
            "description": "The weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
THINKS = "perhaps snow"
SAYS = "Run this:\n```python\nprint(sunshine)\n```\nand look."
CALLS: Any = [
    {
        "type": "function",
        "id": "call00000",
        "function": {"name": "get_forecast", "arguments": {"city": "Reykjavik"}},
    }
]
FAMILIES = in_default_run(templates(), "gptoss", "qwen3", "llama3_1")
THINK = ThoughtFrame("<think>", "</think>")
JSON_CALL = CallFrame('<tool_call>\n{"name": "', '", "arguments": ', None, "}\n</tool_call>", None)


def regions_of(template: Template, message: Message, tools: Any = None) -> tuple[str, list[str]]:
    """What an assistant writes that says a message, and the regions of its tokens."""
    rendered = template.turn([ASKED, message], 1, tools)
    ids = template.tokenizer.encode(rendered.text[rendered.spans[0][0] :], add_special_tokens=False)
    return decoded(template, ids), template.regions(ids)


def decoded(template: Template, ids: Sequence[int]) -> str:
    return template.tokenizer.decode(
        ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def regions_of_word(template: Template, text: str, regions: Sequence[str], word: str) -> set[str]:
    """The regions of the tokens inside a word, found by counting the tokens of the text before it."""
    ids = template.tokenizer.encode(text, add_special_tokens=False)
    start = text.index(word)
    first = next(n for n in range(len(ids)) if len(decoded(template, ids[: n + 1])) > start)
    end = next(
        n for n in range(len(ids) + 1) if len(decoded(template, ids[:n])) >= start + len(word)
    )
    return set(regions[first + 1 : end])


@pytest.mark.parametrize("name", FAMILIES)
def test_every_word_is_in_the_region_in_which_the_template_writes_it(name: str) -> None:
    template = Template(tokenizer_of(name))
    plain: Message = {"role": "assistant", "content": SAYS}
    thinking: Message = {**plain, "reasoning_content": THINKS}
    calling: Message = {"role": "assistant", "content": "", "tool_calls": CALLS}
    checked = 0
    for message, tools in ((plain, None), (thinking, None), (calling, TOOLS)):
        try:
            text, regions = regions_of(template, message, tools)
        except TurnError:
            continue
        wanted = {"print(sunshine)": CODE, "and look": TEXT, THINKS: THOUGHT, "Reykjavik": CALL}
        for word, region in wanted.items():
            if word in text:
                assert regions_of_word(template, text, regions, word) <= {region}, (word, text)
                checked += 1
    assert checked >= 2


def test_a_thought_that_is_cut_off_lasts_to_the_end() -> None:
    assert spans("<think>so", THINK, None) == [(THOUGHT, 0, 9)]
    assert spans("no thought", THINK, None) == []
    # the prompt has opened it
    assert spans("so</think>yes", ThoughtFrame("", "</think>"), None) == [(THOUGHT, 0, 10)]


def test_a_call_that_cannot_be_read_is_a_call_too() -> None:
    assert spans('ab<tool_call>{"nam', None, JSON_CALL) == [(CALL, 2, 18)]
    assert spans("ab", None, JSON_CALL) == []


def test_marks_inside_a_thought_open_nothing() -> None:
    text = "<think>a ```b``` <tool_call></think>Z"
    assert spans(text, THINK, JSON_CALL) == [(THOUGHT, 0, text.index("Z"))]


def test_an_unclosed_fence_is_code_to_the_end() -> None:
    assert spans("a ```x", None, None) == [(CODE, 2, 6)]


def test_tokens_of_several_characters_belong_to_the_later_region() -> None:
    pieces = ["ab", "``", "`c`", "``d", "e"]
    text = "".join(pieces)
    (code,) = spans(text, None, None)
    assert (code.start, code.end) == (2, 9)

    def decode(ids: Sequence[int]) -> str:
        return "".join(pieces[n] for n in ids)

    assert token_regions(range(5), decode, [code]) == [TEXT, CODE, CODE, TEXT, TEXT]
