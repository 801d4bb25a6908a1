"""An answer that is read back says what was said, or is text; nothing of it is ever read as something else."""

import copy
import json
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("trl")

from trl.chat_template_utils import add_response_schema

from benchmarks.chat_oracle.tokenizers import templates, tokenizer_of
from specdec.data.form import thought_and_text
from specdec.data.messages import Message
from specdec.data.rendering import ChatTemplateError
from specdec.data.said import TurnError
from specdec.data.template import Template
from tests.data.families import in_default_run
from tests.data.tiny import tiny_tokenizer

ASKED: Message = {"role": "user", "content": "what?"}
SCHEMAS = {"city": {"type": "string"}, "days": {"type": "integer"}, "more": {"type": "object"}}
PROPERTIES = {key: schema | {"description": key} for key, schema in SCHEMAS.items()}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": PARAMETERS}}
    for name in ("get_forecast", "find_tremors")
]
# of templates that write calls, those whose calls stay text: Python's syntax, Gemma's own, and a text in XML
UNREAD = {
    "diffusion_gemma",
    "gemma4",
    "gemma4_v2",
    "gemma4_v3",
    "gemma4_v4",
    "gemma4_v5",
    "muse_glimmer",
}
# numbers alone are read, and one call
PARTLY = {"lfm2_v2", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"}
TEMPLATES = in_default_run(templates(), "gptoss", "qwen3", "glm4moe")
RESPONSES = [
    "gemma4",
    "gemma4_v5",
    "glm4moe",
    "gptoss",
    "lfm2_2_5",
    "llama3_1",
    "nemotron_3_nano",
    "qwen3",
    "qwen3_5_think",
]

MARKS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "</arg_value>",
    "</parameter>",
    "<|im_end|>",
    "<b>",
    "</b>",
]
PIECES = [
    *MARKS,
    "word",
    "two ",
    "ä",
    "5",
    "\n",
    "\n\n",
    "\t",
    " ",
    "{",
    "}",
    "[",
    "]",
    '"',
    "'",
    "\\",
    "=",
    "(",
    ")",
    ", ",
    ": ",
]
texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join)
values = st.recursive(
    st.one_of(st.integers(-99, 99), st.booleans(), st.none(), st.just(1.5), texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("kxy"), inner, max_size=2)
    ),
    max_leaves=4,
)
arguments = st.fixed_dictionaries(
    {"city": texts},
    optional={"days": st.integers(0, 9), "more": st.dictionaries(st.sampled_from("kxy"), values)},
)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    message: Message = {"role": "assistant", "content": draw(texts)}
    if draw(st.booleans()):
        message["reasoning_content"] = draw(texts)
    if draw(st.booleans()):
        names = ["get_forecast", "find_tremors"][: draw(st.integers(1, 2))]
        functions = [{"name": name, "arguments": draw(arguments)} for name in names]
        calls = [
            {"type": "function", "id": f"call0000{n}", "function": one}
            for n, one in enumerate(functions)
        ]
        message |= {"tool_calls": calls, "content": draw(st.sampled_from(["", message["content"]]))}
    # GLM's templates write no end behind a special token, and an empty thought in the text is none
    assume(not message["content"].rstrip().endswith("<|im_end|>"))
    assume("</think>" not in message["content"] or thought_and_text(message)[0].strip())
    return message


def calls_of(message: Message) -> list[tuple[str, Any]]:
    return [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]


def squeezed(text: str) -> str:
    return "".join(text.split())


@cache
def with_responses(name: str) -> Any:
    """The tokenizer with the response template that TRL has for it."""
    return add_response_schema(copy.deepcopy(tokenizer_of(name)))


@cache
def template_with(name: str, responds: bool) -> Template:
    return Template(with_responses(name) if responds else tokenizer_of(name))


def written(template: Template, message: Message) -> str | None:
    """What the target writes to say a message, its end included; None if the template cannot."""
    try:
        rendered = template.turn([ASKED, message], 1, TOOLS if message.get("tool_calls") else None)
    except (TurnError, ChatTemplateError):
        return None
    return rendered.text[rendered.spans[0][0] :]


def check_answer(template: Template, message: Message) -> Message | None:
    """The message that is read of what says it: the same, or what could not be read is text."""
    text = written(template, message)
    if text is None:
        return None
    answer = template.answer(template.tokenizer.encode(text, add_special_tokens=False), TOOLS)
    assert (
        set(answer) <= {"role", "content", "reasoning_content", "tool_calls"}
        and answer["role"] == "assistant"
    )
    calls = calls_of(answer)
    if set(answer) == {"role", "content"} and is_whole(template, answer["content"], text):
        return answer
    thought, words = thought_and_text(answer)
    said_thought, said_words = (part.strip() for part in thought_and_text(message))
    # gpt-oss's text beside a call is a thought
    is_swapped = bool(message.get("tool_calls")) and not said_thought
    assert thought.strip() == (said_words if is_swapped and thought.strip() else said_thought)
    if calls:
        assert calls == calls_of(message)
        assert words.strip() in (said_words, "" if is_swapped else said_words)
    elif message.get("tool_calls"):
        assert squeezed(words) in squeezed(text)  # the call that could not be read, as it stands
    else:
        assert words.strip() == said_words
    return answer


def is_whole(template: Template, words: str, text: str) -> bool:
    """Whether words are all of a text but its end, with special tokens or, where the template refuses them, without."""
    ids = template.tokenizer.encode(text, add_special_tokens=False)
    bare = template.tokenizer.decode(ids, skip_special_tokens=True)
    end = squeezed(text).removeprefix(squeezed(words))
    return squeezed(bare) == squeezed(words) or end in template.special


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(message=messages())
def test_what_is_read_was_said(name: str, message: Message) -> None:
    check_answer(template_with(name, False), message)


@pytest.mark.parametrize("name", in_default_run(RESPONSES, "qwen3", "gemma4"))
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(message=messages())
def test_what_a_response_template_reads_was_said(name: str, message: Message) -> None:
    check_answer(template_with(name, True), message)


CALLING: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "type": "function",
            "id": "call00001",
            "function": {"name": "get_forecast", "arguments": {"city": "Zürich", "days": 3}},
        }
    ],
}


def reads_calls(template: Template) -> bool | None:
    """Whether a plain call is read; None if the template writes none."""
    answer = check_answer(template, CALLING)
    return None if answer is None else bool(calls_of(answer))


@pytest.mark.slow
def test_whose_calls_are_read() -> None:
    read = {name: reads_calls(template_with(name, False)) for name in templates()}
    unread = {name for name, is_read in read.items() if is_read is False}
    assert unread == UNREAD | PARTLY
    assert sum(is_read is True for is_read in read.values()) >= 16


@pytest.mark.parametrize("name", in_default_run(RESPONSES, "qwen3", "gemma4"))
def test_calls_are_read_by_a_response_template(name: str) -> None:
    assert reads_calls(template_with(name, True))


def test_strings_that_look_like_numbers_are_told_by_the_tools() -> None:
    for name in ("glm4moe", "qwen3_5_think"):
        template = template_with(name, False)
        call = {
            "type": "function",
            "function": {"name": "get_forecast", "arguments": {"city": "75001", "days": 3}},
        }
        message = {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [call],
        }
        ids = template.tokenizer.encode(written(template, message), add_special_tokens=False)
        assert calls_of(template.answer(ids, TOOLS)) == [
            ("get_forecast", {"city": "75001", "days": 3})
        ]
        assert calls_of(template.answer(ids)) == [("get_forecast", {"city": 75001, "days": 3})]
        odd: list[Any] = [{"function": "x"}, {"name": "get_forecast", "parameters": []}, {}]
        assert calls_of(template.answer(ids, odd)) == [("get_forecast", {"city": 75001, "days": 3})]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(message=messages(), cut=st.floats(0, 1), swap=st.booleans())
def test_any_tokens_are_a_message_that_stands_in_them(
    name: str, message: Message, cut: float, swap: bool
) -> None:
    """Answers that were cut off, or in which a token stands twice: what is read has the words of what was written."""
    template = template_with(name, False)
    text = written(template, message)
    if text is None:
        return
    ids = template.tokenizer.encode(text, add_special_tokens=False)
    size = int(cut * len(ids))
    ids = [*ids[:size], *ids[max(0, size - 1) :]] if swap else ids[: max(1, size)]
    answer = template.answer(ids, TOOLS)
    json.dumps(answer)
    whole = squeezed(template.tokenizer.decode(ids))
    bare = squeezed(template.tokenizer.decode(ids, skip_special_tokens=True))
    for words in (answer["content"], answer.get("reasoning_content", "")):
        assert squeezed(words) in whole or squeezed(words) in bare
    for function, _ in calls_of(answer):
        assert function in whole


def test_a_tokenizer_whose_response_template_is_broken_is_read_without() -> None:
    tokenizer = tiny_tokenizer(tokenizer_of("qwen3").chat_template)
    plain: Message = {"role": "assistant", "content": "word"}
    for broken in ({}, {"fields": 5}, {"fields": {"content": {}}}):
        tokenizer.response_template = broken
        template = Template(tokenizer)
        assert (
            template.answer(tokenizer.encode("word<|im_end|>", add_special_tokens=False)) == plain
        )
