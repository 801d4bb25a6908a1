"""What conditions are applied to: the target, the prompts, and what there is room for."""

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

from specdec.evaluation.conversation import Conversation
from specdec.evaluation.prompts import Prompt
from specdec.evaluation.skipping import Skipped, next_ids
from specdec.target import Target


class Setting:
    """The clean run, that every condition changes one thing of.

    Args:
        max_new_tokens: of every answer.
        nodes: of the largest draft tree, the root included.
        system: of all conversations.
        thinking: the chat template's ``enable_thinking``; None leaves it to the template.
        documents: texts that contexts are filled with, asked for when they are needed first.
    """

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        nodes: int,
        *,
        system: str | None = None,
        thinking: bool | None = None,
        documents: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self.target, self.prompts, self.max_new_tokens, self.nodes = target, prompts, max_new_tokens, nodes
        self.system, self.thinking, self._read = system, thinking, documents
        self._tokens = lru_cache(maxsize=4)(lambda text: self._encode(text))

    @property
    def tokenizer(self) -> Any:
        """The target's."""
        return self.target.tokenizer

    def clean(self, prompt: Prompt, **changed: Any) -> Conversation:
        """The conversation of a prompt, undisturbed but for what is named.

        Args:
            changed: ``tokenizer``, ``system`` or ``thinking``.

        Raises:
            ValueError: the prompt cannot be asked so.
        """
        usual = {"tokenizer": self.tokenizer, "system": self.system, "thinking": self.thinking}
        return Conversation(prompt, **{**usual, **changed})

    def first_ids(self, conversation: Conversation) -> list[int] | Skipped | None:
        """What the target is asked first, or why that cannot be decoded."""
        return next_ids(conversation, self.target, self.max_new_tokens, self.nodes)

    @cached_property
    def asked(self) -> dict[str, list[int]]:
        """What the target is asked first in the clean run, by the prompt's id; of prompts that it can decode."""
        found = {prompt.prompt_id: self.first_ids(self.clean(prompt)) for prompt in self.prompts}
        return {name: ids for name, ids in found.items() if isinstance(ids, list)}

    @cached_property
    def documents(self) -> Sequence[str]:
        """Texts to fill contexts with."""
        return self._read()

    def filler(self, tokens: int, without: str) -> str:
        """The first ``tokens`` tokens of the documents that do not hold a text.

        Raises:
            ValueError: they have fewer.
        """
        whole = "\n\n".join(text for text in self.documents if without not in text)
        for some in (whole[: 16 * tokens], whole):  # more text than so many tokens take, as a rule
            if len(ids := self._tokens(some)) >= tokens:
                return str(self.tokenizer.decode(ids[:tokens], skip_special_tokens=False)).rstrip("\ufffd")
        raise ValueError(f"the filler has {len(ids)} tokens beside the prompt's own text, fewer than {tokens}")

    def _encode(self, text: str) -> list[int]:
        """Without the tokenizer's warning that a text is longer than the model takes: it is cut."""
        return list(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))

    @property
    def positions(self) -> int:
        """Tokens of the longest text that the target takes, prompt and answer."""
        most, slots = int(self.target.config.max_position_embeddings), self.target.most_slots
        return most if slots is None else min(most, slots - self.nodes)


def said(prompt: Prompt) -> str:
    """What the user says first, or the raw text."""
    if prompt.text is not None:
        return prompt.text
    if prompt.turns is not None:
        return prompt.turns[0]
    messages = prompt.messages or []
    return next((message["content"] for message in messages if message["role"] == "user"), "")


def saying(prompt: Prompt, text: str) -> Prompt:
    """The same prompt with other words of what :func:`said` gives."""
    if prompt.text is not None:
        return prompt._replace(text=text)
    if prompt.turns is not None:
        return prompt._replace(turns=[text, *prompt.turns[1:]])
    messages = [dict(message) for message in prompt.messages or []]
    for message in messages:
        if message["role"] == "user":
            message["content"] = text
            break
    return prompt._replace(messages=messages)
