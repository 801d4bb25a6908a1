"""The target behind a server: many requests at a time, what OpenAI's API says of an answer, and the same as we have it.

vLLM gives the tokens of prompt and answer in addition to its own reading of them; other servers give that reading
alone.
"""

import itertools
import json
import logging
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from specdec.answering.dialogue import LENGTH, STOP, Dialogue, TurnAnswer, pack_ids
from specdec.answering.in_process import QUESTION
from specdec.data.form import SWITCHES
from specdec.data.messages import Message
from specdec.engines.client import Endpoint, RequestError
from specdec.engines.regenerate_options import RegenerateConfig
from specdec.utils.text import printable

log = logging.getLogger(__name__)

PATH = "/v1/chat/completions"
PASSING = (408, 425, 429)  # of statuses below 500: it may be answered later
RETRIES = 6  # tries after the first, where a server is busy or away
# seconds before the second try, then doubled; and at most
BACKOFF = 1.0
LONGEST_WAIT = 60.0
CALLED = "tool_calls"  # why an answer ends that calls tools
PARSER = "--enable-auto-tool-choice"  # in vLLM's refusal of tools, where it cannot read calls
FREE = "VLLM_ENFORCE_STRICT_TOOL_CALLING=0"
VOCABULARY = 2**31  # no token has this id


class Remote:
    """The target behind an OpenAI-compatible server, by its name there.

    Raises:
        ValueError: it is a vLLM, and its chat template has no switch for ``--thinking``; or there is no answer.
    """

    def __init__(self, endpoint: Endpoint, model: str, config: RegenerateConfig) -> None:
        self.endpoint = endpoint
        self.model = model
        self.config = config
        self._reads_calls = True  # until it refuses tools
        self._lock = threading.Lock()
        if config.thinking is not None:
            self._check_switch()

    def answers(self, dialogues: Sequence[Dialogue]) -> Iterator[TurnAnswer]:
        """Ask all that is left to ask, in any order; each dialogue has its answer. ValueError without an answer."""
        rows = [row for row in dialogues if not row.done]
        over = threading.Event()
        if self.config.engine == "vllm" and any(row.tools for row in rows):
            log.info(
                "rows offer tools: a vLLM whose environment has not %s lets a grammar write parts of some targets' "
                "calls", FREE,
            )  # fmt: skip
        waiting = iter(rows)
        results: SimpleQueue[tuple[TurnAnswer | BaseException | None, threading.Semaphore]] = (
            SimpleQueue()
        )
        turns = [threading.Semaphore(0) for _ in range(self.config.concurrency)]

        def user(turn: threading.Semaphore) -> None:
            """One conversation after another, each to its end: the server still has its beginning cached. An answer is
            kept before the next is asked for, so that a kill loses at most one of every user's."""
            try:
                for row in waiting:
                    while not row.done and not over.is_set():
                        results.put((self._ask(row, over), turn))
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

    def _check_switch(self) -> None:
        """Raise ValueError if a vLLM makes the same prompt with and without thinking; other servers do not tell."""
        if self.config.engine != "vllm":
            log.warning(
                "--thinking is sent as chat_template_kwargs (%s): whether the server's chat template has such a switch "
                "cannot be seen from here", " and ".join(SWITCHES),
            )  # fmt: skip
            return
        prompts = []
        for thinking in (True, False):
            body = {
                "model": self.model,
                "messages": [QUESTION],
                "max_tokens": 1,
                "return_token_ids": True,
            }
            response = self._complete(
                {**body, "chat_template_kwargs": dict.fromkeys(SWITCHES, thinking)},
                threading.Event(),
            )
            prompts.append(response.get("prompt_token_ids"))
        if prompts[0] == prompts[1]:
            raise ValueError(
                f"the chat template of {self.model} at {self.endpoint.url} has no switch for thinking, as "
                f"{' or '.join(SWITCHES)}: leave --thinking out"
            )

    def _complete(self, body: Mapping[str, Any], over: threading.Event) -> dict[str, Any]:
        """Return the response, requested again while the server is busy or away, until ``over`` is set."""
        for number in itertools.count():
            try:
                return self.endpoint.complete(PATH, body)
            except RequestError as error:
                # drawn, so that many users do not come back together
                pause = min(LONGEST_WAIT, BACKOFF * 2**number) * random.uniform(0.5, 1)
                passing = error.status is None or error.status >= 500 or error.status in PASSING
                if number < RETRIES and passing and not over.wait(pause):
                    continue
                raise
        raise AssertionError

    def _ask(self, row: Dialogue, over: threading.Event) -> TurnAnswer:
        """Return the answer to the next turn; RequestError if the server is gone."""
        while True:
            choice = "auto" if self._reads_calls or row.calls_tools else "none"
            try:
                return self._read(row, self._complete(self._body(row, choice), over))
            except RequestError as error:
                if error.status is None:
                    self.endpoint.check_alive()  # else the run ends
                if PARSER not in str(error) or choice == "none":
                    return row.add(failed=str(error))
                if row.calls_tools:
                    return row.add(
                        failed="the row calls tools, and the server cannot read calls: start vLLM with "
                        f"{PARSER} --tool-call-parser NAME"
                    )
                self._read_no_calls()

    def _read_no_calls(self) -> None:
        """Offer tools from now on without having calls read; of rows whose answers call none that is enough."""
        with self._lock:
            if self._reads_calls:
                log.warning(
                    "the server cannot read calls of tools: in rows that call none, what the target calls stays text; "
                    "rows that call tools fail; start vLLM with %s --tool-call-parser NAME", PARSER,
                )  # fmt: skip
            self._reads_calls = False

    def _body(self, row: Dialogue, choice: str) -> dict[str, Any]:
        """Return the body of a request; the server renders the conversation with its own template."""
        config = self.config
        body = {
            "model": self.model, "max_tokens": config.max_new_tokens, "temperature": config.temperature,
            "top_p": config.top_p, "seed": config.seed_of(row.id, len(row.answers)),
            "messages": as_sent(row.messages()),
        }  # fmt: skip
        # vLLM takes from the model's generation config what it is not given; others may refuse what they do not know
        if config.engine == "vllm":
            body |= {
                "top_k": config.top_k,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "return_token_ids": True,
            }
        elif config.top_k:
            body["top_k"] = config.top_k
        if config.thinking is not None:
            body["chat_template_kwargs"] = dict.fromkeys(SWITCHES, config.thinking)
        if row.tools:
            body |= {"tools": row.tools, "tool_choice": choice}
        return body

    def _read(self, row: Dialogue, response: dict[str, Any]) -> TurnAnswer:
        """Return the answer in a response, every field of it checked; a malformed response is a failed answer."""
        try:
            choice = response["choices"][0]
            tokens = (response.get("usage") or {}).get("completion_tokens") or 0
            finish = choice["finish_reason"]
            if finish not in (STOP, LENGTH, CALLED):
                raise ValueError(
                    f"the server ended the answer for another reason: {str(finish)[:100]}"
                )
            if type(tokens) is not int or not 0 <= tokens < 2**31:
                raise ValueError(f"completion_tokens is {str(tokens)[:100]}, no number of tokens")
            fields: dict[str, Any] = {
                "message": canonical_message(choice["message"]),
                "tokens": tokens,
            }
            if self.config.engine == "vllm":
                ids = token_ids(choice, "token_ids")
                fields |= {"token_ids": pack_ids(ids), "tokens": len(ids)}
                fields["prompt_token_ids"] = pack_ids(token_ids(response, "prompt_token_ids"))
            # vLLM says that tools were called also where the tokens ended behind a whole call
            whole = finish == STOP or (
                finish == CALLED and fields["tokens"] < self.config.max_new_tokens
            )
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            why = printable(f"{type(error).__name__}: {error}")
            return row.add(failed=f"no answer in the server's response: {why[:300]}")
        return row.add(finish=STOP if whole else LENGTH, **fields)


def token_ids(holder: Mapping[str, Any], name: str) -> list[int]:
    """Return the token ids in a part of a response; ValueError if they are none."""
    ids = holder.get(name)
    if not isinstance(ids, list) or not ids:
        raise ValueError(
            f"it has no {name}: give --engine vllm for a vLLM that knows return_token_ids, else openai"
        )
    if not all(type(token) is int and 0 <= token < VOCABULARY for token in ids):
        raise ValueError(f"its {name} are not all token ids")
    return ids


def canonical_message(message: Mapping[str, Any]) -> Message:
    """Return a server's message in our form; ValueError or TypeError if it is malformed."""
    out: Message = {"role": "assistant", "content": message.get("content") or ""}
    if reasoning := message.get("reasoning") or message.get("reasoning_content"):
        out["reasoning_content"] = reasoning
    for words in (out["content"], out.get("reasoning_content", "")):
        words.encode()
    if calls := message.get("tool_calls"):
        out["tool_calls"] = [_call(call) for call in calls]
    return out


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a server's call in our form; its arguments are not parsed."""
    name = call["function"]["name"]
    arguments = call["function"].get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    if not isinstance(name, str):
        raise TypeError("the name of a call is no string")
    for words in (name, arguments):
        words.encode()
    mark = call.get("id")
    return {
        "type": "function",
        **({"id": mark} if isinstance(mark, str) else {}),
        "function": {"name": name, "arguments": arguments},
    }


def as_sent(messages: Sequence[Message]) -> list[Message]:
    """Return messages as OpenAI's API has them: arguments are text, and results refer to the ids of their calls."""
    out: list[Message] = []
    waiting: list[str] = []  # ids of calls without a result so far
    number = itertools.count()
    for message in messages:
        if message.get("tool_calls"):
            calls: list[dict[str, Any]] = [
                {
                    "type": "function",
                    "id": call.get("id") or f"call{next(number):05d}",
                    "function": _as_text(call),
                }
                for call in message["tool_calls"]
            ]
            waiting = [call["id"] for call in calls]
            out.append({**message, "tool_calls": calls})
        elif message["role"] == "tool" and not message.get("tool_call_id") and waiting:
            out.append({**message, "tool_call_id": waiting.pop(0)})
        else:
            out.append(message)
    return out


def _as_text(call: Mapping[str, Any]) -> dict[str, str]:
    function = call["function"]
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"name": function["name"], "arguments": text}
