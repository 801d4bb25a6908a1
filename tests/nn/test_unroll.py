"""The unroll's kernels beyond what ``test_cache`` asks of them: any mask, any tile, large scores, memory.

Legend: B batch, h query heads, g key heads, T nodes, d head width, K steps.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.nn import tiles
from specdec.nn.sight import Pairs, Sight, Spans
from specdec.nn.unroll import Blocked, Dense, Keys, UnrollKernel, wide
from specdec.nn.view import View
from tests.nn.sights import packed_sights


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(B: int, h: int, g: int, T: int, d: int, K: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries of the last step, then keys and values of every step; laid out as attention lays them out."""
    shapes = [(B, T, h, d)] + [(B, T, g, d)] * (2 * K)
    return [random(*shape, seed=i, dtype=dtype).transpose(1, 2).requires_grad_() for i, shape in enumerate(shapes)]


def run(kernel: UnrollKernel, flat: list[Tensor], sight: Sight) -> Tensor:
    return kernel(flat[0], [Keys(*pair) for pair in zip(flat[1::2], flat[2::2], strict=True)], sight)


def random_pairs(B: int, T: int, seed: int, share: float) -> Pairs:
    """Anything but an empty row."""
    mask = torch.rand(B, T, T, generator=torch.Generator().manual_seed(seed)) < share
    return Pairs((mask | torch.eye(T, dtype=torch.bool))[:, None])


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(2, 4, 2), (1, 3, 1), (3, 2, 2)]),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 10),
    st.integers(1, 10),
    st.floats(0, 1),
    st.integers(0, 99),
)
def test_tiles_of_any_size_under_any_mask(
    heads: tuple[int, int, int], T: int, K: int, rows: int, keys: int, share: float, seed: int
) -> None:
    """Output and every gradient are the dense ones, whatever is seen, causal or not."""
    B, h, g = heads
    sight, weight = random_pairs(B, T, seed, share), random(B, h, T, 4, seed=77)
    found = []
    for kernel in (Blocked(rows, keys), Dense()):
        flat = inputs(B, h, g, T, 4, K)
        out = run(kernel, flat, sight)
        found.append([out, *torch.autograd.grad((out * weight).sum(), flat)])
    for ours, dense in zip(*found, strict=True):
        torch.testing.assert_close(ours, dense, rtol=0, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(packed_sights(), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.booleans())
def test_parts_of_any_size_of_documents_windows_and_kept_nodes(
    sight: Spans, K: int, rows: int, keys: int, store: bool
) -> None:
    """Output and every gradient are the dense ones; biases kept or made anew; at step 0 every node sees itself."""
    sees = bool((sight.first_BT <= sight.last_BT).all())
    steps = K + 1 if not sees else K
    (B, T), S = sight.first_BT.shape, sight.columns
    weight, found = random(B, 4, T, 4, seed=77), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "KEPT", 2**26 if store else 0)
        for kernel in (Blocked(rows, keys), Dense()):
            shapes = [(B, T, 4, 4)] + [(B, S, 2, 4)] * 2 + [(B, T, 2, 4)] * (2 * steps - 2)
            flat = [random(*shape, seed=i).transpose(1, 2).requires_grad_() for i, shape in enumerate(shapes)]
            out = run(kernel, flat, sight)
            found.append([out, *torch.autograd.grad((out * weight).sum(), flat)])
    for ours, dense in zip(*found, strict=True):
        torch.testing.assert_close(ours, dense, rtol=0, atol=1e-12)


def test_the_gradient_is_that_of_small_differences() -> None:
    sight = View.packed(torch.tensor([[0, 0, 1, 1, 1]])).sight
    flat = inputs(1, 4, 2, 5, 3, 3)
    assert torch.autograd.gradcheck(lambda *leaves: run(Blocked(2), list(leaves), sight), flat)


def test_a_second_derivative_is_refused_and_not_wrong() -> None:
    flat = inputs(1, 2, 1, 3, 4, 2)
    out = run(Blocked(2), flat, View.packed(torch.zeros(1, 3, dtype=torch.int64)).sight)
    (first,) = torch.autograd.grad(out.square().sum(), flat[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_a_kernel_forgets_the_sight_before() -> None:
    """One kernel serves all batches: its tiles belong to the sight that they were cut for."""
    kernel, flat = Blocked(2), [x.detach() for x in inputs(1, 2, 1, 6, 4, 2)]
    for documents in ([0] * 6, [0, 0, 0, 1, 1, 1], [0, 1, 2, 3, 4, 5]):
        sight = View.packed(torch.tensor([documents])).sight
        torch.testing.assert_close(run(kernel, flat, sight), run(Dense(), flat, sight), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", [Dense(), Blocked(2)])
@pytest.mark.parametrize("size", [1e3, 1e-30])
def test_large_and_tiny_scores_stay_numbers(kernel: UnrollKernel, size: float) -> None:
    """Weights of scores in the millions: all on the largest; of equal ones: evenly."""
    sight = View.packed(torch.zeros(1, 5, dtype=torch.int64)).sight
    flat = [(x.detach().float() * size).requires_grad_() for x in inputs(1, 2, 1, 5, 4, 3)]
    out = run(kernel, flat, sight)
    found = [out, *torch.autograd.grad(out.sum(), flat)]
    assert all(bool(x.isfinite().all()) for x in found)
    exact = [x.detach().double() for x in flat]
    torch.testing.assert_close(out.double(), run(Dense(), exact, sight), rtol=1e-4, atol=1e-4 * size)


def test_nothing_as_wide_as_the_text_is_kept() -> None:
    """For the backward pass the blocked kernel keeps no weights, only what grows with T and the mask's bits."""
    T, kept = 64, []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    sight = View.packed(torch.zeros(1, T, dtype=torch.int64)).sight
    for kernel, wanted in ((Blocked(16), False), (Dense(), True)):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            run(kernel, inputs(1, 2, 1, T, 4, 3), sight)
        assert any(x.is_floating_point() and x.numel() >= T * T for x in kept) is wanted


def test_bfloat16_is_as_good_as_the_dense_one() -> None:
    """Its output and gradients are bfloat16, and hardly farther from float64's than the dense kernel's in bfloat16:
    sums over tile and columns are rounded once, not once a column."""
    sight = View.packed(torch.tensor([[0] * 20 + [1] * 12])).sight
    low = [x.detach() for x in inputs(1, 4, 2, 32, 8, 4, torch.bfloat16)]
    weight = random(1, 4, 32, 8, seed=50)

    def found(kernel: UnrollKernel, dtype: torch.dtype) -> list[Tensor]:
        flat = [x.to(dtype).requires_grad_() for x in low]
        out = run(kernel, flat, sight)
        found = [out.detach(), *torch.autograd.grad((out * weight.to(dtype)).sum(), flat)]
        assert all(x.dtype == dtype for x in found)
        return [x.double() for x in found]

    exact = found(Dense(), torch.float64)
    for ours, dense, true in zip(found(Blocked(8), torch.bfloat16), found(Dense(), torch.bfloat16), exact, strict=True):
        assert float((ours - true).norm()) < 1.4 * float((dense - true).norm())


def test_sums_are_taken_wide() -> None:
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    assert [wide(dtype) for dtype in kinds] == [torch.float32] * 3 + [torch.float64]


def test_scores_are_divided_by_the_root_of_the_width() -> None:
    """Two keys, one query: the weights by hand, on the causal block and on an own column."""
    d = 4
    q, one, two = torch.full((1, 1, 1, d), 1.0), torch.zeros(1, 1, 1, d), torch.full((1, 1, 1, d), 0.5)
    sight = Pairs(torch.ones(1, 1, 1, 1, dtype=torch.bool))
    for kernel in (Dense(), Blocked()):
        out = kernel(q, [Keys(one, one), Keys(two, torch.ones_like(two))], sight)
        assert math.isclose(float(out[0, 0, 0, 0]), math.e / (math.e + 1), rel_tol=1e-6)
