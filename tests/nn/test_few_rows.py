"""Products of a few rows as sums: the numbers of torch's own layer, and no product of a library in a compiled graph."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from specdec.nn.few_rows import MOST_ROWS, sum_few_rows, sums

# of the greatest output
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 4), (2, 4)])
def test_sums_are_the_linear_layer(shape: tuple[int, int], bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(*shape, 48).to(dtype)
    weight = torch.randn(20, 48).to(dtype)
    bias_O = torch.randn(20).to(dtype) if bias else None
    expected = F.linear(x, weight, bias_O)
    made = sums(x, weight, bias_O)
    assert made.dtype == dtype
    assert made.shape == expected.shape
    error = (made.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error <= TOLERANCE[dtype]


def test_sixteen_bit_rows_are_summed_in_float32() -> None:
    """Ones are lost in a bfloat16 sum beyond 256."""
    ones = torch.ones(1, 1024, dtype=torch.bfloat16)
    assert sums(ones, ones).item() == 1024


def test_rows_of_a_transposed_view_are_read_in_order() -> None:
    x = torch.randn(16, 3).t()
    weight = torch.randn(5, 16)
    torch.testing.assert_close(sums(x, weight), F.linear(x, weight))


def test_a_layer_is_prepared_once_and_computes_the_same_without_a_graph() -> None:
    layers = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 2)))
    x = torch.randn(1, 4)
    before = layers(x)
    sum_few_rows(layers)
    sum_few_rows(layers, layers[0])
    assert [len(layer._forward_hooks) for layer in (layers[0], layers[1][0])] == [1, 1]
    assert torch.equal(layers(x), before)


def products_of(rows: int) -> tuple[set[str], Tensor, Tensor]:
    """A library's products in a graph of so many rows, its result, and the layers' own."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 96, bias=False), nn.SiLU(), nn.Linear(96, 32))
    x = torch.randn(1, rows, 64)
    with torch.inference_mode():
        expected = layers(x)
        # a graph for each number of rows, and none of an earlier test
        graph = torch.compile(lambda given: layers(given), dynamic=False)
        sum_few_rows(layers)
        graph(x)
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            made = graph(x)
    products = {"aten::mm", "aten::addmm"} & {event.name for event in recorded.events() or ()}
    return products, made, expected


@pytest.mark.slow
@pytest.mark.usefixtures("no_graphs")
@pytest.mark.parametrize(
    ("rows", "of_library"), [(1, False), (MOST_ROWS, False), (MOST_ROWS + 1, True)]
)
def test_compiled_layers_of_few_rows_call_no_library(rows: int, of_library: bool) -> None:
    products, made, expected = products_of(rows)
    assert bool(products) == of_library
    torch.testing.assert_close(made, expected)
