"""The texts that are compared on, and the places in them.

Slot t reads the feature of token t and token t + 1. Of a prompt of P tokens, slot P - 1 is where drafting begins: it
reads the last feature of the prompt and the first token of the answer.
"""

from collections.abc import Sequence
from typing import NamedTuple

from specdec.decoding import PlainDecoder
from specdec.evaluation.prompts import Prompt
from specdec.target import Target

EACH = 4  # places compared inside a prompt, and inside an answer
PROMPTS = (
    "def read_json(path):\n    with open(path, encoding='utf-8') as file:\n",
    "import re\nimport sys\n\n\nclass Parser:\n    def __init__(self, text):\n        self.text = text\n",
    "for index in range(",
)


class Text(NamedTuple):
    """A prompt and what the target said to it."""

    ids: list[int]
    prompt: int
    """Tokens of the prompt."""


class Place(NamedTuple):
    """Slots of one kind."""

    name: str
    anchors: list[int]


def default_prompts(limit: int | None = None) -> list[Prompt]:
    """Beginnings of Python files, which the embedded target knows.

    Raises:
        ValueError: the limit is below one.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}: it must be at least 1")
    return [Prompt(f"built-in-{number}", None, None, None, text) for number, text in enumerate(PROMPTS[:limit])]


def answered(target: Target, asked: Sequence[list[int]], max_new_tokens: int, depth: int) -> list[Text]:
    """Every prompt with the target's greedy answer, which no end token cuts.

    Raises:
        ValueError: there is no prompt, or the answers are too short for drafts of this depth.
    """
    if depth < 0:
        raise ValueError(f"depth is {depth}, it must be at least 0")
    if max_new_tokens < depth + 3:
        raise ValueError(f"max_new_tokens is {max_new_tokens}: drafts of depth {depth} need {depth + 3} or more")
    if not asked:
        raise ValueError("no prompt given")
    decoder = PlainDecoder(target)
    return [Text([*ids, *decoder.generate(ids, max_new_tokens).ids], len(ids)) for ids in asked]


def places(text: Text, depth: int) -> list[Place]:
    """Slots behind which ``depth`` more tokens follow: in the prompt, around its end, in the answer."""
    start, end = text.prompt - 2, len(text.ids) - 1 - depth
    found = [
        Place("prompt", spaced(range(start))),
        Place("boundary", list(range(max(0, start), text.prompt + 1))),
        Place("answer", spaced(range(text.prompt + 1, end))),
    ]
    return [place for place in found if place.anchors]


def spaced(slots: range) -> list[int]:
    """At most :data:`EACH` of them, the first and the last among them."""
    if len(slots) <= EACH:
        return list(slots)
    return [slots[round(step * (len(slots) - 1) / (EACH - 1))] for step in range(EACH)]
