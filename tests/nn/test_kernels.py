"""The unroll's kernels beyond what ``test_cache`` asks of them: any mask, any tile, large scores, memory.

Legend: B batch, h query heads, g key heads, T nodes, d head width, K steps.
"""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from specdec.nn import blocked
from specdec.nn.blocked import Blocked, Tiling, kept_bytes
from specdec.nn.kernels import unroll_kernel
from specdec.nn.merged import Flex, Merged, _rule
from specdec.nn.unroll import Dense, Keys, UnrollKernel
from specdec.nn.view import Spans, View
from tests.nn.visibilities import packed_visibilities
from tests.plain_attention import plain_block


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).to(dtype)


def inputs(
    B: int, h: int, g: int, T: int, d: int, K: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Queries of the last step, then keys and values of every step; laid out as attention lays them out."""
    shapes = [(B, T, h, d)] + [(B, T, g, d)] * (2 * K)
    return [
        random(*shape, seed=i, dtype=dtype).transpose(1, 2).requires_grad_()
        for i, shape in enumerate(shapes)
    ]


def run(kernel: UnrollKernel, flat: list[Tensor], visible: Spans) -> Tensor:
    return kernel(
        flat[0], [Keys(*pair) for pair in zip(flat[1::2], flat[2::2], strict=True)], visible
    )


def random_spans(B: int, T: int, seed: int) -> Spans:
    """Any run of keys that holds the node's own."""
    generator, order_T = torch.Generator().manual_seed(seed), torch.arange(T)
    down_BT, up_BT = (torch.rand(B, T, generator=generator) for _ in range(2))
    return Spans((down_BT * (order_T + 1)).long(), order_T + (up_BT * (T - order_T)).long(), T)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(2, 4, 2), (1, 3, 1), (3, 2, 2)]),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 10),
    st.integers(1, 10),
    st.integers(0, 99),
)
def test_tiles_of_any_size_under_any_run_of_keys(
    heads: tuple[int, int, int], T: int, K: int, rows: int, keys: int, seed: int
) -> None:
    """Output and every gradient are the dense ones, whatever is seen, causal or not."""
    B, h, g = heads
    visible, weight = random_spans(B, T, seed), random(B, h, T, 4, seed=77)
    found = []
    for kernel in (Blocked(rows, keys), Dense()):
        flat = inputs(B, h, g, T, 4, K)
        out = run(kernel, flat, visible)
        found.append([out, *torch.autograd.grad((out * weight).sum(), flat)])
    for ours, dense in zip(*found, strict=True):
        torch.testing.assert_close(ours, dense, rtol=0, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    packed_visibilities(), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.booleans()
)
def test_parts_of_any_size_of_documents_windows_and_kept_nodes(
    visible: Spans, K: int, rows: int, keys: int, store: bool
) -> None:
    """Output and every gradient are the dense ones; biases kept or made anew; at step 0 every node sees itself."""
    sees = bool((visible.first_BT <= visible.last_BT).all())
    steps = K + 1 if not sees else K
    (B, T), S = visible.first_BT.shape, visible.columns
    weight, found = random(B, 4, T, 4, seed=77), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "MAX_CACHED_BIAS_BYTES", 2**26 if store else 0)
        for kernel in (Blocked(rows, keys), Dense()):
            shapes = [(B, T, 4, 4)] + [(B, S, 2, 4)] * 2 + [(B, T, 2, 4)] * (2 * steps - 2)
            flat = [
                random(*shape, seed=i).transpose(1, 2).requires_grad_()
                for i, shape in enumerate(shapes)
            ]
            out = run(kernel, flat, visible)
            found.append([out, *torch.autograd.grad((out * weight).sum(), flat)])
    for ours, dense in zip(*found, strict=True):
        torch.testing.assert_close(ours, dense, rtol=0, atol=1e-12)


def test_sinks_far_before_a_tile_are_a_part_of_their_own() -> None:
    """What lies between them and the window is not multiplied; near the text's beginning they are one part."""
    visible = View.packed(torch.zeros(1, 40, dtype=torch.int64)).within(6, 2).visibility
    assert isinstance(visible, Spans)
    tiles = [
        [(part.start, part.stop) for part in parts] for _, parts in Tiling(visible, 8, 32).tiles
    ]
    assert tiles == [
        [(0, 8)],
        [(0, 2), (3, 16)],
        [(0, 2), (11, 24)],
        [(0, 2), (19, 32)],
        [(0, 2), (27, 40)],
    ]


def test_a_kernel_forgets_the_sight_before() -> None:
    """One kernel serves all batches: its tiles belong to the visible that they were cut for."""
    kernel, flat = Blocked(2), [x.detach() for x in inputs(1, 2, 1, 6, 4, 2)]
    for documents in ([0] * 6, [0, 0, 0, 1, 1, 1], [0, 1, 2, 3, 4, 5]):
        visible = View.packed(torch.tensor([documents])).visibility
        torch.testing.assert_close(
            run(kernel, flat, visible), run(Dense(), flat, visible), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("kernel", [Dense(), Blocked(2)])
@pytest.mark.parametrize("size", [1e3, 1e-30])
def test_large_and_tiny_scores_stay_numbers(kernel: UnrollKernel, size: float) -> None:
    """Weights of scores in the millions: all on the largest; of equal ones: evenly."""
    visible = View.packed(torch.zeros(1, 5, dtype=torch.int64)).visibility
    flat = [(x.detach().float() * size).requires_grad_() for x in inputs(1, 2, 1, 5, 4, 3)]
    out = run(kernel, flat, visible)
    found = [out, *torch.autograd.grad(out.sum(), flat)]
    assert all(bool(x.isfinite().all()) for x in found)
    exact = [x.detach().double() for x in flat]
    torch.testing.assert_close(
        out.double(), run(Dense(), exact, visible), rtol=1e-4, atol=1e-4 * size
    )


def test_nothing_as_wide_as_the_text_is_kept() -> None:
    """For the backward pass the blocked kernel keeps no weights, only what grows with T and the mask's bits."""
    T, kept = 64, []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    visible = View.packed(torch.zeros(1, T, dtype=torch.int64)).visibility
    for kernel, wanted in ((Blocked(16), False), (Dense(), True)):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            run(kernel, inputs(1, 2, 1, T, 4, 3), visible)
        assert any(x.is_floating_point() and x.numel() >= T * T for x in kept) is wanted


def test_bfloat16_is_as_good_as_the_dense_one() -> None:
    """Its output and gradients are bfloat16, and hardly farther from float64's than the dense kernel's in bfloat16:
    sums over tile and columns are rounded once, not once a column."""
    visible = View.packed(torch.tensor([[0] * 20 + [1] * 12])).visibility
    low = [x.detach() for x in inputs(1, 4, 2, 32, 8, 4, torch.bfloat16)]
    weight = random(1, 4, 32, 8, seed=50)

    def found(kernel: UnrollKernel, dtype: torch.dtype) -> list[Tensor]:
        flat = [x.to(dtype).requires_grad_() for x in low]
        out = run(kernel, flat, visible)
        found = [out.detach(), *torch.autograd.grad((out * weight.to(dtype)).sum(), flat)]
        assert all(x.dtype == dtype for x in found)
        return [x.double() for x in found]

    exact = found(Dense(), torch.float64)
    for ours, dense, true in zip(
        found(Blocked(8), torch.bfloat16), found(Dense(), torch.bfloat16), exact, strict=True
    ):
        assert float((ours - true).norm()) < 1.4 * float((dense - true).norm())


@settings(max_examples=100, deadline=None)
@given(packed_visibilities(), st.integers(1, 13), st.integers(1, 9))
def test_tiles_hold_every_node_once_and_no_key_too_few(
    visible: Spans, rows: int, most: int
) -> None:
    mask = visible.mask_B1TS[:, 0]
    plan = Tiling(visible, rows, most)
    assert [t for rows, _ in plan.tiles for t in range(rows.start, rows.stop)] == list(
        range(mask.shape[1])
    )
    for tile, parts in plan.tiles:
        assert tile.stop - tile.start <= rows
        seen = mask[:, tile].any(0).any(0).nonzero()[:, 0].tolist()
        keys = [s for part in parts for s in range(part.start, part.stop)]
        whole = list(range(seen[0], seen[-1] + 1)) if seen else []
        assert keys == (whole if visible.sinks is None else sorted({*keys} & {*whole} | {*seen}))
        for part in parts:
            assert part.stop - part.start <= most
            here, bias = mask[:, tile, part], plan.bias(tile, part)
            assert torch.equal((bias == 0)[:, 0, 0].expand_as(here), here)
            assert (bias.numel() == 1) == bool(here.all()) or visible.sinks is not None


def biases(plan: Tiling) -> list[Tensor]:
    return [plan.bias(rows, keys) for rows, parts in plan.tiles for keys in parts]


@pytest.mark.parametrize(
    ("B", "T"), [(2, 40), (3, 700), (1, 2048), (2, 2304), (1, 5000), (1, 9000)]
)
def test_the_biases_of_whole_documents_take_what_was_foretold(B: int, T: int) -> None:
    plan = Tiling(View.packed(torch.zeros(B, T, dtype=torch.int64)).visibility)
    made = {id(bias): bias for bias in biases(plan) if bias.numel() > 1}
    assert sum(bias.nbytes for bias in made.values()) == kept_bytes(B, T) > 0
    assert kept_bytes(1, 2**15) == 0


def test_a_long_document_needs_biases_on_its_diagonal_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    view = View.packed(torch.zeros(1, 64, dtype=torch.int64))
    plan = Tiling(view.visibility, 8, 16)
    assert sum(bias.numel() > 1 for bias in biases(plan)) == len(plan.tiles) == 8
    assert biases(plan)[-1] is biases(plan)[-1]  # few enough to be kept
    monkeypatch.setattr(blocked, "MAX_CACHED_BIAS_BYTES", 2 * 8 * sum((8, 16) * 4) - 1)
    plan = Tiling(view.visibility, 8, 16)
    assert biases(plan)[-1] is not biases(plan)[-1]


def steps(flat: Sequence[Tensor]) -> list[Keys]:
    return [Keys(*pair) for pair in zip(flat[::2], flat[1::2], strict=True)]


def leaves(K: int, T: int, d: int, seed: int = 0) -> list[Tensor]:
    """As attention lays them out: heads beside each other in memory."""
    shapes = [(2, T, 4, d)] + [(2, T, 2, d)] * (2 * K)
    return [random(*shape, seed=seed + i).transpose(1, 2) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("K", [1, 2, 4])
def test_merged_is_the_dense_oracle(K: int) -> None:
    visible, weight = (
        View.packed(torch.tensor([[0] * 7, [0, 0, 1, 1, 1, -1, -1]])).visibility,
        random(2, 4, 7, 6, seed=99),
    )
    found = []
    for kernel in (Merged(plain_block), Dense()):
        flat = [
            x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
            for x in leaves(K, 7, 6)
        ]
        out = kernel(flat[0], steps(flat[1:]), visible)
        found.append([out, *torch.autograd.grad((out * weight).sum(), flat)])
    for ours, dense in zip(*found, strict=True):
        torch.testing.assert_close(ours, dense, rtol=0, atol=1e-12)


@pytest.mark.parametrize("K", [2, 7])
def test_own_columns_keep_no_scores_beside_the_causal_block(K: int) -> None:
    """Kept for the backward pass beside what the block keeps: the output and two numbers a query, whatever K."""
    visible, flat = View.packed(torch.zeros(2, 64, dtype=torch.long)).visibility, leaves(K, 64, 16)
    flat = [x.requires_grad_() for x in flat]
    given = {x.untyped_storage().data_ptr() for x in flat}
    kept: dict[int, int] = {}

    def block(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
        with torch.no_grad():  # so that it keeps nothing
            out, lse = plain_block(q, k, v, spans)
        given.update(x.untyped_storage().data_ptr() for x in (out, lse))
        return out, lse

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = Merged(block)(flat[0], steps(flat[1:]), visible)
    queries = flat[0].numel() // 16
    assert sum(kept.values()) <= out.nbytes + 2 * queries * out.element_size()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
@pytest.mark.usefixtures("no_graphs")
def test_flex_is_compiled_once_for_batches_of_all_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty, of several rows, and of one: a graph each, of the attention and of the mask."""
    from torch._dynamo.utils import counters

    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda run, **how: compiled(run, backend="eager", **how))
    kernel, generator = Flex(), torch.Generator().manual_seed(0)
    for number in range(50):
        B, T = (
            int(torch.randint(low, high, (), generator=generator))
            for low, high in ((2, 9), (129, 700))
        )
        B, T = (1, T) if number == 30 else (B, T)
        spans = View.packed(torch.randint(0, 2, (B, T), generator=generator).cumsum(1)).visibility
        q, k, v = (random(B, heads, T, 4, dtype=torch.float32) for heads in (2, 1, 1))
        assert isinstance(spans, Spans)
        out, _ = kernel._causal_block(q, k, v, spans)
        if number in (0, 30, 49):
            torch.testing.assert_close(out, plain_block(q, k, v, spans)[0], rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 4


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # of torch itself
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch has no backward pass for flex attention on a CPU"
)
@pytest.mark.parametrize(
    "documents", [[[0] * 256, [0] * 256], [[0] * 100 + [1] * 156, [0] * 200 + [-1] * 56]]
)
def test_flex_is_the_dense_oracle(documents: list[list[int]]) -> None:
    """Forward and backward in float32, through three steps; a second visible is not taken for the first."""
    kernel, width = Flex(), 32
    for other in (documents, [row[::-1] for row in documents]):
        visible = View.packed(torch.tensor(other, device="cuda")).visibility
        for K in (1, 3):
            found = []
            for run in (kernel, Dense()):
                flat = [x.cuda().float().requires_grad_() for x in leaves(K, 256, width)]
                out = run(flat[0], steps(flat[1:]), visible)
                weight = random(*out.shape, seed=9).cuda().float()
                found.append([out, *torch.autograd.grad((out * weight).sum(), flat)])
            for ours, dense in zip(*found, strict=True):
                torch.testing.assert_close(ours, dense, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("window", "sinks"), [(0, 0), (40, 0), (40, 3)])
def test_the_block_mask_is_made_from_spans(window: int, sinks: int) -> None:
    """On a CPU too: the blocks that flex attention skips, takes whole and asks about, one by one."""
    view = View.packed(torch.tensor([[0] * 256, [0] * 100 + [1] * 120 + [-1] * 36]))
    visible = (view.within(window, sinks) if window else view).visibility
    block = create_block_mask(_rule(visible), 2, None, 256, 256, device="cpu", BLOCK_SIZE=32)
    dense = visible.mask_B1TS
    assert torch.equal(create_mask(_rule(visible), 2, 1, 256, 256, device="cpu"), dense)
    seen = dense[:, 0].unflatten(2, (8, 32)).unflatten(1, (8, 32)).any(-1).any(2)
    assert torch.equal(block.to_dense()[:, 0].bool(), seen)


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("name", "device", "chosen", "kind"),
    [
        ("auto", CPU, "blocked", Blocked),
        ("auto", torch.device("mps"), "blocked", Blocked),
        ("auto", CUDA, "flex", Flex),
        ("dense", CPU, "dense", Dense),
        ("dense", CUDA, "dense", Dense),
        ("blocked", CUDA, "blocked", Blocked),
        ("flex", torch.device("cuda", 1), "flex", Flex),
    ],
)
def test_the_kernel_of_a_device(name: str, device: torch.device, chosen: str, kind: type) -> None:
    said, kernel = unroll_kernel(name, device)
    assert said == chosen and type(kernel) is kind


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("flex", CPU, r"model\.attention=flex needs CUDA.*cpu.*use auto"),
        ("flex", torch.device("mps"), "mps"),
        (
            "flash",
            CPU,
            r"model\.attention must be auto or one of dense, blocked, flex, not 'flash'",
        ),
        ("", CUDA, "not ''"),
    ],
)
def test_no_such_kernel(name: str, device: torch.device, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        unroll_kernel(name, device)
    assert "\n" not in str(error.value)
