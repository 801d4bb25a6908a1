"""Whether what a message says stands in a rendered text."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec.data.form import CLOSE, thought_and_text
from specdec.data.messages import Message

REMEDY = "remove it from the row, or let the target answer (specdec regenerate)"


class TurnError(ValueError):
    """A turn cannot be supervised as it was said; the message says why, without the row's place."""


def check_turn(message: Message, turn: str) -> None:
    """Refuse a turn in which something that the message says does not stand."""
    thought, text = thought_and_text(message)
    if not stands(text.strip(), turn):
        raise TurnError(f"the chat template leaves out its text: {REMEDY}")
    if not stands(thought.strip(), turn):
        raise TurnError(f"the chat template leaves out its thought: {REMEDY}")
    if not calls_stand(message, turn):
        raise TurnError(f"the chat template leaves out its tool call: {REMEDY}")
    said = (message.get("content") or "") + message.get("reasoning_content", "")
    if turn.count(CLOSE) > max(said.count(CLOSE), bool(thought)):
        raise TurnError(
            "the chat template adds an empty thought, which the message lacks: let the target answer"
        )


def check_context(messages: Sequence[Message], prompt: str) -> None:
    """Refuse a prompt in which something that was said before does not stand."""
    times: Counter[str] = Counter()
    for message in messages:
        text = thought_and_text(message)[1].strip()
        times[text] += 1
        is_there = stands(text, prompt) and (
            times[text] == 1 or not text or prompt.count(text) >= times[text]
        )
        if not is_there:
            raise TurnError(
                f"the chat template leaves out an earlier message of role {message['role']}: remove it"
            )
        if not calls_stand(message, prompt):
            raise TurnError(
                "the chat template leaves out an earlier tool call: remove it with its result"
            )


def stands(text: str, where: str) -> bool:
    """Whether a text stands somewhere, as it is or as in JSON."""
    if text in where:
        return True
    return any(json.dumps(text, ensure_ascii=ascii)[1:-1] in where for ascii in (False, True))


def arguments_of(call: dict[str, Any]) -> Any:
    """A call's arguments as a value of JSON; an empty object if there are none. ValueError if they are not JSON."""
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        try:
            return json.loads(arguments)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
    return arguments or {}


def calls_stand(message: Message, where: str) -> bool:
    """Whether the names and arguments of a message's tool calls stand in a text, each name as often as it is called."""
    names = Counter(call["function"]["name"] for call in message.get("tool_calls") or ())
    if any(where.count(name) < times for name, times in names.items()):
        return False
    for call in message.get("tool_calls") or ():
        if not all(
            stands(word, where) for word in (call["function"]["name"], *leaves(arguments_of(call)))
        ):
            return False
    return True


def leaves(value: Any) -> Iterator[str]:
    """The keys and values of nested arguments, as texts that any way of writing them has."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, str):
        yield value.strip()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield json.dumps(value)
