"""How every question is asked."""

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

from specdec.decoding import Sampling


@dataclass(frozen=True)
class Asking:
    """What all questions have in common.

    Args:
        max_new_tokens: of an answer.
        temperature: 0 for greedy decoding.
        top_p: 1 for all tokens.
        top_k: 0 for all tokens.
        min_p: 0 for all tokens.
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
        """The law that tokens are drawn from."""
        return Sampling(self.temperature, self.top_p, self.top_k, self.min_p)

    def seed_of(self, row: str, turn: int) -> int:
        """Of one answer; 48 bits, which every reader of JSON keeps."""
        return int.from_bytes(hashlib.blake2b(f"{self.seed} {turn} {row}".encode(), digest_size=6).digest())

    def template_words(self) -> dict[str, Any]:
        """What the chat template is told."""
        return {} if self.thinking is None else {"enable_thinking": self.thinking}

    def record(self) -> dict[str, Any]:
        """JSON-ready; no repetition is penalised, whatever the target's own settings are."""
        return {**asdict(self), "repetition_penalty": 1.0}
