"""Where a turn stands in a text whose template writes it otherwise once the conversation has gone on.

Templates drop earlier thinking, move the system prompt, or end a last turn with another token. Nothing is searched
for: conversations are rendered with other words in a message's place, and what stays the same is not the message's.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from specdec.data.layouts import Message

Write = Callable[[list[Message]], str]
"""Renders messages."""

WORDS = ("0123", "abcd")  # differ in their first and in their last letter


class Around(NamedTuple):
    """What stands before and behind a message's words, whatever they are."""

    before: str
    behind: str


class Place(NamedTuple):
    """Characters of a text: the first, and the one behind the last."""

    start: int
    end: int


def around(messages: list[Message], index: int, write: Write) -> Around | None:
    """What the template writes around a message's words; None if it writes them twice, changed or not at all."""
    one, other = (write(_with(messages, index, words)) for words in WORDS)
    before = one[: _common(one, other)]
    rest = _common(one[len(before) :][::-1], other[len(before) :][::-1])
    behind = one[len(one) - rest :]
    return Around(before, behind) if one == before + WORDS[0] + behind else None


def unwritten(text: str, messages: list[Message], index: int, write: Write) -> bool:
    """Whether the template leaves a message's words out."""
    return write(_with(messages, index, WORDS[0])) == text


def words(text: str, messages: list[Message], index: int, write: Write) -> Place | None:
    """A message's words in the whole conversation's text: all, or their end if a thought before them was dropped."""
    found = around(messages, index, write)
    if found is None or len(text) < len(found.before) + len(found.behind):
        return None
    place = Place(len(found.before), len(text) - len(found.behind))
    if not (text.startswith(found.before) and text.endswith(found.behind)):
        return None
    own, kept = (messages[index].get("content") or "").strip(), text[slice(*place)].strip()
    return place if own.endswith(kept) and bool(kept) == bool(own) else None


def start(text: str, place: Place, messages: list[Message], index: int, write: Write, prompts: Sequence[Write]) -> int:
    """Where the model begins to write the turn whose words are at ``place``: behind the generation prompt.

    The prompt is what follows the words of the message before, in one of the ``prompts``; where none of them stands
    in the text, the turn begins with its words.
    """
    asked = messages[:index]
    here = around(messages, index - 1, write)
    question = asked[-1].get("content")
    if here is None or not isinstance(question, str):
        return place.start
    # the message before, as long as it is here: its words may be written with escapes
    ends = len(text) - len(here.behind)
    found = (around(asked, index - 1, prompt) for prompt in prompts)
    tails = [len(one.behind) for one in found if one is not None and text.startswith(one.behind, ends)]
    return max((ends + tail for tail in tails if ends + tail <= place.start), default=place.start)


def end(text: str, place: Place, message: Message, last: Around | None, special: tuple[str, ...]) -> int | None:
    """Where the turn ends: as it does when it is the last, or with the token right behind its words."""
    if last is not None and text.startswith(last.behind, place.end):
        return place.end + len(last.behind)
    follows = [len(token) for token in special if text.startswith(token, place.end)]
    return place.end + max(follows) if follows and not message.get("tool_calls") else None


def shortened(text: str, prompt: str, closed: str) -> Place | None:
    """A turn without words: as much of the end of what is written for a last one as follows the prompt here."""
    if not (text.startswith(prompt) and closed.startswith(prompt)):
        return None
    for first in range(len(prompt), len(closed)):
        if text.startswith(closed[first:], len(prompt)):
            return Place(len(prompt), len(prompt) + len(closed) - first)
    return None


def _with(messages: list[Message], index: int, words: str) -> list[Message]:
    return [*messages[:index], messages[index] | {"content": words}, *messages[index + 1 :]]


def _common(one: str, other: str) -> int:
    """Characters that both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low
