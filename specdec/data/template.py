"""Find what the assistant writes in a conversation, by the target's own chat template.

A drafter drafts what the target writes, in the context in which the target writes it. So each assistant turn is
rendered as it was generated: the messages before it and the generation prompt, then the turn, as the template writes a
last turn. Nothing is searched for by marker strings, since users write markers, too.

The form of messages that a template reads is found first (:mod:`specdec.data.form`). After that every turn is checked:
what the row says must stand in the turn, or the turn is refused with the reason.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

from specdec.data.answers import AnswerParser
from specdec.data.form import (
    AFTER_PROMPT,
    ANSWER,
    ASKED,
    Form,
    Tools,
    find_form,
    thought_and_text,
)
from specdec.data.messages import Message
from specdec.data.prefix import text_prefix, undoubled
from specdec.data.regions import Marks, spans, token_regions
from specdec.data.rendering import ChatTemplateError, Renderer, template_digest
from specdec.data.said import REMEDY, TurnError, check_context, check_turn
from specdec.data.surroundings import Surroundings, Switches
from specdec.utils.text import printable

NO_PROMPT = (
    "the chat template does not begin it with its own generation prompt, as after another message of the assistant's: "
    "join the messages, or end the row before it"
)
XML_END = re.compile(r"</([^<>]+)>")


class TextSpan(NamedTuple):
    """Characters of a text: the first, and the one past the last."""

    start: int
    end: int


Spans = Sequence[tuple[int, int]]


class Rendered(NamedTuple):
    """A text and the characters of it that are supervised."""

    text: str
    spans: Spans
    tail: str = ""  # what the template writes behind the text where the conversation ends there


def check_tokenizer(tokenizer: Any) -> None:
    """Refuse a tokenizer that conversations cannot be rendered with.

    Raises:
        ValueError: the tokenizer is not a fast one, or has no template.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            "chat data needs a fast tokenizer: only those say which characters a token covers"
        )
    if not tokenizer.chat_template:
        raise ValueError(
            "the target's tokenizer has no chat template: choose the instruction-tuned target, "
            "set tokenizer.chat_template, or train on plain text"
        )


@contextlib.contextmanager
def tokenizing() -> Iterator[None]:
    """Raise whatever a tokenizer raises as a ValueError; the tokenizers library raises bare Exceptions."""
    try:
        yield
    except Exception as error:
        reason = " ".join(printable(str(error)).split())[:300]
        raise ValueError(
            f"the tokenizer fails on a text: {reason}: is its tokenizer.json as it should be?"
        ) from error


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """The token ids of a text that a target is to continue, with the special tokens that the tokenizer adds (BOS).

    A text that begins with BOS gets no second one.

    Raises:
        ValueError: the tokenizer makes no tokens of the text.
    """
    with tokenizing():
        ids = undoubled(tokenizer.encode(text, add_special_tokens=True), text_prefix(tokenizer))
    if not ids:
        raise ValueError("the tokenizer makes no tokens of it: it is empty")
    return ids


class Template:
    """A tokenizer's chat template, understood by asking it.

    Raises:
        ValueError: the tokenizer has no template, or the template is not to be rendered.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.renderer = Renderer(tokenizer)
        self.form: Form = find_form(self.renderer)
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.special = tuple({*added, *tokenizer.all_special_tokens})
        self.around = Surroundings(self.renderer, self.form, self.special, tokenizer.bos_token)

    # prompts

    def prompt(
        self, messages: Sequence[Message], tools: Tools = None, thinking: bool | None = None
    ) -> str:
        """The text after which the assistant writes.

        Args:
            thinking: whether the target is to think; None leaves it to the template.

        Raises:
            ValueError: the template refuses the messages, or cannot switch thinking.
        """
        return self._render(messages, tools, True, self.switches(thinking))

    def prompt_ids(
        self, messages: Sequence[Message], tools: Tools = None, thinking: bool | None = None
    ) -> list[int]:
        """The token ids of :meth:`prompt`; ValueError also if the tokenizer makes none."""
        return self.ids_of(self.prompt(messages, tools, thinking))

    def ids_of(self, text: str) -> list[int]:
        """The token ids of a text that :meth:`prompt` gave; ValueError if there are none."""
        with tokenizing():
            # the template writes the special tokens itself: adding them would double the first
            ids = self.tokenizer.encode(text, add_special_tokens=False)
        if not ids:
            raise ValueError("the tokenizer makes no tokens of it: it is empty")
        return list(ids)

    def switches(self, thinking: bool | None) -> Switches:
        """The template's arguments that switch thinking on or off.

        Raises:
            ValueError: the template has no such switch.
        """
        if thinking is None:
            return {}
        if self.form.switch is None:
            raise ValueError("the chat template has no switch for thinking: leave out --thinking")
        return {self.form.switch: thinking}

    def _render(
        self, messages: Sequence[Message], tools: Tools, prompt: bool, switches: Switches
    ) -> str:
        return self.renderer.render(self.form.messages(messages), tools, prompt, **switches)

    def answer(self, ids: Sequence[int], tools: Tools = None) -> Message:
        """The message that a target wrote as token ids, with or without the token that ends it.

        Its thought, text and tool calls are read by the template's own structure. That is believed only if the template
        writes the same text of the message again, up to white space; otherwise all of it is the message's text.

        Args:
            tools: that it could call; they tell strings from numbers where the template writes both alike.
        """
        return self._parser.message(ids, tools)

    def regions(self, ids: Sequence[int], prompt: str, tools: Tools = None) -> list[str]:
        """Of every token of a target's answer, which of :data:`specdec.data.regions.REGIONS` it is in.

        Args:
            prompt: the text that is answered, as of :meth:`prompt`; it may have opened a thought.
            tools: that the target could call; without any, nothing is a call.
        """
        parser = self._parser
        marks = Marks.of(parser.thought, parser.call, prompt, parser.before_text, tools)
        decode = partial(parser.decoded, keep_special=True)
        return token_regions(ids, decode, spans(decode(ids), marks))

    @cached_property
    def _parser(self) -> AnswerParser:
        return AnswerParser(self)

    # turns

    def turn(self, messages: Sequence[Message], number: int, tools: Tools = None) -> Rendered:
        """Assistant turn ``messages[number]`` behind the prompt that it answers; the model's own words are the spans.

        Raises:
            ChatTemplateError: the template refuses the conversation.
            TurnError: what was said does not stand in the turn, or a message before it not in the prompt.
        """
        message = messages[number]
        thought, _ = thought_and_text(message)
        self._check_place(messages, number, tools)
        refusals: list[ValueError] = []
        for switches in self.around.states(bool(thought)):
            try:
                return self._turn_in_state(messages, number, tools, switches)
            except (TurnError, ChatTemplateError) as error:
                refusals.append(error)
        raise refusals[0]

    def _check_place(self, messages: Sequence[Message], number: int, tools: Tools) -> None:
        """Refuse a turn of which the template has been seen to leave something out, or that is not a whole turn."""
        message = messages[number]
        calls = message.get("tool_calls") or []
        text = message["content"].rstrip()
        roles = {earlier["role"] for earlier in messages[:number]}
        if number == 0:
            raise TurnError("it is the assistant's, before anybody spoke: remove the message")
        if calls and self.form.arguments is None:
            raise TurnError(f"the chat template has no place for its tool call: {REMEDY}")
        if len(calls) > 1 and not self.form.several:
            raise TurnError(f"the chat template writes one tool call of a message alone: {REMEDY}")
        if message.get("reasoning_content") and self.form.thought is None:
            raise TurnError(f"the chat template has no place for its thought: {REMEDY}")
        if message.get("finish_reason") == "length":
            raise TurnError(
                "it was cut off (finish_reason length) and has no token_ids: leave it out"
            )
        if text.endswith(self.special) and not self.closes_markup(text):
            raise TurnError(
                "its text ends with a special token, which the chat template writes itself: remove it"
            )
        if tools and not self.form.tools and self.form.arguments is not None:
            raise TurnError("the chat template does not write the row's tools: remove them")
        if "tool" in roles and not self.form.results:
            raise TurnError(
                "the chat template does not write results of tools: end the row before them"
            )
        if roles & {"system", "developer"} and not self.form.system:
            raise TurnError("the chat template does not write system messages: remove it")

    def _turn_in_state(
        self, messages: Sequence[Message], number: int, tools: Tools, switches: Switches
    ) -> Rendered:
        message = messages[number]
        thought, _ = thought_and_text(message)
        prompt = self._render(messages[:number], tools, True, switches)
        whole = self._render(messages[: number + 1], tools, False, switches)
        closed = whole.removesuffix(self.around.closing)
        is_opened = self.around.opens_thought(prompt, switches)
        if is_opened and not thought:
            raise TurnError(
                "the generation prompt opens a thought and the turn has none: use specdec regenerate"
            )
        if is_opened and self.form.thought == AFTER_PROMPT:
            closed = self._after_prompt(prompt, message)
        spans = (
            self._tagged(messages[: number + 1], tools, switches)
            if self.renderer.has_tags
            else None
        )
        if not closed.startswith(prompt):
            if spans:
                prompt = closed[: spans[-1].start]
            else:
                closed = prompt + self._after_header(
                    messages[:number], tools, switches, prompt, closed
                )
        elif not spans and closed.startswith(self.special, len(prompt)):
            self._check_prompt(messages[:number], tools, switches, prompt)
        text = prompt + self._with_end(closed[len(prompt) :], bool(message.get("tool_calls")))
        whole_turn = [TextSpan(len(prompt), len(text))]
        spans = whole_turn if spans is None else self._within(spans, len(prompt), text)
        if not spans:
            raise TurnError(
                "the {% generation %} tags of the chat template mark nothing of it: correct or remove them"
            )
        check_turn(message, "".join(text[start:end] for start, end in spans))
        check_context(messages[:number], prompt)
        return Rendered(text, spans, whole[len(text) :] if whole.startswith(text) else "")

    def _after_header(
        self,
        messages: Sequence[Message],
        tools: Tools,
        switches: Switches,
        prompt: str,
        closed: str,
    ) -> str:
        """The turn where the template writes the messages before it otherwise than in the prompt.

        Where it begins is seen by a turn with another text in its place, behind the same header that the generation
        prompt adds to the messages.
        """
        header = prompt.removeprefix(self._render(messages, tools, False, switches))
        answer = [{"role": "assistant", "content": ANSWER}]
        other = self._render([*messages, *answer], tools, False, switches).partition(ANSWER)[0]
        alone = self.around.trial([ASKED, *answer], False, switches).partition(ANSWER)[0]
        before_text = alone.removeprefix(self.around.trial([ASKED], True, switches))
        start = len(other) - len(before_text)
        is_cut = other.endswith(header + before_text) and closed.startswith(other[:start])
        if (
            header == prompt
            or not is_cut
            or self._last_special(other[:start]) != self._last_special(prompt)
        ):
            raise TurnError(NO_PROMPT)
        return closed[start:]

    def _last_special(self, text: str) -> str:
        """The special token that stands last in a text."""
        return max(self.special, key=text.rfind, default="")

    def _check_prompt(
        self, messages: Sequence[Message], tools: Tools, switches: Switches, prompt: str
    ) -> None:
        """Refuse a turn whose header the template writes whatever is said, and not in a generation prompt."""
        if prompt != self._render(messages, tools, False, switches):
            return
        answer = [{"role": "assistant", "content": ANSWER}]
        other = self._render([*messages, *answer], tools, False, switches)
        if other.startswith(self.special, len(prompt)):
            raise TurnError(
                "the chat template has no generation prompt there, so the assistant's header cannot be told from its "
                "answer: use a template that knows add_generation_prompt or has {% generation %} tags"
            )

    def _tagged(
        self, messages: Sequence[Message], tools: Tools, switches: Switches
    ) -> list[TextSpan]:
        """Return the spans that the template's own tags mark."""
        spans = self.renderer.tagged(self.form.messages(messages), tools, **switches)
        return [TextSpan(start, end) for start, end in spans]

    def _within(self, spans: Sequence[TextSpan], first: int, text: str) -> list[TextSpan]:
        """Tagged spans from ``first`` on; the last also takes the end of the turn if it stops right before that."""
        inside = [
            TextSpan(max(start, first), min(end, len(text))) for start, end in spans if end >= first
        ]
        if inside and text[inside[-1].end :].strip() in self.special:
            inside[-1] = TextSpan(inside[-1].start, len(text))
        return inside

    def _after_prompt(self, prompt: str, message: Message) -> str:
        """A turn of a template that drops thoughts: after the prompt, which opens one, as DeepSeek-R1 writes it.

        That is ``<think>``, a line end, the thought, a line end, ``</think>``, a blank line and the answer
        (https://arxiv.org/abs/2501.12948).
        """
        if message.get("tool_calls"):
            raise TurnError(
                f"the chat template does not write a thought before a tool call: {REMEDY}"
            )
        thought, text = thought_and_text(message)
        if "reasoning_content" in message:
            written = self.form.thought_lines(thought, text)
        else:
            written = message["content"].lstrip().removeprefix("<think>")
        written = written.removeprefix("\n") if prompt.endswith("\n") else written
        return prompt + written + self.around.behind_text

    def _with_end(self, turn: str, has_calls: bool) -> str:
        """A turn up to the token that ends it; the token is added where the template leaves it to the next message."""
        stripped = turn.rstrip()
        if stripped.endswith(self.special) and not self.closes_markup(stripped):
            return stripped
        end = self.around.end_of_call if has_calls else self.around.end_of_text
        return stripped + end if end else turn

    def closes_markup(self, text: str) -> bool:
        """Whether the text ends with a closing tag of something that was opened in it, such as a tool call."""
        match = XML_END.search(text, max(0, text.rfind("</")))
        return match is not None and match.end() == len(text) and f"<{match[1]}>" in text


def template_of(tokenizer: Any) -> Template:
    """The tokenizer's template, understood once, and again if the tokenizer has got another.

    Raises:
        ValueError: as of :class:`Template`.
    """
    if not tokenizer.chat_template:
        return Template(tokenizer)  # which says that there is none
    return _template(tokenizer, template_digest(tokenizer))


@lru_cache(8)
def _template(tokenizer: Any, digest: str) -> Template:
    return Template(tokenizer)
