"""Setting documents aside for validation."""

import hashlib
from collections.abc import Sequence
from typing import TypeVar

import torch

T = TypeVar("T")


def generator(*key: int) -> torch.Generator:
    """A random generator that depends on nothing but the numbers given."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest))


def split(items: Sequence[T], fraction: float, seed: int) -> tuple[list[T], list[T]]:
    """(training, validation) items in their own order; which ones depends on ``seed`` and their number alone.

    Raises:
        ValueError: the fraction is not between 0 and 1, or one of the parts would be empty.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"val_fraction is {fraction}: give validation files (val), or a fraction between 0 and 1")
    held = max(1, round(len(items) * fraction))
    if held >= len(items):
        raise ValueError(
            f"{len(items)} documents cannot be split with val_fraction {fraction}: "
            "give validation files (val), more documents or a smaller fraction"
        )
    chosen = set(torch.randperm(len(items), generator=generator(seed))[:held].tolist())
    train = [item for i, item in enumerate(items) if i not in chosen]
    return train, [items[i] for i in sorted(chosen)]
