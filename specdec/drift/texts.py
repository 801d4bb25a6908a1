"""The target's own greedy answers: the texts that drafting is measured on.

Legend: A anchors.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from specdec.decoding import PlainDecoder, Request
from specdec.target import Target

SIDE_BY_SIDE = 8  # answers decoded together


class OwnText(NamedTuple):
    """A prompt and what the target itself says after it."""

    prompt_id: str
    ids: list[int]
    """The prompt's tokens and the answer's."""
    prompt: int
    """How many are the prompt's; at least one."""

    def anchors(self, count: int, depths: int) -> list[int]:
        """Positions of the last committed token before a chain, ascending, at most ``count``, spread evenly.

        They are tokens of the answer after which the text goes on for ``depths`` tokens. None where it is too short.
        """
        first, last = self.prompt, len(self.ids) - 1 - depths
        places = last - first + 1
        if places < 1:
            return []
        count = min(count, places)
        return [first + (2 * n + 1) * places // (2 * count) for n in range(count)]


def own_texts(
    target: Target,
    prompts: Sequence[tuple[str, list[int]]],
    max_new_tokens: int,
    on_tokens: Callable[[int], object] = lambda n: None,
) -> list[OwnText]:
    """Decode greedily, without any drafter.

    Args:
        prompts: their ids and their tokens.
        on_tokens: called with the number of new tokens of every answer.

    Raises:
        ValueError: a prompt cannot be decoded.
    """
    decoder = PlainDecoder(target, batch=min(SIDE_BY_SIDE, max(1, len(prompts))))
    requests = [Request(ids, max_new_tokens) for _, ids in prompts]
    answers: dict[int, list[int]] = {}
    for number, made in decoder.generate_all(requests, target.eos_token_ids):
        answers[number] = made.ids
        on_tokens(len(made.ids))
    return [OwnText(name, [*ids, *answers[n]], len(ids)) for n, (name, ids) in enumerate(prompts)]
