"""Products of bfloat16 by pairs."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.codegen.cpp_micro_gemm import micro_gemm_configs
from torch._inductor.utils import fresh_inductor_cache, run_and_get_cpp_code

from specdec.decoding.compiled import Compiled
from specdec.decoding.inductor import MOST_PAIRS, _pairs
from specdec.decoding.pairs import COLUMNS, ROWS, Pairs, able, known, offered

needs_pairs = pytest.mark.skipif(not _pairs(), reason="no code is made that multiplies pairs of bfloat16")


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """For which the template makes other code."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@needs_pairs
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rows", [3, ROWS + 1, MOST_PAIRS])
@pytest.mark.parametrize(
    ("inputs", "outputs", "bias", "pairs"),
    [
        (64, 96, False, True),
        (6, COLUMNS - 4, True, True),  # fewer columns than a block
        (5000, 2 * COLUMNS + 2, False, True),  # sums that are gone on with
        (63, 96, True, False),  # one input is without a partner
    ],
)
def test_products_are_those_of_wider_numbers(rows: int, inputs: int, outputs: int, bias: bool, pairs: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    layer = nn.Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16)
    x = torch.randn(rows, inputs, generator=generator).bfloat16()
    with torch.inference_mode(), fresh_inductor_cache():
        compiled = Compiled(lambda x: layer(x), "a layer", x.device)
        got, code = run_and_get_cpp_code(compiled, x)
        want = layer.double()(x.double())
    assert ("_mm512_dpbf16_ps" in code) == pairs
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-4)  # rounded once, at the end


def test_the_kernel_is_offered_for_a_while() -> None:
    with contextlib.suppress(ZeroDivisionError), offered():
        assert known()
        raise ZeroDivisionError
    assert not known() and Pairs not in micro_gemm_configs


def test_a_matrix_that_nobody_packed_is_refused() -> None:
    kernel = Pairs("k", torch.bfloat16, torch.bfloat16, torch.float32, torch.float32, SimpleNamespace())
    kernel.use_local_vnni_blocking(True)
    unread: Any = None
    with pytest.raises(NotImplementedError, match="packed"):
        kernel.codegen_define(unread)


@pytest.mark.parametrize(
    ("found", "is_able"),
    [
        ({"avx512_bf16": True, "avx512_vnni": True, "amx_bf16": False}, True),
        ({"avx512_bf16": True, "avx512_vnni": True, "amx_bf16": True}, False),  # tiles are faster
        ({"avx512_vnni": True}, False),
        ({}, False),
    ],
)
def test_the_processor_decides(found: dict[str, bool], is_able: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: found)
    assert able() == is_able
