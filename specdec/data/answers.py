"""A target's answer, read back from its tokens into thought, text and tool calls.

The structure is the template's own: it is asked to write messages of which every word is known, and what stands around
the words is what an answer is taken apart by.
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specdec.data.form import (
    ANSWER,
    ASKED,
    KEY,
    NAME,
    OTHER_KEY,
    OTHER_NAME,
    OTHER_VALUE,
    THOUGHT,
    VALUE,
    Tools,
    call_message,
    trial_tools,
)
from specdec.data.messages import Message
from specdec.data.rendering import ChatTemplateError
from specdec.data.said import TurnError

if TYPE_CHECKING:
    from specdec.data.template import Template

WORD = re.compile(r"[\w.:/-]+")  # a function's name, or an argument's


@dataclass(frozen=True)
class ThoughtFrame:
    """The text around a thought: its opening (empty where the generation prompt has it) and its closing."""

    opening: str
    closing: str

    def split(self, text: str) -> tuple[str, str]:
        """Return an answer's thought and what follows it; no thought where the frame does not stand."""
        stripped = text.lstrip()
        if self.closing not in text or (self.opening and not stripped.startswith(self.opening)):
            return "", text
        thought, _, rest = stripped.removeprefix(self.opening).partition(self.closing)
        return thought.strip(), rest

    def unfinished(self, text: str) -> tuple[str, str]:
        """Split an answer that was cut off, perhaps within the thought or its closing."""
        stripped = text.strip()
        if self.closing in text or not stripped.startswith(self.opening):
            return self.split(text)
        thought = stripped.removeprefix(self.opening)
        begun = [size for size in range(len(self.closing)) if thought.endswith(self.closing[:size])]
        return thought[: len(thought) - begun[-1]].strip(), ""


@dataclass(frozen=True)
class CallFrame:
    """The text around the parts of a tool call.

    Args:
        opening: before the first call's name.
        middle: between name and arguments.
        following: between the arguments of one call and the name of the next; None if the template writes one only.
        closing: behind the last call's arguments.
        pair: between a key and its value, and between a value and the next key, where arguments are no JSON.
    """

    opening: str
    middle: str
    following: str | None
    closing: str
    pair: tuple[str, str] | None

    def split(self, text: str, tools: Tools = None) -> tuple[str, list[dict[str, Any]]]:
        """Return the text before the calls, and the calls; raise ValueError if what follows the opening is no call."""
        said, opening, rest = text.partition(self.opening.strip())
        if not opening:
            return text, []
        calls = []
        while True:
            name, middle, rest = rest.partition(self.middle)
            if not middle or not WORD.fullmatch(name.strip()):
                raise ValueError("a tool call has no name, or no arguments")
            name = name.strip()
            arguments, rest = self._arguments(rest, strings_of(tools, name))
            calls.append({"type": "function", "function": {"name": name, "arguments": arguments}})
            if self.following is None or not rest.startswith(self.following):
                break
            rest = rest.removeprefix(self.following)
        if rest.strip() != self.closing.strip():
            raise ValueError("a tool call is not closed")
        return said, calls

    def _arguments(self, text: str, strings: Collection[str]) -> tuple[dict[str, Any], str]:
        """Return the arguments at the beginning of a text, of which some are strings, and what follows them."""
        if self.pair is None:
            start = len(text) - len(text.lstrip())
            arguments, end = json.JSONDecoder().raw_decode(text, start)
            return arguments, text[end:]
        equals, comma = self.pair
        arguments = {}
        while True:
            key, separator, text = text.partition(equals)
            ends = [place for place in (text.find(comma), text.find(self.closing)) if place >= 0]
            if self.following is not None and (place := text.find(self.following)) >= 0:
                ends.append(place)
            if not separator or not ends or not WORD.fullmatch(key):
                raise ValueError("a tool call's arguments do not end")
            value = text[: min(ends)]
            arguments[key] = value if key in strings else typed(value)
            text = text[min(ends) :]
            if not text.startswith(comma):
                return arguments, text
            text = text.removeprefix(comma)


def typed(text: str) -> Any:
    """Return a value that is written without saying whether it is a string."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def strings_of(tools: Tools, name: str) -> set[str]:
    """Return the parameters of a function that are strings by its schema."""
    functions = [
        tool["function"] if isinstance(tool.get("function"), dict) else tool for tool in tools or ()
    ]
    schemas = [function.get("parameters") for function in functions if function.get("name") == name]
    properties = schemas[0].get("properties") if schemas and isinstance(schemas[0], dict) else None
    if not isinstance(properties, dict):
        return set()
    return {
        key
        for key, value in properties.items()
        if isinstance(value, dict) and value.get("type") == "string"
    }


class AnswerParser:
    """Reads the answers of one template's target."""

    def __init__(self, template: "Template") -> None:
        self.template = template
        text = self._trial({"role": "assistant", "content": ANSWER})
        self.before_text = text.partition(ANSWER)[0] if text else ""
        self.behind_text = text.partition(ANSWER)[2] if text else ""
        self.thought = self._thought_frame()
        self.call = self._call_frame()

    def message(self, ids: Sequence[int], tools: Tools = None) -> Message:
        """Return the message that the ids are; see :meth:`Template.answer`.

        Args:
            tools: that the target could call; they tell strings from numbers where the template writes both alike.
        """
        text = self.decoded(ids, keep_special=True)
        body = self.without_end(text)
        # response templates may trim white space off arguments
        candidates = (
            self._with_calls(body, tools),
            self._by_tokenizer(ids, tools),
            self._without_calls(body),
        )
        for candidate in candidates:
            if candidate is not None and self._agrees(candidate, body):
                return candidate
        return self._as_text(ids, body)

    def _as_text(self, ids: Sequence[int], body: str) -> Message:
        """An answer that cannot be read: all of it is text.

        Some templates refuse their own marks in a text (gpt-oss). Then it is what can be read of an answer that was
        cut off, or what is left without special tokens.
        """
        whole: Message = {"role": "assistant", "content": body}
        if self._is_rendered(whole):
            return whole
        if self.thought:
            thought, text = self.thought.unfinished(body)
            # the marks that open a text
            is_begun = self.before_text.strip().startswith(text.strip())
            cut_off = self._message(thought, "" if is_begun else text, [])
            written = self._trial(cut_off)
            if written is not None and written.startswith(body):
                return cut_off
        return {"role": "assistant", "content": self.decoded(ids, keep_special=False)}

    def _is_rendered(self, message: Message) -> bool:
        """Return whether the template takes the message before another question."""
        try:
            self.template.prompt([ASKED, message, ASKED])
        except ChatTemplateError:
            return False
        return True

    def decoded(self, ids: Sequence[int], keep_special: bool) -> str:
        """Return the text of some tokens, with special ones or without."""
        tokenizer = self.template.tokenizer
        text: str = tokenizer.decode(
            list(ids), skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False
        )
        return text

    def without_end(self, text: str) -> str:
        """Return an answer's text without the token that ends it."""
        stripped = text.rstrip()
        ends = [token for token in self.template.special if stripped.endswith(token)]
        if not ends or self.template.closes_markup(stripped):
            return text
        return stripped.removesuffix(max(ends, key=len))

    def _by_tokenizer(self, ids: Sequence[int], tools: Tools) -> Message | None:
        """Return the message as transformers reads it, if the tokenizer came with a response template, else None."""
        tokenizer = self.template.tokenizer
        if getattr(tokenizer, "response_template", None) is None:
            return None
        try:
            # the prompt may hold the opening of a thought
            parsed = tokenizer.parse_response(
                list(ids), prefix=self.template.prompt([ASKED]), tools=tools
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
        message: Message = {"role": "assistant", "content": parsed.get("content") or ""}
        if (
            thought := parsed.get("reasoning_content")
            or parsed.get("thinking")
            or parsed.get("reasoning")
        ):
            message["reasoning_content"] = thought
        if calls := parsed.get("tool_calls"):
            message["tool_calls"] = [
                {"type": "function", "function": call.get("function", call)} for call in calls
            ]
        return message

    def _with_calls(self, body: str, tools: Tools) -> Message | None:
        """Return a message with tool calls, or None if there are none that can be read."""
        thought, rest = self._thought_and_rest(body)
        if self.call is None:
            return None
        try:
            text, calls = self.call.split(rest, tools)
        except (ValueError, RecursionError):
            return None
        return self._message(thought, text.strip(), calls) if calls else None

    def _without_calls(self, body: str) -> Message:
        thought, rest = self._thought_and_rest(body)
        start = self.before_text.strip()
        if rest.startswith(self.before_text):
            rest = rest.removeprefix(self.before_text)
        elif start and rest.lstrip().startswith(start):
            rest = rest.lstrip().removeprefix(start)
        rest = rest.removesuffix(self.behind_text)
        return self._message(thought, rest.strip() if thought else rest, [])

    def _thought_and_rest(self, body: str) -> tuple[str, str]:
        return self.thought.split(body) if self.thought else ("", body)

    @staticmethod
    def _message(thought: str, text: str, calls: list[dict[str, Any]]) -> Message:
        message: Message = {"role": "assistant", "content": text}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        return message

    def _agrees(self, message: Message, body: str) -> bool:
        """Return whether the template writes the same text of the message, up to white space."""
        written = self._trial(message)
        return written is not None and "".join(written.split()) == "".join(body.split())

    def _trial(self, message: Message) -> str | None:
        """Return what an assistant writes that says the message, without the end, or None if that is refused."""
        tools = trial_tools() if message.get("tool_calls") else None
        try:
            rendered = self.template.turn([ASKED, message], 1, tools)
        except (TurnError, ChatTemplateError):
            return None
        start = rendered.spans[0][0]
        return self.without_end(rendered.text[start:])

    def _thought_frame(self) -> ThoughtFrame | None:
        text = self._trial({"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT})
        call = self._trial(call_message({NAME: {KEY: VALUE}}, reasoning_content=THOUGHT))
        if text is None:
            return None
        opening, _, rest = text.partition(THOUGHT)
        closing = rest.partition(ANSWER)[0]
        if call is not None and THOUGHT in call:
            # what is common to both closes the thought; the rest opens the text, or the call
            other = call.partition(THOUGHT)[2]
            closing = closing[: common_length(closing, other)]
        else:
            closing = closing.removesuffix(self.before_text)
        return ThoughtFrame(opening.strip(), closing.strip()) if closing.strip() else None

    def _call_frame(self) -> CallFrame | None:
        first = self._trial(call_message({NAME: {KEY: VALUE}}))
        if first is None:
            return None
        both = self._trial(call_message({NAME: {KEY: VALUE}, OTHER_NAME: {OTHER_KEY: OTHER_VALUE}}))
        opening, _, rest = first.partition(NAME)
        json_start = json_object_start(rest)
        if json_start is not None:
            end = json.JSONDecoder().raw_decode(rest, json_start)[1]
            middle = rest[:json_start].rstrip()
            following = None if both is None else self._following(both, is_json=True)
            return CallFrame(opening, middle, following, rest[end:], None)
        middle, _, pair = rest.partition(KEY)
        equals, _, closing = pair.partition(VALUE)
        two = self._trial(call_message({NAME: {KEY: VALUE, OTHER_KEY: OTHER_VALUE}}))
        comma = "" if two is None else two.partition(VALUE)[2].partition(OTHER_KEY)[0]
        if not (middle and equals and comma):
            return None
        following = None if both is None else self._following(both, is_json=False)
        return CallFrame(opening, middle, following, closing, (equals, comma))

    def _following(self, both: str, is_json: bool) -> str:
        """Return what stands between the first call's arguments and the second call's name."""
        behind_name = both.partition(NAME)[2]
        if is_json:
            start = json_object_start(behind_name) or 0
            end = json.JSONDecoder().raw_decode(behind_name, start)[1]
            return behind_name[end:].partition(OTHER_NAME)[0]
        return behind_name.partition(VALUE)[2].partition(OTHER_NAME)[0]


def common_length(first: str, second: str) -> int:
    """Return how many characters two texts begin with in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next(
        (place for place, (left, right) in pairs if left != right), min(len(first), len(second))
    )


def json_object_start(text: str) -> int | None:
    """Return where the trial call's arguments begin as JSON, or None if they are written otherwise."""
    place = text.find("{")
    while place >= 0:
        try:
            if json.JSONDecoder().raw_decode(text, place)[0] == {KEY: VALUE}:
                return place
        except (ValueError, RecursionError):
            pass
        place = text.find("{", place + 1)
    return None
