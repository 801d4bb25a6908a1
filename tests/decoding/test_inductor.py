"""What torch's compiler is told to make of a graph."""

import contextlib
import subprocess
import sys

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.select_algorithm import get_algorithm_selector_cache
from torch.nn import functional as F

from specdec.decoding.inductor import Loops, choose, choosing
from specdec.nn.few_rows import MOST, linear


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_nothing_imports_the_compiler_before_it_compiles() -> None:
    """Two seconds of every command's start."""
    code = (
        "import sys, specdec.fit, specdec.evaluation.command; print('torch._inductor.select_algorithm' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_choosing_leaves_no_trace() -> None:
    functions = get_algorithm_selector_cache().preprocessing_fns
    before = list(functions)
    with contextlib.suppress(KeyError), choosing():
        assert functions == [*before, choose]
        raise KeyError
    assert functions == before


def test_the_pass_turns_every_linear_layer_of_a_graph_into_loops() -> None:
    graph = fx.Graph()
    x, a, b, c = (graph.placeholder(name) for name in "xabc")
    graph.output(graph.call_function(F.linear, (graph.call_function(F.linear, (x, a, b)), c)))
    Loops()(graph)
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [linear, linear]
    x_MK, a_NK, b_N, c_LN = random(2, 5), random(7, 5, seed=1), random(7, seed=2), random(3, 7, seed=3)
    got = fx.GraphModule(nn.Module(), graph)(x_MK, a_NK, b_N, c_LN)
    torch.testing.assert_close(got, F.linear(F.linear(x_MK, a_NK, b_N), c_LN), rtol=0, atol=1e-12)


@pytest.mark.parametrize("limit", ["nn.few_rows.MOST", "decoding.inductor.MOST_FLOATS"])
def test_another_limit_is_another_pass(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or torch would take a graph out of its cache that was made with the old one."""
    before = Loops().uuid()
    assert Loops().uuid() == before
    monkeypatch.setattr(f"specdec.{limit}", MOST + 20)
    assert Loops().uuid() != before
