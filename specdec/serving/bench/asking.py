"""One request: a prompt, and its answer as a user sees it come."""

import contextlib
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from specdec.evaluation.prompts import Prompt
from specdec.serving.bench.endpoint import Endpoint


@dataclass(frozen=True)
class Asking:
    """What all requests have in common.

    Args:
        model: its name at the server.
        max_new_tokens: of an answer.
        temperature: 0 for greedy decoding.
        ignore_eos: go on behind the end of a text, so that all answers are equally long.

    Raises:
        ValueError: a number is out of range.
    """

    model: str
    max_new_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.temperature < 0:
            raise ValueError(
                f"max_new_tokens must be at least 1 and temperature at least 0, not {self.max_new_tokens} and "
                f"{self.temperature:g}"
            )

    def body(self, prompt: Prompt) -> tuple[str, dict[str, Any]]:
        """Path and body: raw text is completed, a conversation is put as its first turn, with the server's template."""
        asked: Mapping[str, Any] = {"prompt": prompt.text}
        path = "/v1/completions"
        if prompt.text is None:
            path = "/v1/chat/completions"
            asked = {"messages": prompt.messages or [{"role": "user", "content": (prompt.turns or [""])[0]}]}
        return path, {**asked, **self.settings()}

    def settings(self) -> dict[str, Any]:
        """All of a body but what is asked."""
        return {
            "model": self.model,
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "ignore_eos": self.ignore_eos,
            "cache_salt": uuid.uuid4().hex,  # else a prompt that was asked before would be answered from a cache
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }


class Answered(NamedTuple):
    """An answer."""

    prompt_id: str
    text: str
    tokens: int
    first: float
    """Seconds from the request to the first token."""
    seconds: float
    """Seconds from the request to the last token."""


def ask(endpoint: Endpoint, asking: Asking, prompt: Prompt, wanted: Callable[[], bool] = lambda: True) -> Answered:
    """Put a prompt to the server.

    Args:
        wanted: asked at every piece of the answer; once it is not, the server is left.

    Raises:
        ValueError: it is not answered, or not wanted any more; the message names the prompt.
    """
    path, body = asking.body(prompt)
    text: list[str] = []
    tokens, first, last, begin = 0, 0.0, 0.0, time.perf_counter()
    try:
        with contextlib.closing(endpoint.events(path, body)) as events:
            for event in events:
                now = time.perf_counter() - begin
                if not wanted():
                    raise ValueError("nobody waits for the answer any more")
                made = int((event.get("usage") or {}).get("completion_tokens") or 0)
                if made > tokens:
                    first, last, tokens = first or now, now, made
                for choice in event.get("choices") or []:
                    text.append(_words(choice))
    except ValueError as error:
        raise ValueError(f"prompt {prompt.prompt_id}: {error}") from error
    if not tokens:
        raise ValueError(f"prompt {prompt.prompt_id}: the server counted no token of its answer")
    return Answered(prompt.prompt_id, "".join(text), tokens, first, last)


def _words(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return "".join(str(part) for part in (choice.get("text"), delta.get("reasoning"), delta.get("content")) if part)
