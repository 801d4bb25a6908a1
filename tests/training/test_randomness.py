"""What a model draws depends on seed, step, batch and rank, and on nothing drawn before."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from specdec.training.randomness import KeyedRandomness


def draws(seed: int, places: list[tuple[int, int]], before: int = 0) -> list[tuple[Any, ...]]:
    """At each (step, rank) in turn, after something else was drawn."""
    callback, found = KeyedRandomness(seed), []
    for step, rank in places:
        torch.rand(before)
        callback.on_train_batch_start(SimpleNamespace(global_step=step, global_rank=rank))  # type: ignore[arg-type]
        found.append((float(torch.rand(1)), float(np.random.rand()), random.random()))
    return found


def test_it_is_the_same_wherever_a_run_begins() -> None:
    whole = draws(0, [(step, 0) for step in (0, 0, 1, 1, 2, 2)])
    assert len(set(whole)) == 6  # the batches of a step differ
    assert draws(0, [(1, 0), (1, 0), (2, 0), (2, 0)], before=7) == whole[2:]


def test_seeds_and_ranks_draw_their_own() -> None:
    one = draws(0, [(0, 0)])
    assert one not in (draws(1, [(0, 0)]), draws(0, [(0, 1)]), draws(0, [(1, 0)]))
