"""Who answers for ``specdec regenerate``: the target in this process, or a server that several users ask at a time."""

import hashlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import LifoQueue, SimpleQueue
from typing import Any, NamedTuple

import torch
from jinja2 import TemplateError

from specdec.data.layouts import Message
from specdec.decoding import PlainDecoder, Request, Sampling, check_length
from specdec.engines.client import Endpoint, RequestError
from specdec.target import Target

STOP, LENGTH = "stop", "length"
WINDOW = 16  # batches that are sorted by length together: answers come evenly, and few rows wait half done
PATH = "/v1/chat/completions"
RETRIES = 6  # tries after the first, where a server is busy or away
BACKOFF, LONGEST_WAIT = 1.0, 60.0  # seconds before the second try, then doubled; and at most


@dataclass(frozen=True)
class AnswerSettings:
    """What all questions have in common; ``top_p`` 1, ``top_k`` 0 and ``min_p`` 0 allow all tokens.

    Args:
        temperature: 0 for greedy decoding.
        seed: every answer has a seed of its own, of this one, its row's id and its turn.
        thinking: the chat template's ``enable_thinking``; None leaves it to the template.

    Raises:
        ValueError: a number is out of range.
    """

    max_new_tokens: int = 1024
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    thinking: bool | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        self.sampling()

    def sampling(self) -> Sampling:
        """The distribution that tokens are drawn from."""
        return Sampling(self.temperature, self.top_p, self.top_k, self.min_p)

    def seed_of(self, row: str, turn: int) -> int:
        """Of one answer; 48 bits, which every reader of JSON keeps."""
        return int.from_bytes(hashlib.blake2b(f"{self.seed} {turn} {row}".encode(), digest_size=6).digest())

    def template_words(self) -> dict[str, Any]:
        """What the chat template is told."""
        return {} if self.thinking is None else {"enable_thinking": self.thinking}


class TurnAnswer(NamedTuple):
    """What became of one question: what the target said, or why it failed."""

    row: str
    turn: int
    text: str = ""
    finish: str = STOP  # it ended its turn; LENGTH: it had no more tokens
    tokens: int = 0  # generated, an end token included
    reasoning: str | None = None  # where a server takes it out of the text
    failed: str | None = None

    def message(self) -> Message:
        """The answer as the assistant's message."""
        reasoning = {} if self.reasoning is None else {"reasoning_content": self.reasoning}
        return {"role": "assistant", "content": self.text, **reasoning}


@dataclass
class Dialogue:
    """A row of the input: what is said before each answer in it, and the answers so far."""

    id: str  # unique in the input
    place: str
    said: list[list[Message]]  # one list before each answer; none for a row that is not asked
    tools: list[dict[str, Any]] | None = None
    skipped: str | None = None  # why nothing is asked
    cut: bool = False  # whether it ended before a tool was called
    answers: list[TurnAnswer] = field(default_factory=list)
    failed: str | None = None

    @property
    def turn(self) -> int:
        """The number of the next answer."""
        return len(self.answers)

    @property
    def truncated(self) -> bool:
        """Whether the last answer was cut off; nothing is asked after it."""
        return bool(self.answers) and self.answers[-1].finish == LENGTH

    @property
    def done(self) -> bool:
        """Whether nothing is left to ask."""
        return bool(self.skipped or self.failed or self.truncated or self.turn == len(self.said))

    def add(self, found: TurnAnswer) -> TurnAnswer:
        """Take what became of the last question, and hand it on."""
        assert found.row == self.id and found.turn == self.turn
        if found.failed is None:
            self.answers.append(found)
        self.failed = found.failed
        return found

    def messages(self) -> list[Message]:
        """The conversation up to the next answer, or to the last of all; earlier answers are part of it."""
        out: list[Message] = []
        for turn, said in enumerate(self.said[: self.turn + (not self.done)]):
            out += [*said, *(answer.message() for answer in self.answers[turn : turn + 1])]
        return out

    def result(self) -> dict[str, Any]:
        """The row as data to train on."""
        return {"id": self.id, "messages": self.messages(), **({"tools": self.tools} if self.tools else {})}


class InProcess:
    """The target in this process, which decodes ``batch`` prompts side by side."""

    def __init__(self, target: Target, settings: AnswerSettings, batch: int) -> None:
        self.target, self.settings, self.batch = target, settings, batch
        self.tokenizer, self.ends = target.tokenizer, target.eos_token_ids
        if not self.tokenizer.chat_template:
            raise ValueError("the target's tokenizer has no chat template: give an instruction-tuned target")
        self.decoder = PlainDecoder(target, settings.sampling(), batch=batch)

    def answers(self, dialogues: Sequence[Dialogue]) -> Iterator[TurnAnswer]:
        """Ask everything that is left to ask; every answer has been given to its dialogue.

        Raises:
            ValueError: there is not enough memory for a batch.
        """
        size = WINDOW * self.batch
        for first in range(0, len(dialogues), size):
            while waiting := [one for one in dialogues[first : first + size] if not one.done]:
                yield from self._next_answers(waiting)

    def _next_answers(self, waiting: Sequence[Dialogue]) -> Iterator[TurnAnswer]:
        """One of each dialogue."""
        prompts: list[tuple[Dialogue, list[int]]] = []
        for one in waiting:
            try:
                prompts.append((one, self._prompt(one)))
            except ValueError as error:
                yield one.add(TurnAnswer(one.id, one.turn, failed=str(error)))
        prompts.sort(key=lambda prompt: len(prompt[1]), reverse=True)  # what does not fit shows at once
        most = self.settings.max_new_tokens
        requests = [Request(ids, most, self.settings.seed_of(one.id, one.turn)) for one, ids in prompts]
        try:
            for number, made in self.decoder.generate_all(requests, self.ends):
                one, prompt = prompts[number]
                ended = made.ids[-1] in self.ends
                text = self._text(prompt, made.ids[:-1] if ended else made.ids)
                yield one.add(TurnAnswer(one.id, one.turn, text, STOP if ended else LENGTH, len(made.ids)))
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"not enough memory for {self.batch} prompts at a time: give a smaller --batch_size"
            ) from error

    def _prompt(self, one: Dialogue) -> list[int]:
        try:
            text = self.tokenizer.apply_chat_template(
                one.messages(), tools=one.tools, add_generation_prompt=True, tokenize=False,
                **self.settings.template_words(),
            )  # fmt: skip
        except (TemplateError, TypeError, ValueError) as error:
            raise ValueError(f"the chat template refuses the conversation: {' '.join(str(error).split())}") from error
        ids = list(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))
        check_length(self.target, ids, self.settings.max_new_tokens)
        return ids

    def _text(self, prompt: list[int], ids: list[int]) -> str:
        """Of what was generated behind a prompt: some tokenizers write the first token of a text without its space."""

        def decode(ids: list[int]) -> str:
            return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

        before, whole = decode(prompt), decode([*prompt, *ids])
        return whole[len(before) :] if whole.startswith(before) else decode(ids)


@dataclass(frozen=True)
class Remote:
    """The target behind an OpenAI-compatible server.

    Args:
        model: its name there.
        vllm: whether it knows vLLM's own fields. They are all given then, or the model's generation config would set
            them; another server hears only of those that are not neutral.
        concurrency: questions at a time.
        check: raises an error if the server has ended.
    """

    endpoint: Endpoint
    model: str
    settings: AnswerSettings
    vllm: bool
    concurrency: int
    check: Callable[[], None] = lambda: None

    def answers(self, dialogues: Sequence[Dialogue]) -> Iterator[TurnAnswer]:
        """Ask everything that is left to ask, in any order; every answer has been given to its dialogue.

        Raises:
            ValueError: the server is gone.
        """
        asks: LifoQueue[Dialogue | None] = LifoQueue()  # who was answered is next: the server still has the beginning
        results: SimpleQueue[tuple[Dialogue, TurnAnswer] | BaseException] = SimpleQueue()
        over, left = threading.Event(), [one for one in dialogues if not one.done]
        for one in reversed(left):
            asks.put(one)

        def user() -> None:
            while (one := asks.get()) is not None:
                try:
                    results.put((one, self._ask(one, over)))
                except BaseException as error:  # noqa: BLE001  whoever waits for the result raises it
                    results.put(error)

        users = min(self.concurrency, len(left))
        for _ in range(users):  # daemons: who leaves does not wait for answers
            threading.Thread(target=user, daemon=True).start()
        try:
            unfinished = len(left)
            while unfinished:
                result = results.get()
                if isinstance(result, BaseException):
                    raise result
                one, found = result
                yield one.add(found)
                if one.done:
                    unfinished -= 1
                else:
                    asks.put(one)
        finally:
            over.set()
            for _ in range(users):
                asks.put(None)

    def _ask(self, one: Dialogue, over: threading.Event) -> TurnAnswer:
        """What comes of the next question, put again where the server is busy or away, until it is ``over``."""
        for number in itertools.count():
            try:
                self.check()
                return self._read(one, self.endpoint.complete(PATH, self._body(one)))
            except RequestError as error:
                # drawn, so that many users do not come back together
                pause = min(LONGEST_WAIT, BACKOFF * 2**number) * random.uniform(0.5, 1)
                if number < RETRIES and error.passing and not over.wait(pause):
                    continue
                self.check()
                if error.status is None and self.endpoint.away():
                    raise
                return TurnAnswer(one.id, one.turn, failed=str(error))
        raise AssertionError

    def _body(self, one: Dialogue) -> dict[str, Any]:
        """The request; the server renders the conversation with its own template."""
        settings = self.settings
        own = {"top_k": settings.top_k, "min_p": settings.min_p, "repetition_penalty": 1.0}
        body = {
            "model": self.model,
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": settings.seed_of(one.id, one.turn),
            "messages": one.messages(),
            **(own if self.vllm else {name: own[name] for name in ("top_k", "min_p") if own[name]}),
        }
        if words := settings.template_words():
            body["chat_template_kwargs"] = words
        if one.tools:
            body |= {"tools": one.tools, "tool_choice": "none"}  # the template shows them; a call stays text
        return body

    @staticmethod
    def _read(one: Dialogue, response: dict[str, Any]) -> TurnAnswer:
        """An answer, or why it is none."""
        try:
            choice, usage = response["choices"][0], response.get("usage") or {}
            message, finish = choice["message"], choice["finish_reason"]
            if message.get("tool_calls"):
                raise ValueError("the server made a tool call of the answer: start it without a tool parser")
            if finish not in (STOP, LENGTH):
                raise ValueError(f"the server ended the answer for another reason: {finish}")
            text = message.get("content") or ""
            text.encode()
            tokens = int(usage.get("completion_tokens") or 0)
            reasoning = message.get("reasoning") or message.get("reasoning_content")
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            why = f"no answer in what the server said: {type(error).__name__}: {error}"
            return TurnAnswer(one.id, one.turn, failed=why)
        return TurnAnswer(one.id, one.turn, text, finish, tokens, reasoning)
