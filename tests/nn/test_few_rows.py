"""Products of few rows: the library's numbers, and in a compiled graph no call of it."""

import contextlib

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.select_algorithm import get_algorithm_selector_cache
from torch.nn import functional as F

from specdec.nn.few_rows import MOST, Loops, choose, choosing, linear, product


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("bias", [None, random(7, seed=2)], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", [(1, 5), (MOST, 5), (1, 2, 5), (MOST + 1, 5), (0, 5), (5,)])
def test_it_is_torchs_linear(shape: tuple[int, ...], bias: Tensor | None) -> None:
    x, w = random(*shape), random(7, 5, seed=1)
    got, want = linear(x, w, bias), F.linear(x, w, bias)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_float32_is_left_to_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.nn.few_rows.product", None)
    x, w = random(1, 5).float(), random(7, 5, seed=1).float()
    assert linear(x, w).equal(F.linear(x, w))


def test_choosing_leaves_no_trace() -> None:
    functions = get_algorithm_selector_cache().preprocessing_fns
    before = list(functions)
    with contextlib.suppress(KeyError), choosing():
        assert functions == [*before, choose]
        raise KeyError
    assert functions == before


def test_a_product_keeps_the_dimensions_in_front_and_sums_wide() -> None:
    x, w = random(3, 2, 4, 300).bfloat16(), random(3, 2, 6, 300, seed=1).bfloat16()
    got = product(x, w)
    assert got.shape == (3, 2, 4, 6) and got.dtype == torch.bfloat16
    want = x.double() @ w.double().transpose(-1, -2)
    assert (got.double() - want).abs().max() < 0.02 * want.abs().max()


def test_the_pass_turns_every_linear_layer_of_a_graph_into_loops() -> None:
    graph = fx.Graph()
    x, a, b, c = (graph.placeholder(name) for name in "xabc")
    graph.output(graph.call_function(F.linear, (graph.call_function(F.linear, (x, a, b)), c)))
    Loops()(graph)
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [linear, linear]
    x_MK, a_NK, b_N, c_LN = random(2, 5), random(7, 5, seed=1), random(7, seed=2), random(3, 7, seed=3)
    got = fx.GraphModule(nn.Module(), graph)(x_MK, a_NK, b_N, c_LN)
    torch.testing.assert_close(got, F.linear(F.linear(x_MK, a_NK, b_N), c_LN), rtol=0, atol=1e-12)


@pytest.mark.parametrize("limit", ["MOST", "MOST_FLOATS"])
def test_another_limit_is_another_pass(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or torch would take a graph out of its cache that was made with the old one."""
    before = Loops().uuid()
    assert Loops().uuid() == before
    monkeypatch.setattr(f"specdec.nn.few_rows.{limit}", MOST + 20)
    assert Loops().uuid() != before
