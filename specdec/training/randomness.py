"""Randomness of the model in training: of seed, step, batch and rank alone, so that a resumed run draws the same."""

import hashlib
import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch


class KeyedRandomness(pl.Callback):
    """Seeds torch's, numpy's and Python's generators before every batch.

    What was drawn before it, in validation or in a run that was killed, has no say in what dropout draws here.

    Args:
        seed: the run's.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.step, self.part = seed, -1, 0

    def on_train_batch_start(self, trainer: pl.Trainer, *rest: Any) -> None:
        """Seed for one batch of an optimizer step; Lightning's own count of batches goes on otherwise when resumed."""
        self.part = self.part + 1 if trainer.global_step == self.step else 0
        self.step = trainer.global_step
        key = f"{self.seed}/{self.step}/{self.part}/{trainer.global_rank}"
        drawn = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
        torch.manual_seed(drawn)
        np.random.seed(drawn % 2**32)
        random.seed(drawn)
