"""What torch's compiler is told to make of a graph."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._inductor.lowering  # before what follows, which imports it in a circle
from torch import nn
from torch._inductor.codegen import cpp_template_kernel
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.select_algorithm import KernelTemplate, get_algorithm_selector_cache
from torch._inductor.utils import fresh_cache, fresh_inductor_cache, run_and_get_cpp_code

from specdec.decoding.compiled import Compiled
from specdec.decoding.inductor import IN_REGISTERS, _expression, _template, choose, choosing, compiling, options
from specdec.decoding.pairs import known
from specdec.nn.rope import Rope, turn


def test_nothing_imports_the_compiler_before_it_compiles() -> None:
    """Two seconds of every command's start."""
    code = (
        "import sys, specdec.fit, specdec.evaluation.command; print('torch._inductor.select_algorithm' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def compiled(layer: nn.Linear) -> Compiled[torch.Tensor]:
    return Compiled(lambda x: layer(x), "a product", torch.device("cpu"))


def test_code_for_other_weights_is_not_compiled_anew(tmp_path: Path) -> None:
    """Nor is it in another process: that too has its weights elsewhere in memory."""
    x, layers = torch.randn(3, 64), [nn.Linear(64, 96, bias=False).requires_grad_(False) for _ in range(2)]
    with fresh_cache(dir=str(tmp_path), delete=False), torch.inference_mode():
        products = [compiled(layer) for layer in layers]
        for layer, product in [*zip(layers, products, strict=True)] * 2:  # the first again, when the second is there
            torch.testing.assert_close(product(x), layer(x))
    assert len(list(tmp_path.rglob("*.main.so"))) == 1


def test_templates_and_their_expressions_are_read_once(tmp_path: Path) -> None:
    """Two products of other shapes have the same templates."""
    before = KernelTemplate._template_from_string, cpp_template_kernel.parse_expr
    hits = [read.cache_info().hits for read in (_template, _expression)]
    first, second = (nn.Linear(64, width, bias=False).requires_grad_(False) for width in (96, 128))
    twice = Compiled(lambda x: (first(x), second(x + 1)), "two products", torch.device("cpu"))
    with fresh_cache(dir=str(tmp_path), delete=False), torch.inference_mode():
        twice(torch.randn(3, 64))
    assert all(read.cache_info().hits > old + 5 for read, old in zip((_template, _expression), hits, strict=True))
    assert (KernelTemplate._template_from_string, cpp_template_kernel.parse_expr) == before


def test_the_rotary_tables_are_worked_out_once() -> None:
    """For heads that are turned before two products, which no kernel fuses."""
    rope = Rope({"rope_type": "default", "rope_theta": 1e4}, 64, 64)
    weight = torch.randn(64, 64) / 8

    def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        tables = rope.tables(positions)
        for _ in range(2):
            x = turn(x, *tables) @ weight
        return x

    x, positions = torch.randn(1, 4, 3, 64), torch.tensor([[4, 5, 6]])
    compiled = Compiled(lambda x, positions: turned(x, positions), "turning", torch.device("cpu"))
    with torch.inference_mode(), fresh_inductor_cache():
        got, code = run_and_get_cpp_code(compiled, x, positions)
    torch.testing.assert_close(got, turned(x, positions))
    assert code.count(".cos()") == code.count(".sin()") == 1


def test_choosing_leaves_no_trace() -> None:
    functions = get_algorithm_selector_cache().preprocessing_fns
    before = list(functions)
    with contextlib.suppress(KeyError), choosing():
        assert functions == [*before, choose]
        raise KeyError
    assert functions == before


@pytest.mark.parametrize(
    ("machine", "gcc", "processor", "said"),
    [
        ("x86_64", True, None, f"native {IN_REGISTERS}"),
        ("x86_64", True, "icelake-server", f"icelake-server {IN_REGISTERS}"),
        ("x86_64", True, "", None),  # the user wants none
        ("x86_64", False, None, None),
        ("aarch64", True, None, None),
    ],
)
def test_the_compiler_is_told_to_keep_sums_in_registers(
    machine: str, gcc: bool, processor: str | None, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("specdec.decoding.inductor.is_gcc", lambda: gcc)
    with torch._inductor.config.patch({"cpp.march": processor}):
        assert options(torch.device("cpu")).get("cpp.march") == said
    assert "cpp.march" not in options(torch.device("cuda"))


@pytest.mark.parametrize(
    ("machine", "gcc", "processor", "able", "pairs"),
    [
        ("x86_64", True, None, True, True),
        ("x86_64", True, "native", True, True),
        ("x86_64", True, "icelake-server", True, False),  # code for another processor
        ("x86_64", True, "", True, False),
        ("x86_64", False, None, True, False),
        ("x86_64", True, None, False, False),
    ],
)
def test_pairs_are_for_code_of_this_processor(
    machine: str, gcc: bool, processor: str | None, able: bool, pairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("specdec.decoding.inductor.is_gcc", lambda: gcc)
    monkeypatch.setattr("specdec.decoding.pairs.able", lambda: able)
    with torch._inductor.config.patch({"cpp.march": processor}), compiling("this", True):
        assert known() == pairs
    with compiling("this", False):  # on a GPU
        assert not known()


def test_without_a_compiler_compiling_is_left_to_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> bool:
        raise InvalidCxxCompiler

    monkeypatch.setattr("specdec.decoding.inductor.is_gcc", none)
    assert "cpp.march" not in options(torch.device("cpu"))
