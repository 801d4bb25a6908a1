"""The gated block against transformers' own and against its formula."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaMLP

from specdec.nn import mlp as module
from specdec.nn.mlp import SwiGLU
from tests.tiny import HIDDEN, llama_config


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def block(width: int = 6, inside: int = 10) -> SwiGLU:
    made = SwiGLU(width, inside).double()
    with torch.no_grad():
        for seed, parameter in enumerate(made.parameters()):
            parameter.copy_(random(*parameter.shape, seed=seed))
    return made


def formula(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The first half of the rows is the gate."""
    half = len(gate_up) // 2
    gate, up = x @ gate_up[:half].T, x @ gate_up[half:].T
    return (gate / (1 + torch.exp(-gate)) * up) @ down.T


def test_equals_llamas() -> None:
    torch.manual_seed(0)
    theirs = LlamaMLP(llama_config()).double()
    ours = SwiGLU(HIDDEN, llama_config().intermediate_size).double()
    w = theirs.state_dict()
    gate_up = torch.cat([w["gate_proj.weight"], w["up_proj.weight"]])
    ours.load_state_dict({"gate_up_proj.weight": gate_up, "down_proj.weight": w["down_proj.weight"]})
    x = torch.randn(2, 3, HIDDEN, dtype=torch.float64)
    assert ours(x).std() > 0
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-14)


def test_one_matrix_for_gate_and_up() -> None:
    shapes = {name: tuple(p.shape) for name, p in SwiGLU(6, 10).named_parameters()}
    assert shapes == {"gate_up_proj.weight": (20, 6), "down_proj.weight": (6, 10)}


@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 3, 6), (1, 1, 6)], ids=str)
def test_it_is_the_formula_and_so_is_its_gradient(shape: tuple[int, ...]) -> None:
    ours, x, weight = block(), (2 * random(*shape, seed=7)).requires_grad_(), random(*shape, seed=8)
    leaves = [x, *ours.parameters()]
    got, want = ours(x), formula(*leaves)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    found, wanted = (torch.autograd.grad((out * weight).sum(), leaves) for out in (got, want))
    for a, b in zip(found, wanted, strict=True):
        assert b.abs().max() > 0.1
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", ["gate_up_proj", "down_proj", "x"])
def test_gradients_where_a_part_is_frozen(frozen: str) -> None:
    ours, x, weight = block(), random(2, 3, 6, seed=7).requires_grad_(), random(2, 3, 6, seed=8)
    (x if frozen == "x" else getattr(ours, frozen).weight).requires_grad_(False)
    leaves = [leaf for leaf in (x, *ours.parameters()) if leaf.requires_grad]
    assert len(leaves) == 2
    found, wanted = (
        torch.autograd.grad((out * weight).sum(), leaves) for out in (ours(x), formula(x, *ours.parameters()))
    )
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_the_gate_alone_passes_the_gradient_check() -> None:
    both = (3 * random(2, 3, 8, seed=1)).requires_grad_()
    torch.testing.assert_close(module._Gate.apply(both), F.silu(both[..., :4]) * both[..., 4:], rtol=0, atol=1e-15)
    assert torch.autograd.gradcheck(module._Gate.apply, both)


def test_large_gates_overflow_neither_way() -> None:
    both = torch.tensor([[-200.0, 0.0, 200.0, 2.0, 3.0, 4.0]], requires_grad=True)
    out = module._Gate.apply(both)
    assert out.tolist() == [[0.0, 0.0, 800.0]]
    (by_both,) = torch.autograd.grad(out.sum(), both)
    assert by_both.tolist() == [[0.0, 1.5, 4.0, 0.0, 0.0, 200.0]]


def test_recomputed_it_is_the_same() -> None:
    """Under gradient checkpointing what is made again is made of what is made again."""
    ours, x = block(), random(2, 3, 6, seed=7).requires_grad_()
    leaves = [x, *ours.parameters()]
    plain, thrifty = ours(x), checkpoint(ours, x, use_reentrant=False)
    assert torch.equal(plain, thrifty)
    found = [torch.autograd.grad(out.square().sum(), leaves) for out in (thrifty, plain)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_without_gradients_nothing_is_kept_and_nothing_changes() -> None:
    ours, x = block(), random(2, 3, 6, seed=7)
    with torch.no_grad():
        out = ours(x)
    assert not out.requires_grad and torch.equal(out, ours(x))
