"""Precisions are Lightning's own."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from specdec.training.precision import KNOWN, precision


@pytest.mark.filterwarnings("ignore:.*supported for historical reasons")
@pytest.mark.parametrize("name", [None, 32, "32", "64", "bf16", "bf16-true", "32-true"])
def test_a_short_name_is_what_lightning_makes_of_it(name: Any) -> None:
    trainer = pl.Trainer(
        accelerator="cpu", precision=name, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    assert precision(name) == KNOWN[str(trainer.precision)]


def test_products_are_of_the_autocast() -> None:
    found = precision(16)
    assert found is not None and (found.weights, found.products) == (torch.float32, torch.float16)
    assert KNOWN["bf16-true"].products == torch.bfloat16
    assert precision("transformer-engine") is None
