"""How the target is asked for the answers of a data set: all that its answers depend on."""

import hashlib
from dataclasses import dataclass
from typing import Literal

from specdec.decoding import Sampling
from specdec.utils.numbers import Seed, Tokens


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """What the answers to given conversations depend on.

    Args:
        max_new_tokens: new tokens per answer
        temperature: 0 for greedy decoding
        top_p: 1 for all tokens
        top_k: 0 for all tokens
        seed: with a row's id and the turn it makes the seed of every answer
        thinking: whether the target thinks, by the switch of its chat template; by default the template's own choice
        truncated: what happens to rows whose last answer ran out of tokens: they are left out, or kept
    """

    max_new_tokens: Tokens = 1024
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: Seed = 0
    thinking: bool | None = None
    truncated: Literal["drop", "keep"] = "drop"

    def sampling(self) -> Sampling:
        """The distribution that tokens are drawn from."""
        return Sampling(self.temperature, self.top_p, self.top_k)

    def seed_of(self, row: str, turn: int) -> int:
        """Return the seed of one answer: 48 bits, which every reader of JSON keeps."""
        return int.from_bytes(
            hashlib.blake2b(f"{self.seed} {turn} {row}".encode(), digest_size=6).digest()
        )
