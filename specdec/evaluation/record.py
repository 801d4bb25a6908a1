"""What one decoded answer leaves behind: the raw material of every statistic."""

from typing import NamedTuple


class Answer(NamedTuple):
    """One turn of one prompt, decoded with one growth and, for comparison, plainly.

    Each target pass commits ``accepted + 1`` tokens: the accepted drafts and the target's own (bonus) token. The
    last pass may commit more than was kept, so ``tokens`` can be smaller than the sum over the passes.
    """

    prompt_id: str
    category: str | None
    tokens: int
    """New tokens kept."""
    accepted: tuple[int, ...]
    """Accepted drafts per target pass, the bonus token excluded."""
    drafted: tuple[int, ...]
    """Longest path that the growth can propose, per target pass; same length. A tree's best nodes may be shallower."""
    seconds: float
    plain_seconds: float
    """0 where plain decoding was not measured."""
    plain_tokens: int
    identical: bool | None
    """Whether both outputs are the same tokens; None where that was not compared."""
