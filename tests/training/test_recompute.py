"""Running each step again in the backward pass: the same numbers to the last bit, for less memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.data import Batch
from specdec.drafter import Drafter, DrafterSpec
from specdec.nn.unroll import Blocked, Dense, UnrollKernel
from specdec.training.objective import Recipe, objective, teach
from specdec.training.ttt import ttt_unroll
from tests.tiny import VOCAB, presets, tiny_drafter, tiny_target, variants

K, T = 4, 20
DESIGNS = presets() | variants()


def sample() -> Batch:
    ids = torch.randint(0, VOCAB, (2, T), generator=torch.Generator().manual_seed(0))
    return Batch(ids, torch.ones(2, T, dtype=torch.bool), torch.tensor([[0] * T, [0] * 8 + [1] * 9 + [-1] * 3]))


def learner(spec: DrafterSpec) -> Drafter:
    return tiny_drafter(spec).requires_grad_()


def trained(drafter: Drafter, kernel: UnrollKernel, recompute: bool) -> list[Tensor]:
    """Loss and every gradient."""
    recipe, batch = Recipe(steps=K, kernel=kernel, recompute=recompute), sample()
    loss = objective(drafter, batch, teach(tiny_target(), drafter, batch, recipe), recipe).loss
    return [loss.detach(), *torch.autograd.grad(loss, list(drafter.parameters()))]


@pytest.mark.parametrize("kernel", [Dense(), Blocked(6)])
@pytest.mark.parametrize("name", DESIGNS)
def test_the_same_loss_and_gradients_to_the_last_bit(name: str, kernel: UnrollKernel) -> None:
    drafter = learner(DESIGNS[name])
    for plain, again in zip(*(trained(drafter, kernel, recompute) for recompute in (False, True)), strict=True):
        assert torch.equal(plain, again)


def unroll(drafter: Drafter, recompute: bool) -> list[Any]:
    batch, n = sample(), len(drafter.config.aux_layers)
    shape = (2, T, n, drafter.config.target_hidden_size)
    aux = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return list(ttt_unroll(drafter, batch.ids_BT, aux, batch.documents_BT, K, Blocked(6), recompute))


@pytest.mark.parametrize("name", ["eagle3_1", "two_layer"])
def test_every_step_runs_twice_and_only_where_gradients_are_wanted(name: str) -> None:
    drafter, runs = learner(DESIGNS[name]), []
    drafter.layers.register_forward_hook(lambda *_: runs.append(1))
    for recompute, backward in ((False, K), (True, 2 * K)):
        runs.clear()
        steps = unroll(drafter, recompute)
        assert len(runs) == K
        sum(step.normed_BTH.sum() for step in steps).backward()
        assert len(runs) == backward
    runs.clear()
    with torch.no_grad():
        steps = unroll(drafter, recompute=True)
    assert len(runs) == K and not steps[0].normed_BTH.requires_grad


def test_a_backward_pass_in_parts_runs_each_step_on_its_own() -> None:
    """The last step alone needs all before it; a single early one needs none behind it."""
    drafter = learner(DESIGNS["eagle3_1"])
    for k in range(K):
        found = []
        for recompute in (False, True):
            steps = unroll(drafter, recompute)
            found.append(torch.autograd.grad(steps[k].normed_BTH.square().sum(), drafter.layers.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def kept(drafter: Drafter, recompute: bool) -> int:
    """Bytes that wait for the backward pass, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in drafter.parameters()}
    held: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        held[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        unroll(drafter, recompute)
    return sum(x.untyped_storage().nbytes() for at, x in held.items() if at not in weights)


@pytest.mark.parametrize("name", ["eagle1", "eagle3_1"])
def test_less_is_kept(name: str) -> None:
    drafter = learner(DESIGNS[name])
    assert kept(drafter, recompute=True) < 0.6 * kept(drafter, recompute=False)
