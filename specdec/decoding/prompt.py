"""A prompt as rounds read it: whole, or in parts of one length, which one compiled graph reads.

Legend: T tokens of a part, M of them with a token after them.
"""

from collections.abc import Iterator
from typing import NamedTuple, Self

import torch
from torch import Tensor


class Part(NamedTuple):
    """Consecutive tokens of a prompt, and what a graph cannot know of them."""

    ids_1T: Tensor  # int64
    after_1M: Tensor  # int64, the token after each; the drafter pairs the two
    first_1: Tensor  # int64, the place of the first in the prompt
    last_11: Tensor  # int64, which of the T the prompt ends with; of no use before the last part

    @classmethod
    def whole(cls, prompt: list[int], device: torch.device) -> Self:
        """All of it."""
        ids_1T = torch.tensor([prompt], device=device)
        return cls(ids_1T, ids_1T[:, 1:], ids_1T.new_zeros(1), ids_1T.new_full((1, 1), len(prompt) - 1))


def parts(prompt: list[int], length: int, device: torch.device) -> Iterator[tuple[Part, int]]:
    """Parts of ``length`` tokens, each with the number of slots in use after it.

    The last one reaches back over tokens that were read before, whose keys come out again; a prompt that is shorter
    than one part is padded. Padding, and the pair of the last token and what is not known yet, leave keys in slots
    that nobody sees before they are written anew.
    """
    ids = [*prompt, *[0] * max(length + 1 - len(prompt), 1)]
    for begin in range(0, len(prompt), length):
        first = max(0, min(begin, len(prompt) - length))
        end = first + length
        numbers = [ids[first:end]], [ids[first + 1 : end + 1]], [first], [[min(len(prompt), end) - 1 - first]]
        yield Part(*(torch.tensor(some, device=device) for some in numbers)), end
