"""The target's own greedy answers, and how many drafts could be accepted at each of their places.

Legend: P prompts, D drafts a pass.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from specdec.decoding import PlainDecoder, Request
from specdec.target import Target

TOGETHER = 16  # sequences decoded side by side


class Answered(NamedTuple):
    """A prompt and what the target said to it."""

    ids: list[int]
    """Prompt, answer, and D tokens behind it; behind an end token these are repetitions of it, which nothing reads."""
    prompt: int
    """Tokens of the prompt."""
    kept: int
    """N, tokens of the answer."""
    end: int | None
    """L, the first end token's place in the answer and the D tokens behind it, from 1; None without one."""

    @property
    def anchors(self) -> range:
        """The drafter's slot of each place n = 1 to N - 1: it reads the state before the root, and the root."""
        return range(self.prompt - 1, self.prompt + self.kept - 2)

    def slots(self, depth: int) -> range:
        """The anchors, and those further on at which the drafts of the last place can read true states."""
        anchors = self.anchors
        return range(anchors.start, anchors.stop + depth - 1) if anchors else anchors

    def most(self, depth: int) -> list[int]:
        """Drafts that can be accepted at each place."""
        places = range(1, self.kept)
        return [depth if self.end is None else min(depth, self.end - n - 1) for n in places]


def answered(
    target: Target,
    asked: Sequence[list[int]],
    max_new_tokens: int,
    depth: int,
    on_prompt: Callable[[int], None] = lambda done: None,
) -> list[Answered]:
    """Greedy answers to all prompts, as plain decoding gives them.

    Raises:
        ValueError: a prompt leaves no room for the answer and ``depth`` tokens behind it.
    """
    end, found = target.eos_token_ids, dict[int, Answered]()
    requests = [Request(ids, max_new_tokens + depth) for ids in asked]
    for number, made in PlainDecoder(target, batch=min(TOGETHER, len(asked))).generate_all(requests, end):
        ids, ended = made.ids, len(made.ids) if made.ids[-1] in end else None
        kept = min(max_new_tokens, len(ids))
        padding = [ids[-1]] * (kept + depth - len(ids))
        prompt = asked[number]
        found[number] = Answered([*prompt, *ids, *padding], len(prompt), kept, ended)
        on_prompt(1)
    return [found[number] for number in range(len(asked))]
