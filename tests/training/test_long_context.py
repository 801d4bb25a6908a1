"""Training steps on rows too long for anything that grows with their square."""

import dataclasses

import pytest
import torch

from specdec.data import Batch
from specdec.nn.kernels import unroll_kernel
from specdec.training.step import ObjectiveConfig, TrainStep, target_outputs
from tests.no_pairs import NoPairs
from tests.tiny import VOCAB, presets, tiny_drafter, tiny_target

T = 3072
DOCUMENTS = {"one": [0] * T, "packed": [0] * 1600 + [1] * 900 + [2] * 50 + [3] * 400 + [-1] * 122}


@pytest.mark.parametrize(
    ("documents", "window", "answers"), [("one", "full", 1.0), ("packed", 300, 0.3)]
)
def test_a_step_makes_no_tensor_of_all_pairs(
    documents: str, window: int | str, answers: float
) -> None:
    """Target, unroll with recomputation, loss and backward pass, all that a step does."""
    target = tiny_target(dtype=torch.float32)
    spec = dataclasses.replace(presets()["eagle3_1"], attention_window=window)
    drafter = tiny_drafter(spec, dtype=torch.float32).requires_grad_()
    generator = torch.Generator().manual_seed(0)
    ids_1T = torch.randint(0, VOCAB, (1, T), generator=generator)
    mask_1T = torch.zeros(1, T, dtype=torch.bool)
    mask_1T[:, -int(answers * T) :] = True
    batch = Batch(ids_1T, mask_1T, torch.tensor([DOCUMENTS[documents]]))
    _, kernel = unroll_kernel("auto", torch.device("cpu"))
    recipe = ObjectiveConfig(steps=2, kernel=kernel, recompute=True)
    with NoPairs(T):
        found = TrainStep(drafter, recipe)(batch, target_outputs(target, drafter, batch, recipe))
        found.loss.backward()
    assert found.loss.isfinite() and all(
        p.grad is not None and p.grad.isfinite().all() for p in drafter.parameters()
    )
