"""Point-wise pieces, fused and not."""

import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from specdec.nn import pointwise as module
from specdec.nn.norm import RMSNorm
from specdec.nn.pointwise import compile_pointwise, pointwise


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    yield
    compile_pointwise(False)


def test_off_at_the_start_and_a_plain_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", None)  # would fail if asked for
    calls = []

    @pointwise
    def double(x: Tensor, by: float) -> Tensor:
        """Twice."""
        calls.append(by)
        return x * by

    assert double(torch.ones(2), 2.0).tolist() == [2.0, 2.0] and calls == [2.0]
    assert double.__name__ == "double" and double.__doc__ == "Twice."


def test_compiled_once_and_only_while_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def pretend(function):  # type: ignore[no-untyped-def]
        compiled.append(function)
        return lambda *args: ("fused", function(*args))

    monkeypatch.setattr(module.torch, "compile", pretend)

    @pointwise
    def same(x: int) -> int:
        return x

    assert same(1) == 1 and not compiled
    compile_pointwise(True)
    assert same(2) == ("fused", 2) and same(3) == ("fused", 3) and len(compiled) == 1
    compile_pointwise(False)
    assert same(4) == 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler imports what torch deprecates
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_a_fused_norm_is_the_plain_one() -> None:
    """Forward and backward of a real piece, through torch's own compiler."""
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
