"""What is set for the whole process, and that it is taken back."""

import contextlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from specdec.nn import backend
from specdec.nn.backend import (
    compile_pointwise,
    keep_freed_memory,
    matmul_backend,
    own_graphs,
    pointwise,
)
from specdec.nn.layers import RMSNorm

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def as_at_the_start() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    compile_pointwise(False)
    torch.set_float32_matmul_precision(before)


def test_compiled_once_and_only_while_it_is_on(monkeypatch: Patch) -> None:
    compiled = []

    def pretend(function: Callable) -> Callable:
        compiled.append(function)
        return lambda *args: ("fused", function(*args))

    monkeypatch.setattr(torch, "compile", pretend)

    @pointwise
    def same(x: int) -> int:
        """The same."""
        return x

    assert same(1) == 1 and not compiled and same.__doc__ == "The same."
    compile_pointwise(True)
    assert same(2) == ("fused", 2) and same(3) == ("fused", 3) and len(compiled) == 1
    compile_pointwise(False)
    assert same(4) == 4


class Adder:
    """Adds its number, which a graph takes for constant."""

    def __init__(self, number: int) -> None:
        self.number = number

    def add(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.number


@pytest.mark.slow
@pytest.mark.usefixtures("no_graphs")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("isolates", [True, False])
def test_a_graph_of_ones_own_is_not_taken_for_anothers(monkeypatch: Patch, isolates: bool) -> None:
    """Without guards, torch takes the first graph that it has of a function, whatever object it is of."""
    present = torch.compile

    def earlier(model: Callable, *, fullgraph: bool, options: dict) -> Callable:
        return present(model, fullgraph=fullgraph, options=options)

    if not isolates:  # as before torch 2.13
        monkeypatch.setattr(torch, "compile", earlier)
    options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    x = torch.zeros(2)
    graphs = [own_graphs(Adder(number).add, options=options) for number in (1, 2, 3)]
    assert [graph(x).tolist() for graph in graphs] == [[1, 1], [2, 2], [3, 3]]


@pytest.mark.slow
# torch's compiler imports what torch deprecates
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU"
)
def test_a_fused_norm_is_the_plain_one() -> None:
    """Forward and backward, through torch's own compiler."""
    norm, found = RMSNorm(8, 1e-6).double(), []
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 1.5, 8))
    for on in (False, True):
        compile_pointwise(on)
        x = torch.linspace(-2, 3, 24, dtype=torch.float64).view(3, 8).requires_grad_()
        out = norm(x)
        found.append([out, *torch.autograd.grad(out.square().sum(), [x, norm.weight])])
    for plain, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("maker", "exact", "name", "setting"),
    [
        ("AuthenticAMD", True, "oneDNN", "medium"),
        ("AuthenticAMD", False, "torch's default", "highest"),  # fast because it rounds
        ("GenuineIntel", True, "torch's default", "highest"),
        ("", True, "torch's default", "highest"),
    ],
)
def test_the_processor_decides(
    monkeypatch: Patch, maker: str, exact: bool, name: str, setting: str
) -> None:
    monkeypatch.setattr(backend, "multiplies_bfloat16", lambda: not exact)
    monkeypatch.setattr(backend, "_cpu_maker", lambda: maker)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    for wrong in (False, True):  # the setting comes back
        with (
            pytest.raises(KeyError) if wrong else contextlib.nullcontext(),
            matmul_backend(torch.device("cpu")) as chosen,
        ):
            assert chosen == name and torch.get_float32_matmul_precision() == setting
            if wrong:
                raise KeyError
        assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("choice", ["high", "medium"])
def test_the_users_own_setting_stands(monkeypatch: Patch, choice: str) -> None:
    monkeypatch.setattr(backend, "_cpu_maker", lambda: pytest.fail("nothing to ask"))
    torch.set_float32_matmul_precision(choice)
    with matmul_backend(torch.device("cpu")) as chosen:
        assert choice in chosen and torch.get_float32_matmul_precision() == choice
    assert torch.get_float32_matmul_precision() == choice


def test_a_gpus_float32_products_stay_exact(monkeypatch: Patch) -> None:
    monkeypatch.setattr(backend, "multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(backend, "_cpu_maker", lambda: "AuthenticAMD")
    with matmul_backend(torch.device("cuda")) as chosen:
        assert chosen == "cuda's" and torch.get_float32_matmul_precision() == "highest"


def test_a_processor_tells_its_maker(tmp_path: Path) -> None:
    (tmp_path / "x86").write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: EPYC\n")
    (tmp_path / "arm").write_text("processor\t: 0\nCPU implementer\t: 0x41\n")
    assert (
        backend._cpu_maker(tmp_path / "x86") == "AuthenticAMD"
        and backend._cpu_maker(tmp_path / "arm") == ""
    )
    assert backend._cpu_maker(tmp_path / "none") == ""


COUNT = """
import resource, torch
from specdec.nn.backend import keep_freed_memory
if {keep}:
    assert keep_freed_memory()
def touch():
    torch.ones(64 * 2**20, dtype=torch.uint8)
for _ in range(9):  # the allocator's own small change has to settle
    touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc")
def test_pages_are_not_taken_anew() -> None:
    """Four times 64 MB are 65,536 pages of 4 kB; blocks so large are never kept unasked."""
    faults = {}
    for keep in (False, True):
        code = COUNT.format(keep=keep)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
        )
        faults[keep] = int(done.stdout)
    assert faults[False] > 60_000 and faults[True] < 100


def test_other_c_libraries_are_left_alone(monkeypatch: Patch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not keep_freed_memory()
