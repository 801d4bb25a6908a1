"""The conversation that one prompt becomes, as token ids."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Protocol

from jinja2 import TemplateError

from specdec.evaluation.prompts import Prompt


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer used here."""

    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool, **more: Any
    ) -> str: ...


BLANK = "it is empty, or a part of it is"


class Conversation:
    """One prompt as token ids, turn by turn::

        while (ids := conversation.next_ids()) is not None:
            conversation.add_answer(decode(ids))

    Each turn's ids hold the whole conversation so far, rendered anew; a template may change what came before (some
    drop earlier reasoning), so they need not begin with the ids of the turn before.

    Args:
        thinking: the template's ``enable_thinking``; None leaves it to the template.

    Raises:
        ValueError: the tokenizer has no chat template and the prompt needs one, or ``system`` or ``thinking`` does
            not apply.
    """

    def __init__(
        self, prompt: Prompt, tokenizer: Tokenizer, system: str | None = None, thinking: bool | None = None
    ) -> None:
        self.prompt, self.tokenizer, self.thinking = prompt, tokenizer, thinking
        self._messages: list[dict[str, str]] = []
        self._turns_left = list(prompt.turns or [])
        self._done = False
        self._expects_answer = False
        if prompt.text == "":
            return  # next_ids will say so
        if prompt.text is not None:
            if system is not None:
                raise ValueError(
                    f"prompt {prompt.prompt_id}: raw text takes no system prompt; use a `turns` or `messages` row"
                )
            if thinking is not None:
                raise ValueError(
                    f"prompt {prompt.prompt_id}: raw text takes no thinking, which is the chat template's; use a "
                    "`turns` or `messages` row"
                )
            return
        if tokenizer.chat_template is None:
            raise ValueError(
                f"prompt {prompt.prompt_id}: the tokenizer has no chat template, which a conversation needs; "
                "`prompt` rows, plain text files and --layouts humaneval_raw do without"
            )
        own = [message for message in prompt.messages or [] if message["role"] in ("system", "developer")]
        if system is not None:
            if own:
                raise ValueError(
                    f"prompt {prompt.prompt_id}: it brings its own system message; drop that or the system prompt"
                )
            self._messages.append({"role": "system", "content": system})
        self._messages.extend(prompt.messages or [])

    def next_ids(self) -> list[int] | None:
        """Token ids the target is to continue, or None after the last turn.

        Raises:
            ValueError: the chat template refuses the conversation, or nothing is left of the prompt as tokens.
        """
        assert not self._expects_answer, "add_answer comes before the next turn"
        if self._done:
            return None
        if self.prompt.text == "":
            raise ValueError(f"prompt {self.prompt.prompt_id}: {BLANK}")
        if self.prompt.text is not None:
            ids = self.tokenizer.encode(self.prompt.text, add_special_tokens=True)
        else:
            if self._turns_left:
                self._messages.append({"role": "user", "content": self._turns_left.pop(0)})
            # the template writes the special tokens itself: adding them again would double the first one
            ids = self.tokenizer.encode(self._render(self.thinking), add_special_tokens=False)
        if not ids:
            raise ValueError(f"prompt {self.prompt.prompt_id}: the tokenizer makes no tokens of it")
        self._done = not self._turns_left
        self._expects_answer = True
        return list(ids)

    def add_answer(self, ids: Sequence[int]) -> None:
        """The target's answer, which the next turn builds on; special tokens in it are dropped."""
        assert self._expects_answer, "next_ids comes before an answer"
        self._expects_answer = False
        if not self._done:
            content = self.tokenizer.decode(list(ids), skip_special_tokens=True)
            self._messages.append({"role": "assistant", "content": content})

    def heeds_thinking(self) -> bool:
        """Whether ``enable_thinking`` makes a difference to how the template writes the conversation so far."""
        try:
            return self._render(thinking=True) != self._render(thinking=False)
        except ValueError:  # it refuses one of them, so it reads it
            return True

    def _render(self, thinking: bool | None) -> str:
        more: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        try:
            return self.tokenizer.apply_chat_template(
                self._messages, add_generation_prompt=True, tokenize=False, **more
            )
        except (TemplateError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"prompt {self.prompt.prompt_id}: the chat template refuses this conversation: {reason}"
            ) from error


def template_sha256(tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> str | None:
    """SHA-256 of the chat template's text; None if no prompt is rendered by it."""
    template = tokenizer.chat_template
    if all(prompt.text is not None for prompt in prompts):
        return None
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)  # several, by name
    return hashlib.sha256(text.encode()).hexdigest()
