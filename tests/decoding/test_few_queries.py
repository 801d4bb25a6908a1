"""The compiled kernel against attention in float64."""

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import fresh_inductor_cache, run_and_get_cpp_code

from specdec.decoding.compiled import Compiled
from specdec.decoding.few_queries import ROWS
from specdec.decoding.inductor import _pairs
from specdec.nn.few_queries import STEP, additive, attend_few

pytestmark = pytest.mark.usefixtures("no_graphs")

B, G, SLOTS, SCALE = 2, 2, 90, 0.4
KERNEL = "_product(rows, queries"


def parts(heads: int, queries: int, width: int = STEP, value_width: int = STEP) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(queries)
    sizes = ((G * heads, queries, width), (G, SLOTS, width), (G, SLOTS, value_width))
    q, k, v = (torch.randn(B, *size, generator=generator) for size in sizes)
    return q, k, v


def seen(batch: int, queries: int) -> Tensor:
    """A mask, (B or 1, 1, T, S), under which every query sees a key."""
    allowed = torch.rand(batch, 1, queries, SLOTS, generator=torch.Generator().manual_seed(1)) < 0.5
    allowed[..., 0] = True
    return allowed


def few(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, slots_S: Tensor) -> Tensor:
    S = len(slots_S)
    return attend_few(q, k.narrow(2, 0, S), v.narrow(2, 0, S), None if bias is None else bias[..., :S], SCALE)


def exact(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, S: int) -> Tensor:
    bias = None if allowed is None else additive(allowed[..., :S], torch.float64)
    return attend_few(q.double(), k[:, :, :S].double(), v[:, :, :S].double(), bias, SCALE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "queries", "width", "value_width", "batch", "threads"),
    [(1, 1, 16, 16, B, 2), (2, 6, 64, 64, 1, 1), (3, 6, 48, 16, 0, 2), (2, ROWS + 1, 16, 32, B, 2)],
    ids=["one query", "a chain", "narrow values, no mask", "several blocks"],
)
def test_it_is_attention(
    heads: int, queries: int, width: int, value_width: int, batch: int, threads: int, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of as many keys as there are at each call."""
    monkeypatch.setattr("specdec.decoding.few_queries.parallel_num_threads", lambda: threads)
    q, k, v = (x.to(dtype) for x in parts(heads, queries, width, value_width))
    allowed = seen(batch, queries) if batch else None
    bias = None if allowed is None else additive(allowed, dtype)
    compiled, slots = Compiled(few, "attention", q.device, varying=True), torch.arange(SLOTS)
    with torch.inference_mode(), fresh_inductor_cache():
        first, code = run_and_get_cpp_code(compiled, q, k, v, bias, slots[:-1])
        assert KERNEL in code and ("dpbf16" in code) == (dtype == torch.bfloat16 and _pairs())
        for S in (SLOTS - 1, 16, 3, SLOTS, 33):
            got = first if S == SLOTS - 1 else compiled(q, k, v, bias, slots[:S])
            assert got.dtype == dtype and got.shape == (B, G * heads, queries, value_width)
            limit = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
            torch.testing.assert_close(got.double(), exact(q, k, v, allowed, S), rtol=limit, atol=limit)


@pytest.mark.parametrize(("bits", "gap"), [(256, 0), (None, 1), (None, 2)])
def test_pairs_want_wide_vectors_and_keys_that_begin_with_one(bits: int | None, gap: int) -> None:
    q, k, v = (x.bfloat16() for x in parts(2, 6))
    k = torch.cat([k, k], -1)[..., : STEP + gap].clone()[..., :STEP]
    compiled = Compiled(lambda q, k, v: attend_few(q, k, v, None, SCALE), "attention", q.device)
    with torch.inference_mode(), fresh_inductor_cache(), torch._inductor.config.patch({"cpp.simdlen": bits}):
        got, code = run_and_get_cpp_code(compiled, q, k, v)
    assert KERNEL in code and ("dpbf16" in code) == (bits is None and gap % 2 == 0 and _pairs())
    limit = 2 * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(got.double(), exact(q, k, v, None, SLOTS), rtol=limit, atol=limit)


@pytest.mark.parametrize("queries", [1, 3])
def test_what_stands_behind_it_is_not_lost(queries: int) -> None:
    """The compiler would leave it to the kernel where both go through the output in one order."""
    q, k, v = parts(1, queries)

    def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q + 2 * attend_few(q, k, v, None, SCALE)
        return q + attend_few(q, k, v, None, SCALE).relu()

    with torch.inference_mode(), fresh_inductor_cache():
        got, code = run_and_get_cpp_code(Compiled(twice, "attention", q.device), q, k, v)
        torch.testing.assert_close(got, twice(q, k, v), rtol=0, atol=1e-5)
    assert KERNEL in code


def test_shapes_differ_within_a_graph_and_keys_may_lie_across() -> None:
    """A tree's levels have different numbers of nodes."""
    (one, k, v), (three, _, _) = parts(1, 1), parts(2, 3)

    def both(one: Tensor, three: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = attend_few(one, k, v, None, SCALE)
        return attend_few(three + first.mean(), k.transpose(2, 3).contiguous().transpose(2, 3), v, None, SCALE)

    with torch.inference_mode(), fresh_inductor_cache():
        got, code = run_and_get_cpp_code(Compiled(both, "attention", k.device), one, three, k, v)
        torch.testing.assert_close(got, both(one, three, k, v), rtol=0, atol=1e-5)
    assert code.count(KERNEL) == 2


@pytest.mark.parametrize(("width", "dtype"), [(STEP - 4, torch.float32), (STEP, torch.float64)])
def test_others_are_left_to_the_library(width: int, dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in parts(2, 3, width, width))
    with torch.inference_mode(), fresh_inductor_cache():
        compiled = Compiled(lambda q, k, v: attend_few(q, k, v, None, SCALE), "attention", q.device)
        got, code = run_and_get_cpp_code(compiled, q, k, v)
        torch.testing.assert_close(got, attend_few(q, k, v, None, SCALE), rtol=0, atol=1e-5)
    assert KERNEL not in code


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_query_without_keys_is_a_number_and_disturbs_no_other(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in parts(2, 3))
    allowed = seen(B, 3)
    allowed[0, :, 1] = False
    with torch.inference_mode(), fresh_inductor_cache():
        compiled = Compiled(few, "attention", q.device)
        got = compiled(q, k, v, additive(allowed, q.dtype), torch.arange(SLOTS))
    assert got.isfinite().all()
    limit = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    others = allowed.any(-1)[:, 0, None, :, None].expand_as(got)  # float64's least number is not the dtype's
    want = exact(q, k, v, allowed, SLOTS)
    torch.testing.assert_close(got.double()[others], want[others], rtol=limit, atol=limit)


def test_elsewhere_it_is_products() -> None:
    """Compiled by others, who know no kernel; with gradients it is no operation of its own."""
    q, k, v = parts(2, 3)
    want = attend_few(q, k, v, None, SCALE)
    compiled = torch.compile(lambda q, k, v: attend_few(q, k, v, None, SCALE), fullgraph=True)
    with torch.no_grad(), fresh_inductor_cache():
        torch.testing.assert_close(compiled(q, k, v), want)
    q.requires_grad_()
    compiled(q, k, v).sum().backward()
    assert q.grad is not None and q.grad.abs().max() > 0
