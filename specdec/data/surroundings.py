"""The text that a chat template writes around an assistant's words, found by trial conversations and asked once."""

import json
from collections.abc import Sequence
from functools import cached_property

from specdec.data.form import (
    AFTER_PROMPT,
    ANSWER,
    ASKED,
    KEY,
    NAME,
    OPEN_TAG,
    RESULT,
    RESULT_FIELDS,
    THOUGHT,
    VALUE,
    Form,
    call_message,
    trial_tools,
)
from specdec.data.messages import Message
from specdec.data.rendering import ChatTemplateError, Renderer

FOLLOWING = "Zyfollowing"  # a question after an answer
Switches = dict[str, bool]


class Surroundings:
    """The text around an assistant's words in one template.

    Args:
        special: the tokenizer's special tokens.
        bos: its beginning-of-sequence token, which ends no turn.
    """

    def __init__(
        self, renderer: Renderer, form: Form, special: tuple[str, ...], bos: str | None
    ) -> None:
        self.renderer = renderer
        self.form = form
        self.special = special
        self.bos = bos

    def trial(
        self, messages: Sequence[Message], prompt: bool, switches: Switches | None = None
    ) -> str:
        """Return a rendered trial conversation; empty if the template refuses it."""
        tools = trial_tools() if any(message.get("tool_calls") for message in messages) else None
        try:
            return self.renderer.render(
                self.form.messages(messages), tools, prompt, **(switches or {})
            )
        except ChatTemplateError:
            return ""

    def states(self, has_thought: bool) -> list[Switches]:
        """States of thinking in which a turn may have been generated, the likeliest first."""
        if self.form.switch is None:
            return [{}]
        return [{self.form.switch: has_thought}, {}]

    @cached_property
    def closing(self) -> str:
        """The token that ends a conversation rather than a turn, if there is one: a question alone has it as well."""
        asked = self.trial([ASKED], prompt=False)
        opened = self.trial([ASKED], prompt=True)
        if opened.startswith(asked):
            return ""
        ends = [token for token in self.special if asked.endswith(token)]
        return next((token for token in ends if opened.startswith(asked.removesuffix(token))), "")

    @cached_property
    def behind_text(self) -> str:
        """The text that the template writes behind an answer's."""
        turn = self.trial([ASKED, {"role": "assistant", "content": ANSWER}], prompt=False)
        return turn.removesuffix(self.closing).rpartition(ANSWER)[2]

    @cached_property
    def end_of_text(self) -> str:
        """The token that ends an answer whose template writes none: the one that opens the next message, as in GLM."""
        answer: Message = {"role": "assistant", "content": ANSWER}
        following: Message = {"role": "user", "content": FOLLOWING}
        return self._first_special(
            self.trial([ASKED, answer, following], prompt=False), ANSWER, FOLLOWING
        )

    @cached_property
    def end_of_call(self) -> str:
        """The token that ends a tool call whose template writes none; the one that ends an answer if that does."""
        call = call_message({NAME: {KEY: VALUE}})
        result = {"role": "tool", "content": RESULT, **RESULT_FIELDS}
        closed = (
            self.trial([ASKED, call], prompt=False)
            .removesuffix(self.closing)
            .rpartition(VALUE)[2]
            .rstrip()
        )
        following = (
            self.trial([ASKED, call, result], prompt=False)
            .rpartition(RESULT)[0]
            .rpartition(VALUE)[2]
        )
        if not closed or not following.startswith(closed):
            return ""
        return self._first_special(VALUE + following[len(closed) :] + RESULT, VALUE, RESULT)

    def _first_special(self, text: str, first: str, last: str) -> str:
        """The special token, and white space before it, that follows one word of a text with another behind."""
        between = text.partition(first)[2].partition(last)[0]
        stripped = between.lstrip()
        tokens = [
            token for token in self.special if stripped.startswith(token) and token != self.bos
        ]
        if not tokens:
            return ""
        return between[: len(between) - len(stripped)] + max(tokens, key=len)

    def opens_thought(self, prompt: str, switches: Switches) -> bool:
        """Whether the model is inside a thought when it begins to write."""
        if self.form.thought in (None, AFTER_PROMPT):
            return OPEN_TAG.search(prompt) is not None
        return self._opened_states[json.dumps(switches)]

    @cached_property
    def _opened_states(self) -> dict[str, bool]:
        """By the state of thinking, whether a thought follows the generation prompt without its own opening."""
        thinker: Message = {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT}
        opened = {}
        for switches in (*self.states(True), *self.states(False)):
            prompt = self.trial([ASKED], prompt=True, switches=switches)
            closed = self.trial([ASKED, thinker], prompt=False, switches=switches)
            is_after = closed.startswith(prompt) and THOUGHT in closed
            opened[json.dumps(switches)] = (
                is_after and not closed[len(prompt) :].partition(THOUGHT)[0].strip()
            )
        return opened
