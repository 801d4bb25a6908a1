"""Conversations as text, by a chat template that somebody else wrote.

A template is checked once, in a separate process with a deadline and a memory limit
(:mod:`specdec.data.sandbox`). After that it renders here, at the speed of Jinja.
"""

import atexit
import contextlib
import hashlib
import json
import re
import selectors
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from specdec.data import sandbox
from specdec.data.messages import Message
from specdec.utils.text import printable

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")

# what checking a template may take; a real one takes less than a thousandth of each
SECONDS = 10.0  # of computing, which the kernel counts: a job that stands still takes none
MEMORY = 2**30  # bytes
CHARACTERS = 2**25  # of one rendering
# for an answer of any kind; while this process stands still, it counts none
POLLS = 1200
POLL = 0.5  # seconds
TEMPLATE_CHARACTERS = 2**20
LARGEST_NUMBER = 10**6  # in a template

QUESTION: Message = {"role": "user", "content": "What is two plus two?"}
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number", "description": "A number."}},
        },
    },
}
CONVERSATIONS: list[list[Message]] = [  # with which a template is checked
    [QUESTION],
    [QUESTION, {"role": "assistant", "content": "Four."}],
    [{"role": "system", "content": "Be brief."}, QUESTION, {"role": "assistant", "content": "Four."}, QUESTION],
    [QUESTION, {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."}],
    [QUESTION, {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\nFour."}, QUESTION],
    [QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "4"}],
    [QUESTION, {"role": "assistant", "content": "Four."}] * 20,
    [{"role": "developer", "content": "Be brief."}, QUESTION | {"name": "Ann"}, {"role": "assistant", "content": ""}],
    [{"role": "user", "content": [{"type": "text", "text": "What is two plus two?"}]}],
]  # fmt: skip


class ChatTemplateError(ValueError):
    """The template refuses a conversation, in its own words."""


class _Sandbox:
    """The process that checks templates: started when it is first needed, and again after it had to be ended."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.lock = threading.Lock()

    def fault_of(self, source: str, special: dict[str, Any]) -> str | None:
        """Why a template cannot be used; None if it can."""
        conversations = [
            {
                "messages": messages,
                "tools": [TOOL] if "tool_calls" in messages[-2:][0] else None,
                "prompt": prompt,
            }
            for messages in CONVERSATIONS
            for prompt in (False, True)
        ]
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self._start()
            answer = self._ask(source, conversations, special)
        fault = answer.get("error", "memory")
        return (
            f"it takes more than {SECONDS:g} s or {MEMORY / 2**30:g} GiB"
            if fault == "memory"
            else fault
        )

    def _start(self) -> None:
        command = [sys.executable, "-I", sandbox.__file__]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        if self._ask("", [], {}) == {}:
            raise ValueError(
                "the process that checks chat templates does not start: is transformers installed here?"
            )

    def _ask(
        self, source: str, conversations: list[dict[str, Any]], special: dict[str, Any]
    ) -> dict[str, Any]:
        """The process's answer; empty if it died, as of too much computing or memory. ValueError if none comes."""
        request = {
            "source": source, "conversations": conversations, "special": special, "memory": MEMORY,
            "characters": CHARACTERS, "seconds": SECONDS,
        }  # fmt: skip
        process = self.process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not any(selector.select(POLL) for _ in range(POLLS)):
                self.stop()
                raise ValueError("the process that checks it does not answer: try again")
            line = process.stdout.readline()
        if not line:
            self.stop()
            return {}
        return json.loads(line)

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


_SANDBOX = _Sandbox()
atexit.register(_SANDBOX.stop)


def check_template(source: str, special: str) -> None:
    """Refuse a template that cannot be rendered in bounded time and memory; each is checked once.

    Args:
        special: the tokenizer's special tokens by name, as JSON.

    Raises:
        ValueError: the template is not to be used; the message says why.
    """
    if not isinstance(source, str) or len(source) > TEMPLATE_CHARACTERS:
        raise ValueError(f"it is no text of at most {TEMPLATE_CHARACTERS:,} characters")
    for line, kind, word in jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).lex(source):
        is_large = kind == "integer" and (len(word) > 20 or int(word, 0) > LARGEST_NUMBER)
        if is_large or (kind == "operator" and word == "**"):
            limit = f"{LARGEST_NUMBER:,}"
            raise ValueError(
                f"line {line}: {word[:20]}: templates with powers or numbers above {limit} are not run"
            )
    if fault := _fault(source, special):
        raise ValueError(fault)


@lru_cache(1024)
def _fault(source: str, special: str) -> str | None:
    """Why a template cannot be used; None if it can."""
    return _SANDBOX.fault_of(source, json.loads(special))


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turn whatever a template raises into a :class:`ChatTemplateError` of one line."""
    try:
        yield
    except Exception as error:
        reason = " ".join(printable(sandbox.reason_of(error)).split())[:300]
        raise ChatTemplateError(f"the chat template refuses the conversation: {reason}") from error


class Renderer:
    """A tokenizer's chat template, ready to render.

    Raises:
        ValueError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template, which a conversation needs: give text or token ids"
            )
        self.tokenizer = tokenizer
        self.special = dict(tokenizer.special_tokens_map)
        # with tools and without; some tokenizers have a template for each
        self._sources: dict[bool, str] = {}

    def source(self, tools: Sequence[dict[str, Any]] | None = None) -> str:
        """The template's text, checked."""
        has_tools = bool(tools)
        if has_tools not in self._sources:
            with refusals():
                source = self.tokenizer.get_chat_template(tools=tools or None)
                check_template(source, json.dumps(self.special, sort_keys=True, default=str))
            self._sources[has_tools] = source
        return self._sources[has_tools]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        prompt: bool,
        **switches: bool,
    ) -> str:
        """The conversation's text.

        Args:
            prompt: end with the generation prompt, after which the assistant writes.
            switches: arguments of the template, as ``enable_thinking``.

        Raises:
            ChatTemplateError: the template refuses the conversation, or makes too much of it.
        """
        source = self.source(tools)
        with refusals():
            (text,), _ = render_jinja_template(
                conversations=[messages],
                tools=tools or None,
                chat_template=source,
                add_generation_prompt=prompt,
                **self.special,
                **switches,
            )
            if len(text) > CHARACTERS:
                raise ValueError(f"it makes {len(text):,} characters of it")
        return text

    def tagged(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, **switches: bool
    ) -> list[tuple[int, int]]:
        """The characters that the template's own ``{% generation %}`` tags mark, as (first, one past the last)."""
        source = self.source(tools)
        with refusals():
            _, (spans,) = render_jinja_template(
                conversations=[messages],
                tools=tools or None,
                chat_template=source,
                return_assistant_tokens_mask=True,
                **self.special,
                **switches,
            )
        return [(start, end) for start, end in spans]

    @cached_property
    def has_tags(self) -> bool:
        """Whether the template marks what the model generates."""
        return GENERATION_TAG.search(self.source()) is not None


def template_digest(tokenizer: Any) -> str:
    """Hexadecimal SHA-256 of the chat template's text, or of its templates' by their names."""
    template = tokenizer.chat_template
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
