"""Who answers for ``specdec regenerate``: the target in this process, or a server that gets many requests at a time."""

import hashlib
import itertools
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple

import torch

from specdec.data.layouts import ChatConversation, Message
from specdec.data.template import rendered, tokenizing
from specdec.decoding import PlainDecoder, Request, Sampling, check_length, continuation
from specdec.engines.client import Endpoint, RequestError
from specdec.target import Target, TargetSource
from specdec.utils.numbers import Count, Seed, Side, Tokens, check_numbers
from specdec.utils.text import how_many, printable

STOP, LENGTH = "stop", "length"
WINDOW = 16  # batches that are sorted by length together: answers come evenly, and few rows wait half done
PATH = "/v1/chat/completions"
END: Message = {"role": "assistant", "content": ""}  # behind the last message, which may be a user's
PASSING = (408, 425, 429)  # of statuses below 500: it may be answered later
RETRIES = 6  # tries after the first, where a server is busy or away
BACKOFF, LONGEST_WAIT = 1.0, 60.0  # seconds before the second try, then doubled; and at most


@dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    """Which conversations are answered, by what and how, and where the answers go.

    Args:
        data: conversations as ChatData reads them
        out: the data set to write, FILE.jsonl; its record is FILE.json
        target: the model that answers in this process
        engine: the target in this process, or what serves it at --url
        limit: use the first rows only
        layout: of all conversations; by default each row's columns decide
        broken: whether a malformed conversation ends the run or is left out
        max_new_tokens: new tokens per answer
        temperature: 0 for greedy decoding
        top_p: 1 for all tokens
        top_k: 0 for all tokens
        seed: with a row's id and the turn it makes the seed of every answer
        thinking: the chat template's enable_thinking; by default the template's own choice
        truncated: whether rows are written whose last answer ran out of tokens
        device: of --engine transformers
        batch_size: prompts at a time, of --engine transformers
        url: an OpenAI-compatible server, as http://127.0.0.1:8000
        model: its name at --url; by default the first served
        concurrency: requests to a server at a time
    """

    data: list[str]
    out: Path
    target: TargetSource = field(default_factory=TargetSource)
    engine: Literal["transformers", "vllm", "openai"] = "transformers"
    limit: Count | None = None
    layout: str | None = None
    broken: Literal["refuse", "drop"] = "refuse"
    max_new_tokens: Tokens = 1024
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: Seed = 0
    thinking: bool | None = None
    truncated: Literal["drop", "keep"] = "drop"
    device: str = "cpu"
    batch_size: Side = 32
    url: str | None = None
    model: str | None = None
    concurrency: Side = 64

    def __post_init__(self) -> None:
        if (self.url is None) != (self.engine == "transformers"):
            raise ValueError("--engine vllm and openai need the --url of a running server; transformers takes none")
        check_numbers(type(self), vars(self))
        self.sampling()

    def sampling(self) -> Sampling:
        """The distribution that tokens are drawn from."""
        return Sampling(self.temperature, self.top_p, self.top_k)

    def seed_of(self, row: str, turn: int) -> int:
        """Of one answer; 48 bits, which every reader of JSON keeps."""
        return int.from_bytes(hashlib.blake2b(f"{self.seed} {turn} {row}".encode(), digest_size=6).digest())

    def template_arguments(self) -> dict[str, Any]:
        """More arguments of the chat template."""
        return {} if self.thinking is None else {"enable_thinking": self.thinking}


class TurnAnswer(NamedTuple):
    """The answer to one turn, or why there is none."""

    row: str
    turn: int
    text: str = ""
    finish: str = STOP  # it ended its turn; LENGTH: it had no more tokens
    tokens: int = 0  # generated, an end token included
    reasoning: str | None = None  # where a server takes it out of the text
    failed: str | None = None


@dataclass
class Dialogue:
    """A row of the input: the messages before each answer in it, and the answers so far."""

    id: str  # unique in the input
    place: str
    turns: list[list[Message]]  # the messages before each answer
    tools: list[dict[str, Any]] | None = None
    skipped: str | None = None  # why there are no turns
    answers: list[TurnAnswer] = field(default_factory=list)  # the last one may have failed

    @classmethod
    def of(cls, one: ChatConversation) -> "Dialogue":
        """A conversation without its assistant's messages.

        An answer is due to every run of messages that has a user's in it; two answers in a row are one. A user's
        message at the end is answered, too. From the first tool call on there are no turns: nobody has run what the
        target would call.
        """
        turns: list[list[Message]] = []
        messages: list[Message] = []
        skipped = "no user's turn"
        for message in [*one.messages, END]:
            if message["role"] in ("tool", "function") or message.get("tool_calls"):
                skipped = "a tool is called in the first answer"
                break
            if message["role"] != "assistant":
                messages.append(message)
            elif any(before["role"] == "user" for before in messages):
                turns.append(messages)
                messages = []
            elif not turns and message is not END:
                skipped = "the assistant speaks before any user does"
                break
        return cls(one.id, one.place, turns, one.tools, None if turns else skipped)

    @property
    def failed(self) -> str | None:
        """Why the last request has no answer."""
        return self.answers[-1].failed if self.answers else None

    @property
    def truncated(self) -> bool:
        """Whether the last answer had no more tokens."""
        return bool(self.answers) and self.answers[-1].finish == LENGTH

    def ends_with(self, answer: TurnAnswer) -> bool:
        """Whether nothing is asked after it."""
        return bool(answer.failed) or answer.finish == LENGTH or answer.turn + 1 == len(self.turns)

    @property
    def done(self) -> bool:
        """Whether nothing is left to ask."""
        return self.ends_with(self.answers[-1]) if self.answers else not self.turns

    def add(self, **fields: Any) -> TurnAnswer:
        """Make the next turn's answer, and return it."""
        self.answers.append(TurnAnswer(self.id, len(self.answers), **fields))
        return self.answers[-1]

    def messages(self) -> list[Message]:
        """The conversation up to the next answer, or to the last of all; earlier answers are part of it."""
        out: list[Message] = []
        for before, answer in itertools.zip_longest(self.turns[: len(self.answers) + (not self.done)], self.answers):
            out += before
            if answer is not None:
                reasoning = {} if answer.reasoning is None else {"reasoning_content": answer.reasoning}
                out.append({"role": "assistant", "content": answer.text, **reasoning})
        return out


class InProcess:
    """The target in this process."""

    def __init__(self, target: Target, config: RegenerateConfig) -> None:
        self.target, self.config, self.batch = target, config, config.batch_size
        if not target.tokenizer.chat_template:
            raise ValueError("the target's tokenizer has no chat template: give an instruction-tuned target")
        self.decoder = PlainDecoder(target, config.sampling(), batch=self.batch)

    def answers(self, dialogues: Sequence[Dialogue]) -> Iterator[TurnAnswer]:
        """Ask all that is left to ask; each dialogue has its answer. ValueError if a batch does not fit in memory."""
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
                yield one.add(failed=str(error))
        prompts.sort(key=lambda prompt: len(prompt[1]), reverse=True)  # what does not fit shows at once
        most, ends = self.config.max_new_tokens, self.target.eos_token_ids
        requests = [Request(ids, most, self.config.seed_of(one.id, len(one.answers))) for one, ids in prompts]
        try:
            for number, made in self.decoder.generate_all(requests, ends):
                one, prompt = prompts[number]
                ended = made.ids[-1] in ends
                text = continuation(self.target.tokenizer, prompt, made.ids[:-1] if ended else made.ids)
                yield one.add(text=text, finish=STOP if ended else LENGTH, tokens=len(made.ids))
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"not enough memory for {how_many(self.batch, 'prompt')} at a time: give a smaller --batch_size"
            ) from error

    def _prompt(self, one: Dialogue) -> list[int]:
        tokenizer = self.target.tokenizer
        text = rendered(tokenizer, one.messages(), True, tools=one.tools, **self.config.template_arguments())
        with tokenizing():
            ids = list(tokenizer.encode(text, add_special_tokens=False, verbose=False))
        check_length(self.target, ids, self.config.max_new_tokens)
        return ids


class Remote:
    """The target behind an OpenAI-compatible server, by its name there."""

    def __init__(self, endpoint: Endpoint, model: str, config: RegenerateConfig) -> None:
        self.endpoint, self.model, self.config = endpoint, model, config

    def answers(self, dialogues: Sequence[Dialogue]) -> Iterator[TurnAnswer]:
        """Ask all that is left to ask, in any order; each dialogue has its answer. ValueError if nobody answers."""
        waiting = iter([one for one in dialogues if not one.done])
        results: SimpleQueue[tuple[TurnAnswer | BaseException | None, threading.Semaphore]] = SimpleQueue()
        over, turns = threading.Event(), [threading.Semaphore(0) for _ in range(self.config.concurrency)]

        def user(turn: threading.Semaphore) -> None:
            """One conversation after another, each to its end: the server still has its beginning cached. An answer is
            kept before the next is asked for, so that a kill loses at most one of every user's."""
            try:
                for one in waiting:
                    while not one.done and not over.is_set():
                        results.put((self._ask(one, over), turn))
                        turn.acquire()
            except BaseException as error:  # noqa: BLE001  whoever waits for the result raises it
                results.put((error, turn))
            results.put((None, turn))

        for turn in turns:  # daemons: who leaves does not wait for answers
            threading.Thread(target=user, args=(turn,), daemon=True).start()
        try:
            for _ in turns:
                while True:
                    result, turn = results.get()
                    if result is None:  # a thread has ended
                        break
                    if isinstance(result, BaseException):
                        raise result
                    yield result
                    turn.release()  # whoever takes the answers has kept this one
        finally:
            over.set()
            for turn in turns:
                turn.release()

    def _ask(self, one: Dialogue, over: threading.Event) -> TurnAnswer:
        """The answer to the next turn, requested again where the server is busy or away, until it is ``over``."""
        for number in itertools.count():
            try:
                return self._read(one, self.endpoint.complete(PATH, self._body(one)))
            except RequestError as error:
                # drawn, so that many users do not come back together
                pause = min(LONGEST_WAIT, BACKOFF * 2**number) * random.uniform(0.5, 1)
                passing = error.status is None or error.status >= 500 or error.status in PASSING
                if number < RETRIES and passing and not over.wait(pause):
                    continue
                if error.status is None:
                    self.endpoint.check_alive()  # else the run ends
                return one.add(failed=str(error))
        raise AssertionError

    def _body(self, one: Dialogue) -> dict[str, Any]:
        """The request; the server renders the conversation with its own template."""
        config = self.config
        body = {
            "model": self.model, "max_tokens": config.max_new_tokens, "temperature": config.temperature,
            "top_p": config.top_p, "seed": config.seed_of(one.id, len(one.answers)), "messages": one.messages(),
        }  # fmt: skip
        # vLLM takes from the model's generation config what it is not given; others may refuse what they do not know
        if config.engine == "vllm":
            body |= {"top_k": config.top_k, "min_p": 0.0, "repetition_penalty": 1.0}
        elif config.top_k:
            body["top_k"] = config.top_k
        if arguments := config.template_arguments():
            body["chat_template_kwargs"] = arguments
        if one.tools:
            body |= {"tools": one.tools, "tool_choice": "none"}  # the template shows them; a call stays text
        return body

    @staticmethod
    def _read(one: Dialogue, response: dict[str, Any]) -> TurnAnswer:
        """What a response says, every field of it checked; one that is not as it should be is a failed answer."""
        try:
            choice, usage = response["choices"][0], response.get("usage") or {}
            message, finish = choice["message"], choice["finish_reason"]
            if message.get("tool_calls"):
                raise ValueError("the server made a tool call of the answer: start it without a tool parser")
            if finish not in (STOP, LENGTH):
                raise ValueError(f"the server ended the answer for another reason: {str(finish)[:100]}")
            text, tokens = message.get("content") or "", usage.get("completion_tokens") or 0
            reasoning = message.get("reasoning") or message.get("reasoning_content")
            for words in (text, reasoning or ""):
                words.encode()
            if type(tokens) is not int or not 0 <= tokens < 2**31:
                raise ValueError(f"completion_tokens is {str(tokens)[:100]}, no number of tokens")
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            why = printable(f"{type(error).__name__}: {error}")
            return one.add(failed=f"no answer in the server's response: {why[:300]}")
        return one.add(text=text, finish=finish, tokens=tokens, reasoning=reasoning)
