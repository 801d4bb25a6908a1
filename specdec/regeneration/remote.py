"""The target behind an OpenAI-compatible server, asked by several users at a time."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from specdec.regeneration.asking import Asking
from specdec.regeneration.rendering import Rendering
from specdec.regeneration.retrying import Retrying
from specdec.regeneration.talk import LENGTH, STOP, Answer, Ask, Failed, Found, Talk
from specdec.serving.bench.endpoint import Endpoint, RequestError

GONE = 8  # questions one after another, at least, that nobody could be reached with: the server is gone


@dataclass(frozen=True)
class Remote:
    """A server.

    Args:
        model: its name there.
        vllm: whether it knows vLLM's own fields. They are all given then, or the model's generation config would set
            them; another server hears only of those that are not neutral.
        concurrency: questions at a time.
        rendering: of the target's tokenizer, where that is here: vLLM then tells the tokens of its answers, too.
        check: raises an error if the server has ended.

    Raises:
        ValueError: the concurrency is below one.
    """

    endpoint: Endpoint
    model: str
    asking: Asking
    vllm: bool
    concurrency: int
    retrying: Retrying
    rendering: Rendering | None = None
    check: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {self.concurrency}")

    def answers(self, talks: Sequence[Talk]) -> Iterator[Found]:
        """Ask everything that is left to ask, in any order; every answer has been given to its talk.

        Raises:
            ValueError: the server is gone.
        """
        waiting = deque(talk for talk in talks if not talk.done)
        flying: dict[str, Talk] = {}
        asks: SimpleQueue[Ask | None] = SimpleQueue()
        results: SimpleQueue[tuple[Found, bool] | BaseException] = SimpleQueue()
        over, unreached = threading.Event(), 0
        users = min(self.concurrency, len(waiting))
        for _ in range(users):  # daemons: who leaves does not wait for answers
            threading.Thread(target=self._user, args=(asks, results, over), daemon=True).start()
        try:
            while waiting or flying:
                while waiting and len(flying) < users:
                    talk = waiting.popleft()
                    flying[talk.row.id] = talk
                    asks.put(talk.next())
                result = results.get()
                if isinstance(result, BaseException):
                    raise result
                found, reached = result
                unreached = 0 if reached else unreached + 1
                talk = flying.pop(found.row)
                talk.add(found)
                yield found
                if unreached >= max(GONE, users):
                    assert isinstance(found, Failed)
                    raise ValueError(f"{found.reason} ({unreached} questions in a row could not be put)")
                if not talk.done:
                    waiting.appendleft(talk)  # the server still has its beginning
        finally:
            over.set()
            for _ in range(users):
                asks.put(None)

    def _user(
        self, asks: "SimpleQueue[Ask | None]", results: "SimpleQueue[tuple[Found, bool] | BaseException]",
        over: threading.Event,
    ) -> None:  # fmt: skip
        while (ask := asks.get()) is not None and not over.is_set():
            try:
                results.put(self._ask(ask, over))
            except BaseException as error:  # noqa: BLE001  whoever waits for the result raises it
                results.put(error)

    def _ask(self, ask: Ask, over: threading.Event) -> tuple[Found, bool]:
        """What came of it, and whether the server was there."""
        path, body = self.body(ask)

        def put() -> dict[str, Any]:
            self.check()
            return self.endpoint.answer(path, body)

        try:
            return read(ask, self.retrying(put, over), self.rendering), True
        except RequestError as error:
            self.check()
            return Failed(ask.row, ask.turn, str(error)), error.status is not None

    def body(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        """Path and body: a text is completed, a conversation is put as it is, with the server's template."""
        asking = self.asking
        own = {"top_k": asking.top_k, "min_p": asking.min_p, "repetition_penalty": 1.0}
        asked = own if self.vllm else {name: own[name] for name in ("top_k", "min_p") if own[name]}
        body = {
            "model": self.model,
            "max_tokens": asking.max_new_tokens,
            "temperature": asking.temperature,
            "top_p": asking.top_p,
            "seed": asking.seed_of(ask.row, ask.turn),
            **asked,
            **({"return_token_ids": True} if self.rendering else {}),
        }
        if ask.text is not None:
            return "/v1/completions", {**body, "prompt": ask.text}
        if words := asking.template_words():
            body["chat_template_kwargs"] = words
        if ask.tools:
            body |= {"tools": ask.tools, "tool_choice": "none"}  # the template shows them; a call stays text
        return "/v1/chat/completions", {**body, "messages": ask.messages}


def read(ask: Ask, said: dict[str, Any], rendering: Rendering | None = None) -> Found:
    """An answer, or why it is none; with ``rendering`` beside its tokens."""
    try:
        choice, usage = said["choices"][0], said.get("usage") or {}
        finish = choice["finish_reason"]
        message = choice if ask.text is not None else choice["message"]
        text = message.get("text" if ask.text is not None else "content") or ""
        reasoning = message.get("reasoning") or message.get("reasoning_content")
        answer = Answer(
            ask.row, ask.turn, text, finish, int(usage.get("completion_tokens") or 0),
            int(usage.get("prompt_tokens") or 0), reasoning,
        )  # fmt: skip
        if not isinstance(text, str):
            raise TypeError(f"the text is {type(text).__name__}")
        f"{text}{reasoning}".encode()
        if message.get("tool_calls"):
            return Failed(
                ask.row, ask.turn, "the server made a tool call of the answer: start it without a tool parser"
            )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        return Failed(ask.row, ask.turn, f"no answer in what the server said: {type(error).__name__}: {error}")
    except UnicodeEncodeError:
        return Failed(ask.row, ask.turn, "the answer holds half of a surrogate pair")
    if finish not in (STOP, LENGTH):
        return Failed(ask.row, ask.turn, f"the server ended the answer for another reason: {finish}")
    ids, prompt = choice.get("token_ids"), said.get("prompt_token_ids") or choice.get("prompt_token_ids")
    return rendering.judge(ask, answer, prompt, ids) if rendering and ids and prompt else answer
