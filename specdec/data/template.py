"""A conversation as text, by the target's own template, and which characters of it the model itself writes.

A template with ``{% generation %}`` tags says so itself. Else the conversation is rendered up to each assistant turn:
what is added between the generation prompt and the end of the turn is the model's own. Some templates write a turn
otherwise once the conversation has gone on (they drop earlier thinking, move the system prompt, or end a last turn with
another token); such a turn is found by rendering the conversation with other words in its place, twice: what stays
the same is not the turn's.
"""

import contextlib
import hashlib
import json
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from specdec.data.layouts import ChatConversation, Message
from specdec.data.prefix import text_prefix, undoubled
from specdec.utils.text import printable

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
THINKING_SWITCHES = ("enable_thinking", "thinking")  # of templates whose models can do without

# what a rendering may take; a real one takes less than a thousandth of each
SECONDS, MEMORY = 10.0, 2**30  # bytes
CHARACTERS, TEMPLATE, NUMBER = 2**25, 2**20, 10**6  # of the text; of the template, and the largest number in it
UNNOTICED = 0.1  # seconds before memory is looked at

WORDS = ("0123", "abcd")  # put in a message's place; they differ in their first and in their last letter


class TextSpan(NamedTuple):
    """Characters of a text: the first, and the one behind the last."""

    start: int
    end: int


class Frame(NamedTuple):
    """What the template writes before and behind a message's words, whatever they are."""

    before: str
    behind: str


Spans = Sequence[tuple[int, int]]


class Rendered(NamedTuple):
    """A conversation's text and the characters that the assistant wrote, end of turn included."""

    text: str
    spans: Spans


def check_tokenizer(tokenizer: Any) -> None:
    """Refuse what conversations cannot be rendered with.

    Raises:
        ValueError: the tokenizer is not a fast one, or has no template.
    """
    if not tokenizer.is_fast:
        raise ValueError("chat data needs a fast tokenizer: only those say which characters a token covers")
    if not tokenizer.chat_template:
        raise ValueError(
            "the target's tokenizer has no chat template: choose the instruction-tuned target, "
            "set tokenizer.chat_template, or train on plain text"
        )


def rendered(tokenizer: Any, messages: Sequence[Message], prompt: bool, **more: Any) -> str:
    """A conversation's text in the chat template; ``more`` is the template's, as ``enable_thinking``.

    Args:
        prompt: end with the generation prompt, behind which the assistant goes on.

    Raises:
        ValueError: the template refuses the conversation, or takes more time or memory than a rendering may.
    """
    with _limited(more.get("chat_template") or tokenizer.chat_template):
        text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False, **more))
        if len(text) > CHARACTERS:
            raise ValueError(f"it makes {len(text):,} characters of it")
    return text


@contextlib.contextmanager
def tokenizing() -> Iterator[None]:
    """Whatever a foreign tokenizer raises inside, which of tokenizers is a bare Exception, as a ValueError."""
    try:
        yield
    except Exception as error:
        reason = " ".join(printable(str(error)).split())[:300]
        raise ValueError(f"the tokenizer fails on a text: {reason}: is its tokenizer.json as it should be?") from error


class _TakesTooMuch(BaseException):
    """Not an Exception: Jinja would pass over it here and there."""


@contextlib.contextmanager
def _limited(template: Any) -> Iterator[None]:
    """Render inside, in bounded time and memory; whatever a template raises is a ValueError.

    Jinja's sandbox keeps a template from the machine, not from looping for ever. A trace function looks at the clock
    at every line of the compiled template and every call below it. It cannot interrupt one operation: powers and large
    numbers, which make one long, are refused before, and the system holds the whole process to the memory meanwhile,
    where no other thread could want some.
    """
    begin, peak, before = time.perf_counter(), _peak_memory(), sys.gettrace()

    def look(frame: FrameType, event: str, arg: object) -> Any:
        spent = time.perf_counter() - begin
        if spent > UNNOTICED and (spent > SECONDS or _peak_memory() - peak > MEMORY):
            raise _TakesTooMuch
        return look if frame.f_code.co_filename == "<template>" else None

    try:
        for source in template.values() if isinstance(template, dict) else [template]:
            _check_source(source)
        with _little_memory():
            sys.settrace(look)
            try:
                yield
            finally:
                sys.settrace(before)
    except (_TakesTooMuch, Exception) as error:  # a template raises what it likes
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, MemoryError | _TakesTooMuch):
            reason = f"it takes more than {SECONDS:g} s or {MEMORY / 2**30:g} GiB"
        elif isinstance(error, jinja2.TemplateError | ValueError):
            reason = str(error)
        reason = " ".join(printable(reason).split())[:300]
        raise ValueError(f"the chat template refuses the conversation: {reason}") from error


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    """Inside, an operation that takes more memory than a rendering may is a MemoryError; on Linux, without threads."""
    if sys.platform != "linux" or threading.active_count() > 1:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(most, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _peak_memory() -> int:
    """Bytes that this process has had resident at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@lru_cache(64)
def _check_source(source: str) -> None:
    """Refuse a template that one operation of could take for ever."""
    if not isinstance(source, str) or len(source) > TEMPLATE:
        raise ValueError(f"it is no text of at most {TEMPLATE:,} characters")
    for line, kind, word in jinja2.Environment().lex(source):
        number = kind == "integer" and (len(word) > 20 or int(word, 0) > NUMBER)
        if number or (kind == "operator" and word == "**"):
            raise ValueError(f"line {line}: {word[:20]}: templates with powers or numbers above {NUMBER:,} are not run")


def template_digest(tokenizer: Any) -> str:
    """Hexadecimal SHA-256 of the chat template's text, or of its templates' by their names."""
    template = tokenizer.chat_template
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def prompt_ids(tokenizer: Any, prompt: str | Sequence[Message], **more: Any) -> list[int]:
    """The token ids that a target is to continue.

    Args:
        prompt: text, used as it is behind the special tokens that the tokenizer adds (BOS), once where it begins with
            them itself; or a conversation, in the chat template and with its generation prompt.
        more: the template's, as ``enable_thinking``.

    Raises:
        ValueError: there is no template, it refuses the conversation, or the tokenizer makes no tokens of the text.
    """
    if not isinstance(prompt, str) and tokenizer.chat_template is None:
        raise ValueError("the tokenizer has no chat template, which a conversation needs: give text or token ids")
    text = prompt if isinstance(prompt, str) else rendered(tokenizer, prompt, True, **more)
    with tokenizing():
        # the template writes the special tokens itself: adding them again would double the first one
        ids = tokenizer.encode(text, add_special_tokens=isinstance(prompt, str))
        if isinstance(prompt, str):
            ids = undoubled(ids, text_prefix(tokenizer))
    if not ids:
        raise ValueError("the tokenizer makes no tokens of it")
    return list(ids)


class Template:
    """A tokenizer's chat template.

    Raises:
        ValueError: as of :func:`check_tokenizer`.
    """

    def __init__(self, tokenizer: Any) -> None:
        check_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.special = tuple({*added, *tokenizer.all_special_tokens})
        self._closing: str | None = None  # not looked for yet

    def _text(self, conversation: ChatConversation, messages: list[Message], prompt: bool = False, **more: Any) -> str:
        try:
            return rendered(self.tokenizer, messages, prompt, tools=conversation.tools, **more)
        except ValueError as error:
            raise ValueError(f"{conversation.place}: {error}") from error

    def render(self, conversation: ChatConversation) -> Rendered:
        """The whole conversation, and the spans of its assistant turns.

        Raises:
            ValueError: the template refuses the conversation, or the spans cannot be told.
        """
        text = self._text(conversation, conversation.messages)
        source = self.tokenizer.get_chat_template(tools=conversation.tools)
        if GENERATION_TAG.search(source):
            return Rendered(text, self._tagged_spans(text, conversation, source))
        switches = [name for name in THINKING_SWITCHES if name in source]
        turns = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if turns[:1] == [0]:
            raise ValueError(f"{conversation.place}: message 1 is the assistant's, before anybody spoke: remove it")
        if turns and self._closing is None:
            self._closing = self._find_closing(conversation, turns[0])
        return Rendered(text, [self._span(text, conversation, i, switches) for i in turns])

    def _find_closing(self, conversation: ChatConversation, first: int) -> str:
        """The token that ends a conversation rather than a turn, if there is one: a question alone has it as well."""
        before = conversation.messages[:first]
        asked, opened = self._text(conversation, before), self._text(conversation, before, prompt=True)
        answered = self._text(conversation, [*before, {"role": "assistant", "content": WORDS[0]}])
        if asked == opened and answered.startswith(opened) and answered.startswith(self.special, len(opened)):
            raise ValueError(
                f"{conversation.place}: message {first + 1}: the chat template has no generation prompt, so the "
                "assistant's header cannot be told from its answer: use a template that knows add_generation_prompt "
                "or has {% generation %} tags"
            )
        ends = [token for token in self.special if asked.endswith(token) and not opened.startswith(asked)]
        return next((token for token in ends if opened.startswith(asked.removesuffix(token))), "")

    def _tagged_spans(self, text: str, conversation: ChatConversation, source: str) -> Spans:
        """What the template itself marks as generated, and the end-of-turn token if it stands right behind."""
        with _limited(source):
            (again,), (spans,) = render_jinja_template(
                conversations=[conversation.messages],
                tools=conversation.tools,
                chat_template=source,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        if again != text:
            raise ValueError(f"{conversation.place}: the chat template renders differently each time: use a fixed one")
        return [(start, self._with_end_of_turn(text, start, end)) for start, end in spans]

    def _span(self, text: str, conversation: ChatConversation, i: int, switches: list[str]) -> TextSpan:
        """From the generation prompt's end to the end of turn ``i``, by rendering the conversation up to there."""
        messages, write = conversation.messages, partial(self._text, conversation)
        # thinking switched off may be a longer prompt: an empty thought, which the model does not write
        prompts = [write(messages[:i], prompt=True, **more) for more in ({}, *({name: False} for name in switches))]
        prompt = max((one for one in prompts if text.startswith(one)), key=len, default=None)
        closed = (text if i + 1 == len(messages) else write(messages[: i + 1])).removesuffix(self._closing or "")
        if prompt is not None and closed.startswith(prompt) and text.startswith(closed):
            found: TextSpan | None = TextSpan(len(prompt), len(closed))
        else:
            found = self._rewritten(text, messages, i, prompt, closed, write)
        if found is None:
            raise ValueError(
                f"{conversation.place}: message {i + 1}: the chat template writes it otherwise once the conversation "
                "goes on, and where it stands then cannot be told: end the row there, or use a template with "
                "{% generation %} tags"
            )
        return TextSpan(found.start, self._without_separator(text, *found))

    def _rewritten(
        self, text: str, messages: list[Message], i: int, prompt: str | None, closed: str, write: Callable[..., str]
    ) -> TextSpan | None:
        """Turn ``i`` where it is written otherwise than at a conversation's end; None if it cannot be found."""
        words = _words(text, messages, i, write)
        silent = not messages[i].get("content") or (words is None and write(_with(messages, i, WORDS[0])) == text)
        if silent and prompt is not None and closed.startswith(prompt) and (found := _shortened(text, prompt, closed)):
            return found
        if words is None:
            return None
        prompted = prompt is not None and len(prompt) <= words.start
        start = len(prompt or "") if prompted else _start(text, words, messages, i, write)
        # the turn ends as it does when it is the last, or with the token right behind its words
        last = _frame(messages[: i + 1], i, write)
        if last is not None and text.startswith(last.behind, words.end):
            return TextSpan(start, words.end + len(last.behind))
        follows = [len(token) for token in self.special if text.startswith(token, words.end)]
        return TextSpan(start, words.end + max(follows)) if follows and not messages[i].get("tool_calls") else None

    def _without_separator(self, text: str, start: int, end: int) -> int:
        """Where a turn ends that may carry white space behind its end-of-turn token; no model generates that."""
        stripped = text[start:end].rstrip()
        return start + len(stripped) if stripped.endswith(self.special) else end

    def _with_end_of_turn(self, text: str, start: int, end: int) -> int:
        """Where a turn ends whose end-of-turn token may lie outside the template's tags."""
        if text[start:end].rstrip().endswith(self.special):
            return self._without_separator(text, start, end)
        rest = text[end:].lstrip()
        follows = [token for token in self.special if rest.startswith(token)]
        return len(text) - len(rest) + max(map(len, follows)) if follows else end


def _frame(messages: list[Message], i: int, write: Callable[..., str]) -> Frame | None:
    """What stands around message ``i``'s words; None if the template writes them twice, changed or not at all."""
    one, other = (write(_with(messages, i, words)) for words in WORDS)
    before = _common(one, other)
    behind = _common(one[len(before) :][::-1], other[len(before) :][::-1])[::-1]
    return Frame(before, behind) if one == before + WORDS[0] + behind else None


def _common(one: str, other: str) -> str:
    """What both begin with."""
    differ = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return one[: next(differ, min(len(one), len(other)))]


def _words(text: str, messages: list[Message], i: int, write: Callable[..., str]) -> TextSpan | None:
    """Message ``i``'s words in the conversation's text: all, or their end if a thought before them was dropped."""
    frame = _frame(messages, i, write)
    if frame is None or not (text.startswith(frame.before) and text[len(frame.before) :].endswith(frame.behind)):
        return None
    span = TextSpan(len(frame.before), len(text) - len(frame.behind))
    content, kept = (messages[i].get("content") or "").strip(), text[slice(*span)].strip()
    return span if content.endswith(kept) and bool(kept) == bool(content) else None


def _start(text: str, words: TextSpan, messages: list[Message], i: int, write: Callable[..., str]) -> int:
    """Where the model begins to write turn ``i``: behind the generation prompt that follows the message before.

    Where that prompt does not stand in the text, the turn begins with its words.
    """
    whole = _frame(messages, i - 1, write)
    asked = _frame(messages[:i], i - 1, partial(write, prompt=True))
    if whole is None or asked is None or not isinstance(messages[i - 1].get("content"), str):
        return words.start
    end = len(text) - len(whole.behind)  # of the message before
    start = end + len(asked.behind)
    return start if text.startswith(asked.behind, end) and start <= words.start else words.start


def _shortened(text: str, prompt: str, closed: str) -> TextSpan | None:
    """A turn without words: as much of the end of what is written for a last one as follows the prompt here."""
    ends = (first for first in range(len(prompt), len(closed)) if text.startswith(closed[first:], len(prompt)))
    first = next(ends, None)
    return None if first is None else TextSpan(len(prompt), len(prompt) + len(closed) - first)


def _with(messages: list[Message], i: int, words: str) -> list[Message]:
    return [*messages[:i], messages[i] | {"content": words}, *messages[i + 1 :]]
