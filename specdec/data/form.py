"""Find out what a chat template can express, and in which form a message must be for it, by asking the template.

Templates disagree about everything but ``role``. One reads a thought under ``reasoning_content``, another under
``thinking``, a third takes it out of the text; one needs the arguments of a tool call as an object, another as a string
of JSON; where there is a call and no text, one needs an empty text and another null. A wrong form does not fail: the
template writes ``None``, or leaves out what it does not find. So each form is tried with words that occur nowhere else,
and the one is taken in which all of them appear where the assistant writes.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdec.data.messages import THOUGHT_KEYS, Message
from specdec.data.rendering import ChatTemplateError, Renderer

Tools = Sequence[dict[str, Any]] | None

# words of the trial messages
QUESTION = "Zyquestion"
ANSWER = "Zyanswer"
THOUGHT = "Zythought"
NAME = "zyname"
KEY = "zykey"
VALUE = "Zyvalue"
RESULT = "Zyresult"
SYSTEM = "Zysystem"
OTHER_NAME = "qwname"
OTHER_KEY = "qwkey"
OTHER_VALUE = "Qwvalue"

# names of the switch of thinking
SWITCHES = ("enable_thinking", "thinking", "enable_reasoning", "reasoning")
INLINE = "inline"
AFTER_PROMPT = "after_prompt"
CLOSE = "</think>"
OPEN_TAG = re.compile(r"<think>\s*$")
INLINE_THOUGHT = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)
# the prompt, which opened the thought, is not in the text; a tag inside a sentence is no end of a thought
CLOSED_THOUGHT = re.compile(r"(.*?)^[ \t]*</think>[ \t]*(?:\n(.*)|$)", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Form:
    """How messages are put for one template.

    Args:
        parts: whether texts are lists of parts.
        thought: the key of a thought; "inline": in the text, between tags; "after_prompt": the template drops
            thoughts though its generation prompt opens one, so that the thought follows the prompt as it is; None:
            there is no place for thoughts.
        spaced: whether line ends stand between a thought in the text and its tags.
        arguments: of tool calls, "object" or "text"; None: tool calls are not written.
        silence: the content of a message that has tool calls and no text: "", None, or "absent".
        several: whether more than one call of a message is written.
        tools: whether the functions that may be called are written.
        results: whether results of tools are written.
        system: whether system messages are written.
        developer: the role under which developer messages are written.
        switch: the argument that switches thinking; None if the template has none.
    """

    parts: bool = False
    thought: str | None = None
    spaced: bool = True
    arguments: str | None = None
    silence: str | None = ""
    several: bool = False
    tools: bool = False
    results: bool = False
    system: bool = False
    developer: str = "developer"
    switch: str | None = None

    @property
    def missing(self) -> list[str]:
        """Return the names of what the template cannot express."""
        able = {
            "system messages": self.system,
            "thoughts": self.thought is not None,
            "definitions of tools": self.tools,
            "tool calls": self.arguments is not None,
            "several tool calls in a message": self.several,
            "results of tools": self.results,
        }
        return [name for name, is_able in able.items() if not is_able]

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as specdec keeps them, in the form that the template needs."""
        return [self._message(message) for message in messages]

    def _message(self, message: Message) -> Message:
        text = message.get("content") or ""
        role = message["role"]
        out = {name: value for name, value in message.items() if name not in NOT_FOR_TEMPLATES}
        if role == "developer":
            out["role"] = self.developer
        if role == "assistant":
            thought, text = thought_and_text(message)
            if thought and self.thought in THOUGHT_KEYS:
                out[self.thought] = thought
            elif thought and "reasoning_content" not in message:
                text = message.get("content") or ""
            elif thought and self.thought in (INLINE, AFTER_PROMPT):
                text = f"<think>{self.thought_lines(thought, text)}"
        out["content"] = [{"type": "text", "text": text}] if self.parts and text else text
        if calls := message.get("tool_calls"):
            out["tool_calls"] = [self._call(call) for call in calls]
            if not text and self.silence == "absent":
                del out["content"]
            elif not text:
                out["content"] = self.silence
        return out

    def thought_lines(self, thought: str, text: str) -> str:
        """A thought and what is said after it, as they follow ``<think>`` in one text.

        Servers leave line ends around a thought, which the tags have already.
        """
        thought = thought.strip("\n")
        text = text.lstrip("\n")
        return f"\n{thought}\n</think>\n\n{text}" if self.spaced else f"{thought}</think>{text}"

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        arguments = function.get("arguments", {})
        if self.arguments == "text" and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif self.arguments != "text" and isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        return {**call, "function": {**function, "arguments": arguments}}


NOT_FOR_TEMPLATES = {"reasoning_content", "weight", "token_ids", "prompt_token_ids"}


def thought_and_text(message: Message) -> tuple[str, str]:
    """An assistant's thought and what it says after it; the thought may have its own key or be part of the text."""
    text = message.get("content") or ""
    if message.get("reasoning_content"):
        return message["reasoning_content"], text
    if message["role"] != "assistant" or CLOSE not in text:
        return "", text
    if match := INLINE_THOUGHT.fullmatch(text) or CLOSED_THOUGHT.fullmatch(text):
        return match[1].strip(), (match[2] or "").lstrip("\n")
    return "", text


def call_message(calls: dict[str, dict[str, Any]], **fields: Any) -> Message:
    """An assistant's message that calls functions, by name and arguments."""
    tool_calls = [
        {
            "id": f"call0000{number}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for number, (name, arguments) in enumerate(calls.items(), 1)
    ]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls, **fields}


def trial_tools() -> list[dict[str, Any]]:
    """Return the functions that trial messages call."""
    schema = {"type": "string", "description": "A word."}
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "A function.",
                "parameters": {
                    "type": "object",
                    "properties": {KEY: schema, OTHER_KEY: schema},
                    "required": [KEY],
                },
            },
        }
        for name in (NAME, OTHER_NAME)
    ]


ASKED: Message = {"role": "user", "content": QUESTION}


def find_form(renderer: Renderer) -> Form:
    """Return the form in which all that the template can express appears.

    Raises:
        ValueError: the template is not to be rendered at all.
    """
    renderer.source()
    return _Trials(renderer).form()


class _Trials:
    """Trial conversations, rendered in one form after another."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.tools = trial_tools()

    def form(self) -> Form:
        """Return the whole form; every question is asked with the answers to those before it."""
        form = Form()
        as_parts = Form(parts=True)
        if not self._writes(form, [ASKED], QUESTION) and self._writes(as_parts, [ASKED], QUESTION):
            form = as_parts
        form = replace(form, switch=self._switch(form))
        form = replace(form, thought=self._thought(form))
        form = replace(
            form, spaced=form.thought != AFTER_PROMPT or self._opened(form).endswith("\n")
        )
        form = self._calls(form)
        result = [
            ASKED,
            call_message({NAME: {KEY: VALUE}}),
            {"role": "tool", "content": RESULT, **RESULT_FIELDS},
        ]
        system = [{"role": "system", "content": SYSTEM}, ASKED]
        developer = [{"role": "developer", "content": SYSTEM}, ASKED]
        return replace(
            form,
            several=form.arguments is not None and self._writes_both(form),
            tools=NAME in (self._offered(form) or ""),
            results=form.arguments is not None and self._writes(form, result, RESULT),
            system=self._writes(form, system, SYSTEM),
            developer="developer" if self._writes(form, developer, SYSTEM) else "system",
        )

    def _offered(self, form: Form) -> str | None:
        """Return a question with functions that may be called, or None if the template refuses it."""
        try:
            return self.renderer.render(form.messages([ASKED]), self.tools, True)
        except ChatTemplateError:
            return None

    def _writes_both(self, form: Form) -> bool:
        """Return whether two calls of a message are written."""
        turn = (
            self.turn(
                form, call_message({NAME: {KEY: VALUE}, OTHER_NAME: {OTHER_KEY: OTHER_VALUE}})
            )
            or ""
        )
        return all(word in turn for word in (NAME, VALUE, OTHER_NAME, OTHER_VALUE))

    def text(
        self, form: Form, messages: Sequence[Message], prompt: bool, **switches: bool
    ) -> str | None:
        """Return the rendered conversation, or None if the template refuses it."""
        tools = self.tools if any(message.get("tool_calls") for message in messages) else None
        try:
            return self.renderer.render(form.messages(messages), tools, prompt, **switches)
        except ChatTemplateError:
            return None

    def _writes(self, form: Form, messages: Sequence[Message], word: str) -> bool:
        return word in (self.text(form, messages, prompt=True) or "")

    def turn(self, form: Form, message: Message, **switches: bool) -> str | None:
        """Return what an assistant's message adds to a question, or None if the template refuses it."""
        closed = self.text(form, [ASKED, message], prompt=False, **switches)
        return None if closed is None else closed.partition(QUESTION)[2]

    def _switch(self, form: Form) -> str | None:
        source = self.renderer.source()
        for name in SWITCHES:
            if re.search(rf"\b{name}\b", source):
                states = [
                    self.text(form, [ASKED], prompt=True, **{name: state})
                    for state in (False, True)
                ]
                if None not in states and states[0] != states[1]:
                    return name
        return None

    def _thought(self, form: Form) -> str | None:
        switches = {} if form.switch is None else {form.switch: True}
        source = self.renderer.source()
        message = {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT}
        call = call_message({NAME: {KEY: VALUE}}, reasoning_content=THOUGHT)
        # some templates write the thoughts before calls alone
        for trial, word in ((message, ANSWER), (call, NAME)):
            for key in (*THOUGHT_KEYS, INLINE):
                turn = self.turn(replace(form, thought=key), trial, **switches)
                if (
                    turn is None
                    or turn.count(THOUGHT) != 1
                    or word not in turn.partition(THOUGHT)[2]
                ):
                    continue
                # a template that knows no tags would write any text between them
                is_known = (
                    turn.count(CLOSE) == 1 and CLOSE in source if key == INLINE else key in source
                )
                if is_known:
                    return key
        return AFTER_PROMPT if OPEN_TAG.search(self._opened(form)) else None

    def _opened(self, form: Form) -> str:
        """Return the generation prompt behind which the target thinks; empty if the template refuses a question."""
        switches = {} if form.switch is None else {form.switch: True}
        return self.text(form, [ASKED], prompt=True, **switches) or ""

    def _calls(self, form: Form) -> Form:
        """With the form of tool calls: the first in which name, key and value appear, as JSON if that can be had."""
        message = call_message({NAME: {KEY: VALUE}})
        silences: tuple[str | None, ...] = ("", "absent", None)
        forms = [
            replace(form, arguments=kind, silence=silence)
            for kind in ("object", "text")
            for silence in silences
        ]
        for candidate in forms:
            turn = self.turn(candidate, message)
            if turn is None or not all(word in turn for word in (NAME, KEY, VALUE)):
                continue
            is_python = f"{{'{KEY}" in turn or "None" in turn
            is_escaped = f'\\"{KEY}' in turn
            if not is_python and not is_escaped:
                return candidate
        return form


RESULT_FIELDS = {"name": NAME, "tool_call_id": "call00001"}
