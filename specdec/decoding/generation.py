"""What a decoder is asked and what it answers: requests, generations, and the chunks of one while it is made."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from specdec.data.messages import Message, as_message
from specdec.data.template import template_of, text_ids
from specdec.target import Target
from specdec.utils.text import how_many

PromptLike = str | Sequence[Message] | Sequence[int] | Tensor
"""Text, tokenized with the special tokens that the tokenizer adds; a conversation, rendered by the chat template with
its generation prompt; or token ids, a list or a tensor of shape (T,) or (1, T)."""


class Request(NamedTuple):
    """A text to continue."""

    prompt: list[int]
    max_new_tokens: int
    seed: int = 0  # of this text; unread where nothing is drawn


class Chunk(NamedTuple):
    """What one target pass committed: drafts that it accepted, and then one token of the target's own."""

    ids: list[int]
    # of each token; where several write one character, it stands at the last of them
    texts: list[str]
    accepted: int  # so many of the ids, from the first, are accepted drafts

    @property
    def text(self) -> str:
        """What the chunk adds to the text."""
        return "".join(self.texts)


@dataclass(frozen=True, slots=True, repr=False)
class Generation:
    """Tokens generated after a prompt, and how."""

    ids: list[int]  # new tokens, at most max_new_tokens, cut after an end token
    # per target pass: tokens committed less the last, the bonus or an end token
    accepted: tuple[int, ...]
    seconds: float  # wall time, prompt included; of a batch, this sequence's share of it
    draft_ms: tuple[float, ...] = ()  # per target pass: drafting for it, for the whole batch
    # per target pass: the pass, its acceptance and its commit, for the whole batch
    verify_ms: tuple[float, ...] = ()
    # per target pass: tokens of the proposal's longest path, the root left out
    drafted: tuple[int, ...] = ()
    prompt: list[int] = field(default_factory=list)
    tokenizer: Any = field(default=None, compare=False)

    @property
    def text(self) -> str:
        """The new tokens' text without special tokens, as it stands behind the prompt's.

        Raises:
            ValueError: the target has no tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError("the target has no tokenizer, so its tokens have no text: read .ids")
        return continuation(self.tokenizer, self.prompt, self.ids)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens committed per target pass, the bonus token included; None if the prompt's own pass gave them all."""
        return 1 + sum(self.accepted) / len(self.accepted) if self.accepted else None

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of wall time, prompt included."""
        return len(self.ids) / self.seconds

    def __repr__(self) -> str:
        length = (
            ""
            if self.acceptance_length is None
            else f", acceptance length {self.acceptance_length:.2f}"
        )
        what = f"text={self.text!r}" if self.tokenizer is not None else f"ids={self.ids}"
        speed = f"{self.tokens_per_second:.1f} tokens/s"
        return f"Generation({how_many(len(self.ids), 'token')} in {self.seconds:.2f} s, {speed}{length}, {what})"


def request_ids(prompt: PromptLike, target: Target) -> list[int]:
    """A prompt's token ids.

    Raises:
        ValueError: it is no prompt, or the target's tokenizer makes none of it.
    """
    if isinstance(prompt, str):
        return text_ids(target.tokenizer, prompt)
    if isinstance(prompt, Tensor):
        prompt = (prompt[0] if prompt.ndim == 2 and len(prompt) == 1 else prompt).tolist()
    if isinstance(prompt, Sequence):
        messages = [dict(item) for item in prompt if isinstance(item, Mapping)]
        if messages and len(messages) == len(prompt):
            return template_of(target.tokenizer).prompt_ids(
                [as_message(message) for message in messages]
            )
        try:
            return [operator.index(token) for token in prompt]  # type: ignore[arg-type]
        except TypeError:
            pass
    raise ValueError(
        f"a prompt is text, a list of messages ({{'role': ..., 'content': ...}}) or one text's token ids, not "
        f"{type(prompt).__name__}"
        + (f" of {type(prompt[0]).__name__}" if isinstance(prompt, list) else "")
    )


def continuation(tokenizer: Any, before: Sequence[int], ids: Sequence[int]) -> str:
    """The text of tokens behind others; some tokenizers write the first token of a text without its space."""
    clean = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    head = tokenizer.decode(list(before), **clean)
    both = tokenizer.decode([*before, *ids], **clean)
    alone = tokenizer.decode(list(ids), **clean)
    return both[len(head) :] if both.startswith(head) else alone


class TextStream:
    """The text behind a prompt, token by token; together it is :func:`continuation`.

    A token that ends inside a character (of byte-level BPE) waits for the one that completes it.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.before = list(prompt)
        self.waiting = list[int]()

    def add(self, token: int) -> str:
        """Return the text that can be written once this token is known."""
        self.waiting.append(token)
        text = self.rest()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self.before = self.waiting
        self.waiting = []
        return text

    def rest(self) -> str:
        """Return the text of the tokens that still wait, at the end of the answer."""
        return continuation(self.tokenizer, self.before, self.waiting)
