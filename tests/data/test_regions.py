"""Regions of an answer: thought, tool call, code and text, for the chat templates that TRL ships."""

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("trl")

from benchmarks.chat_oracle.tokenizers import templates, tokenizer_of
from specdec.data.answers import CallFrame, ThoughtFrame
from specdec.data.messages import Message
from specdec.data.regions import (
    CALL,
    CODE,
    TEXT,
    THOUGHT,
    Marks,
    Span,
    spans,
    token_ends,
    token_regions,
)
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
    start = rendered.spans[0][0]
    ids = template.tokenizer.encode(rendered.text[start:], add_special_tokens=False)
    return decoded(template, ids), template.regions(ids, rendered.text[:start], tools)


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


# families whose thoughts have no mark that can be found, and those whose calls have none
UNKNOWN_THOUGHTS = {"diffusion_gemma", "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4"}
UNKNOWN_CALLS = {"muse_glimmer"}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_word_is_in_the_region_in_which_the_template_writes_it(name: str) -> None:
    template = Template(tokenizer_of(name))
    plain: Message = {"role": "assistant", "content": SAYS}
    thinking: Message = {**plain, "reasoning_content": THINKS}
    calling: Message = {"role": "assistant", "content": "", "tool_calls": CALLS}
    wanted = {"print(sunshine)": CODE, "and look": TEXT, THINKS: THOUGHT, "Reykjavik": CALL}
    checked = set()
    for message, tools in ((plain, None), (thinking, None), (calling, TOOLS), (plain, TOOLS)):
        try:
            text, regions = regions_of(template, message, tools)
        except TurnError:
            continue
        for word, region in wanted.items():
            if word in text:
                inside = regions_of_word(template, text, regions, word)
                if inside <= {region}:
                    checked.add(region)
                    continue
                unknown = {THOUGHT: UNKNOWN_THOUGHTS, CALL: UNKNOWN_CALLS}.get(region, set())
                assert name in unknown and inside == {TEXT}, (word, text, regions)
    assert {CODE, TEXT} <= checked


def marked(text: str, thought: ThoughtFrame | None, call: CallFrame | None) -> list[Span]:
    return spans(text, Marks.of(thought, call, "", "", TOOLS))


def test_a_thought_that_is_cut_off_lasts_to_the_end() -> None:
    assert marked("<think>so", THINK, None) == [(THOUGHT, 0, 9)]
    assert marked("no thought", THINK, None) == []
    # the prompt has opened it
    assert marked("so</think>yes", ThoughtFrame("", "</think>"), None) == [(THOUGHT, 0, 10)]


def test_a_call_that_cannot_be_read_is_a_call_too() -> None:
    assert marked('ab\n<tool_call>{"nam', None, JSON_CALL) == [(CALL, 3, 19)]
    assert marked("ab", None, JSON_CALL) == []


def test_a_mark_in_a_sentence_or_a_fence_begins_no_call() -> None:
    assert marked("use `<tool_call>` here", None, JSON_CALL) == []
    fenced = "```\n<tool_call>\n```"
    assert marked(fenced, None, JSON_CALL) == [(CODE, 0, len(fenced))]


def test_without_tools_nothing_is_a_call() -> None:
    assert Marks.of(None, JSON_CALL, "", "", None).call is None
    assert Marks.of(None, JSON_CALL, "", "<tool_call>", TOOLS).call is None


@pytest.mark.parametrize(
    ("text", "is_call"),
    [
        ('{"name": "get_forecast", "parameters": {}}', True),
        ('{"name":"get_forecast"', True),
        ('{ "name" : "get_forecast"', True),
        ('{"name": "app", "version": 1}', False),
        ('```json\n{"name": "get_forecast"}\n```', False),
    ],
)
def test_a_call_without_a_tag_names_a_tool(text: str, is_call: bool) -> None:
    frame = CallFrame('{"name": "', '", "parameters": ', None, "}", None)
    assert any(span.region == CALL for span in marked(text, None, frame)) is is_call


def test_a_prompt_that_has_closed_its_thought_has_no_thought_in_the_answer() -> None:
    frame = ThoughtFrame("", "</think>")
    opened = Marks.of(frame, None, "ask <think>\n", "", None)
    closed = Marks.of(frame, None, "ask <think>\n\n</think>\n\n", "", None)
    assert spans("Hello", opened) == [(THOUGHT, 0, 5)] and spans("Hello", closed) == []
    assert spans("", opened) == []


def test_characters_of_several_tokens_move_no_border() -> None:
    text = "aaa\U0001f600\U0001f600```b```c"
    ids = list(text.encode())

    def decode(some: Sequence[int]) -> str:
        return bytes(some).decode(errors="replace")

    def decode_with_byte_fallback(some: Sequence[int]) -> str:
        # these tokenizers write each byte of an unfinished character as one replacement
        return "".join(
            "\ufffd" if 0xDC80 <= ord(c) <= 0xDCFF else c
            for c in bytes(some).decode(errors="surrogateescape")
        )

    for how in (decode, decode_with_byte_fallback):
        assert token_ends(ids, how)[-1] == len(text)
        regions = token_regions(ids, how, marked(text, None, None))
        assert [
            bytes([byte]) for byte, region in zip(ids, regions, strict=True) if region == CODE
        ] == [bytes([byte]) for byte in b"```b```"]


def test_marks_inside_a_thought_open_nothing() -> None:
    text = "<think>a ```b``` <tool_call></think>Z"
    assert marked(text, THINK, JSON_CALL) == [(THOUGHT, 0, text.index("Z"))]


def test_an_unclosed_fence_is_code_to_the_end() -> None:
    assert marked("a ```x", None, None) == [(CODE, 2, 6)]


def test_tokens_of_several_characters_belong_to_the_later_region() -> None:
    pieces = ["ab", "``", "`c`", "``d", "e"]
    text = "".join(pieces)
    (code,) = marked(text, None, None)
    assert (code.start, code.end) == (2, 9)

    def decode(ids: Sequence[int]) -> str:
        return "".join(pieces[n] for n in ids)

    assert token_regions(range(5), decode, [code]) == [TEXT, CODE, CODE, TEXT, TEXT]
