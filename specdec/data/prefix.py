"""The tokens that a tokenizer puts in front of a text: BOS as a rule, or nothing, or several tokens."""

from collections.abc import Sequence
from typing import Any


def text_prefix(tokenizer: Any) -> list[int]:
    """Return the special tokens with which ``tokenizer(text)`` begins every text."""
    bare = list(tokenizer.encode("a", add_special_tokens=False))
    full = list(tokenizer.encode("a", add_special_tokens=True))
    starts = (start for start in range(len(full)) if full[start : start + len(bare)] == bare)
    return full[: next(starts, 0)]


def undoubled(ids: Sequence[int], prefix: Sequence[int]) -> list[int]:
    """The ids of a text, of which the tokenizer's prefix is taken off where the text itself begins with it."""
    size = len(prefix)
    doubled = size > 0 and list(ids[: 2 * size]) == [*prefix, *prefix]
    return list(ids[size:] if doubled else ids)
