"""Tokenizers that write a conversation otherwise than the target's own, and are it in all else."""

from typing import Any


class Wrapped:
    """Base: the target's tokenizer. See :class:`specdec.evaluation.conversation.Tokenizer`."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.chat_template, self.bos_token, self.bos_token_id = inner.chat_template, inner.bos_token, inner.bos_token_id

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        return list(self.inner.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids."""
        return str(self.inner.decode(ids, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(self, messages: list[dict[str, str]], **how: Any) -> str:
        """A conversation as text."""
        return str(self.inner.apply_chat_template(messages, **how))


class WithoutBos(Wrapped):
    """Leaves out the start token wherever a text begins with it."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = super().encode(text, add_special_tokens=add_special_tokens)
        return ids[1:] if ids and ids[0] == self.bos_token_id else ids


class Untemplated(Wrapped):
    """Writes the messages' contents alone, with a blank line between them and nothing behind."""

    def apply_chat_template(self, messages: list[dict[str, str]], **how: Any) -> str:
        contents = "\n\n".join(message["content"] for message in messages)
        return _begun(self.inner, super().apply_chat_template(messages, **how)) + contents


class Templated(Wrapped):
    """Writes conversations by another template; the start token stays where the target's own writes one."""

    def __init__(self, inner: Any, template: str) -> None:
        super().__init__(inner)
        self.template = template

    def apply_chat_template(self, messages: list[dict[str, str]], **how: Any) -> str:
        begin = _begun(self.inner, super().apply_chat_template(messages, **how))
        return begin + super().apply_chat_template(messages, **{**how, "chat_template": self.template})


def _begun(tokenizer: Any, rendered: str) -> str:
    """The start token's text, if the conversation begins with it."""
    bos = tokenizer.bos_token
    return str(bos) if bos and rendered.startswith(bos) else ""
