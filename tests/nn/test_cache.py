"""Attention and both caches against attention over every key at once.

Legend: B batch, h query heads, g key heads, T nodes, S keys, d head width, K steps.
"""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from specdec.nn import cache as nn_cache
from specdec.nn.blocked import Blocked
from specdec.nn.cache import (
    FEW_QUERIES,
    Pieces,
    StaticCache,
    additive,
    attend,
    attend_few,
    attend_pieces,
)
from specdec.nn.merged import Merged
from specdec.nn.unroll import Dense, UnrollCache, UnrollKernel
from specdec.nn.view import Pairs, Spans, View
from tests.nn.trees import Tree, seen_by, trees
from tests.nn.visibilities import packed_visibilities
from tests.no_pairs import NoPairs
from tests.plain_attention import plain_block

d = 6
mask_of = Spans.part


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def slow_attend(q_BhTd: Tensor, k_BgSd: Tensor, v_BgSd: Tensor, mask_BTS: Tensor) -> Tensor:
    """One query at a time, over the keys it may see and no other; head i reads key head ``i // (h / g)``."""
    B, h, T, _ = q_BhTd.shape
    share = h // k_BgSd.shape[1]
    rows = []
    for b in range(B):
        for i in range(h):
            for t in range(T):
                seen = mask_BTS[b, t].nonzero()[:, 0]
                keys, values = k_BgSd[b, i // share, seen], v_BgSd[b, i // share, seen]
                weights = torch.exp(keys @ q_BhTd[b, i, t] / math.sqrt(q_BhTd.shape[-1]))
                rows.append((weights[:, None] * values).sum(0) / weights.sum())
    return torch.stack(rows).view(B, h, T, -1)


@pytest.mark.parametrize(("h", "g"), [(4, 4), (4, 2), (3, 1)])
def test_attend_is_softmax_over_the_visible_keys(h: int, g: int) -> None:
    q, k, v = random(2, h, 5, d), random(2, g, 7, d, seed=1), random(2, g, 7, d, seed=2)
    mask_BTS = random(2, 5, 7, seed=3) > 0
    mask_BTS[..., 0] = True
    got = attend(q, k, v, Pairs(mask_BTS[:, None], 7))
    torch.testing.assert_close(got, slow_attend(q, k, v, mask_BTS), rtol=0, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(trees(6), st.integers(1, 4), st.data())
def test_static_cache_equals_no_cache(tree: Tree, prefix: int, data: st.DataObject) -> None:
    """A prompt in pieces, then a tree in pieces, is what one uncached pass over all of them gives."""
    drafted, h, g = len(tree.parents), 4, 2
    total = prefix + drafted
    q, k, v = random(1, h, total, d), random(1, g, total, d, seed=1), random(1, g, total, d, seed=2)
    mask_TT = torch.ones(total, total, dtype=torch.bool).tril()
    mask_TT[prefix:, prefix:] = seen_by(tree)
    want = slow_attend(q, k, v, mask_TT[None])

    capacity = total + 2
    cache = StaticCache(2, g, capacity, d, torch.float64)
    for keys, values in zip(cache.keys_BgSd, cache.values_BgSd, strict=True):
        keys.fill_(7.0)  # rubbish in slots to come must never be seen
        values.fill_(9.0)
    cut = data.draw(st.integers(1, prefix))
    level = data.draw(st.integers(1, drafted))
    depth_Q = torch.tensor(tree.depths)
    views = [View.chain(0, cut, capacity)]
    if cut < prefix:
        views.append(View.chain(cut, prefix - cut, capacity))
    views.append(View.append(prefix, seen_by(tree)[:level, :level], depth_Q[:level], capacity))
    if level < drafted:
        views.append(View.append(prefix, seen_by(tree)[level:], depth_Q, capacity))
    for view in views:
        assert view.slots_BT is not None
        slots = view.slots_BT[0]
        for layer in (0, 1):  # the second layer holds other keys
            sign = 1.0 if layer == 0 else -1.0
            new = q[:, :, slots], sign * k[:, :, slots], v[:, :, slots]
            got = cache.attend(layer, *new, view.visibility, view.slots_BT)
            if layer == 0:
                torch.testing.assert_close(got, want[:, :, slots], rtol=0, atol=1e-12)
    for layer, sign in ((0, 1.0), (1, -1.0)):
        assert torch.equal(cache.keys_BgSd[layer][:, :, :total], sign * k)
        assert torch.equal(cache.values_BgSd[layer][:, :, :total], v)
        assert bool((cache.keys_BgSd[layer][:, :, total:] == 7).all())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(1, 5), st.integers(0, 99))
def test_a_batch_of_static_caches_is_each_of_them_alone(
    prefixes: list[int], new: int, seed: int
) -> None:
    """Sequences of different lengths, and what else is in the slots is nobody's."""
    B, h, g, capacity = len(prefixes), 4, 2, 12
    batched = StaticCache(1, g, capacity, d, torch.float64, batch=B)
    q, k, v = (random(B, heads, new, d, seed=seed + i) for i, heads in enumerate((h, g, g)))
    old_k, old_v = (
        random(B, g, capacity, d, seed=seed + 3),
        random(B, g, capacity, d, seed=seed + 4),
    )
    batched.keys_BgSd[0].copy_(old_k)
    batched.values_BgSd[0].copy_(old_v)
    view = View.chain(torch.tensor(prefixes), new, capacity)
    got = batched.attend(0, q, k, v, view.visibility, view.slots_BT)
    for b, prefix in enumerate(prefixes):
        one, own = slice(b, b + 1), View.chain(prefix, new, capacity)
        alone = StaticCache(1, g, capacity, d, torch.float64)
        alone.keys_BgSd[0].copy_(old_k[one])
        alone.values_BgSd[0].copy_(old_v[one])
        wanted = alone.attend(0, q[one], k[one], v[one], own.visibility, own.slots_BT)
        torch.testing.assert_close(got[one], wanted, rtol=0, atol=1e-12)
        assert torch.equal(batched.row(b).keys_BgSd[0], alone.keys_BgSd[0])
        assert torch.equal(batched.row(b).values_BgSd[0], alone.values_BgSd[0])
        assert torch.equal(batched.keys_BgSd[0][b, :, prefix : prefix + new], k[b])


def test_a_row_of_a_static_cache_is_the_same_memory() -> None:
    cache = StaticCache(2, 1, 5, d, torch.float64, batch=3)
    row, view = cache.row(1), View.chain(2, 2, 5)
    assert row.capacity == 5 and {x.shape for x in row.keys_BgSd + row.values_BgSd} == {
        (1, 1, 5, d)
    }
    k, v = random(1, 1, 2, d, seed=1), random(1, 1, 2, d, seed=2)
    row.attend(1, random(1, 1, 2, d), k, v, view.visibility, view.slots_BT)
    for buffers, new in ((cache.keys_BgSd, k), (cache.values_BgSd, v)):
        assert torch.equal(buffers[1][1, :, 2:4], new[0])
        buffers[1][1, :, 2:4] = 0
        assert not any(buffer.any() for buffer in buffers)  # and nothing else was written
    assert not row.keys_BgSd[1].any() and len(cache.keys_BgSd[0]) == 3


def test_no_keys_are_copied_for_every_query_head() -> None:
    """Elsewhere than on a CPU, too: a kernel that takes a mask would first make keys of all 16 heads, 4 million."""
    cache = StaticCache(1, 2, 4096, 64, torch.bfloat16, "meta")
    q, k, v = (
        torch.empty(1, heads, 5, 64, dtype=torch.bfloat16, device="meta") for heads in (16, 2, 2)
    )
    view = View.chain(torch.tensor([9], device="meta"), 5, 4096, cache)  # type: ignore[arg-type]
    with NoPairs(2048):
        assert cache.attend(0, q, k, v, view.visibility, view.slots_BT).shape == q.shape


def test_few_and_many_queries_meet_keys_alike() -> None:
    """At the number where one way of counting gives way to the other."""
    T = FEW_QUERIES + 1
    view = View.chain(3, T, T + 5)
    q, k, v = random(1, 4, T, d), random(1, 2, T, d, seed=1), random(1, 2, T, d, seed=2)
    whole = StaticCache(1, 2, T + 5, d, torch.float64)
    many = whole.attend(0, q, k, v, view.visibility, view.slots_BT)
    few = whole.attend(
        0,
        q[:, :, :FEW_QUERIES],
        k,
        v,
        view.visibility.of(torch.arange(FEW_QUERIES)[None]),
        view.slots_BT,
    )
    torch.testing.assert_close(few, many[:, :, :FEW_QUERIES], rtol=0, atol=1e-12)
    keys, values = (x[0].clone() for x in (whole.keys_BgSd, whole.values_BgSd))
    torch.testing.assert_close(
        many, slow_attend(q, keys, values, view.visibility.mask_B1TS[:, 0]), rtol=0, atol=1e-12
    )


def wide_mask(mask_BTT: Tensor, k: int) -> Tensor:
    """(B, T, (k+1)T): the mask on step 0's block, the diagonal on those of steps 1..k."""
    B, T, _ = mask_BTT.shape
    return torch.cat([mask_BTT, *[torch.eye(T, dtype=torch.bool).expand(B, T, T)] * k], dim=-1)


KERNELS = {
    "dense": Dense,
    "blocked-whole": Blocked,
    "blocked-2": lambda: Blocked(2),
    "blocked-1": lambda: Blocked(1),
    "merged": lambda: Merged(plain_block),
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize(("h", "g"), [(4, 2), (2, 2), (3, 1)])
@pytest.mark.parametrize(
    "documents", [[[0] * 5], [[0, 0, 1, 1, 1], [0, 1, 1, -1, -1]]], ids=["whole", "packed"]
)
def test_every_kernel_equals_the_dense_oracle(
    h: int, g: int, documents: list[list[int]], kernel: Callable[[], UnrollKernel]
) -> None:
    """Forward and backward, every step, two layers in turns."""
    K, B, T = 4, len(documents), 5
    visible = View.packed(torch.tensor(documents)).visibility
    mask_BTT = visible.mask_B1TS[:, 0]

    def leaves() -> list[list[tuple[Tensor, ...]]]:
        shapes = ((B, h, T, d), (B, g, T, d), (B, g, T, d))
        return [
            [
                tuple(
                    random(*shape, seed=100 * layer + 10 * k + i).requires_grad_()
                    for i, shape in enumerate(shapes)
                )
                for k in range(K)
            ]
            for layer in range(2)
        ]

    ours, dense = leaves(), leaves()
    cache = UnrollCache(kernel())
    loss_ours = loss_dense = torch.zeros((), dtype=torch.float64)
    for k in range(K):
        for layer in range(2):
            weight = random(B, h, T, d, seed=500 + 10 * k + layer)
            got = cache.attend(layer, *ours[layer][k], visible, None)
            keys = torch.cat([step[1] for step in dense[layer][: k + 1]], dim=2)
            values = torch.cat([step[2] for step in dense[layer][: k + 1]], dim=2)
            want = slow_attend(dense[layer][k][0], keys, values, wide_mask(mask_BTT, k))
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
            loss_ours = loss_ours + (got * weight).sum()
            loss_dense = loss_dense + (want * weight).sum()
    flat_ours = [x for layer in ours for step in layer for x in step]
    flat_dense = [x for layer in dense for step in layer for x in step]
    for mine, theirs in zip(
        torch.autograd.grad(loss_ours, flat_ours),
        torch.autograd.grad(loss_dense, flat_dense),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


BATCH, QUERIES, KEYS, d = 2, 5, 9, 6
SCALE, NO_BIAS = d**-0.5, torch.zeros(1, 1, 1, 1)
heads = pytest.mark.parametrize(("h", "g"), [(4, 4), (4, 2), (6, 1)])


def few_parts(
    h: int, g: int, queries: int = QUERIES, value_width: int = d
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        random(BATCH, h, queries, d),
        random(BATCH, g, KEYS, d, seed=1),
        random(BATCH, g, KEYS, value_width, seed=2),
    )


def allowed() -> Tensor:
    """A mask (BATCH, 1, QUERIES, KEYS) that leaves every row a key."""
    mask_B1TS = random(BATCH, 1, QUERIES, KEYS, seed=3) > 0
    mask_B1TS[..., 0] = True
    return mask_B1TS


def torchs(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float = SCALE) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


@heads
def test_under_a_mask(h: int, g: int) -> None:
    """What the boolean mask says, and its additive form says the same."""
    (q, k, v), mask_B1TS = few_parts(h, g), allowed()
    got = attend_few(q, k, v, additive(mask_B1TS, torch.float64), SCALE)
    torch.testing.assert_close(got, torchs(q, k, v, mask_B1TS), rtol=0, atol=1e-14)
    assert (got - attend_few(q, k, v, NO_BIAS, SCALE)).abs().max() > 0.1


@heads
@pytest.mark.parametrize("batch", [1, BATCH])
def test_any_bias_is_added_to_the_scaled_products(h: int, g: int, batch: int) -> None:
    (q, k, v), bias_B1TS = few_parts(h, g), random(batch, 1, QUERIES, KEYS, seed=4)
    got = attend_few(q, k, v, bias_B1TS, 0.3)
    torch.testing.assert_close(got, torchs(q, k, v, bias_B1TS, 0.3), rtol=0, atol=1e-14)
    assert (got - attend_few(q, k, v, bias_B1TS, SCALE)).abs().max() > 1e-3  # the scale counts


def test_values_may_be_narrower_than_keys() -> None:
    """As in DeepSeek's latent attention."""
    q, k, v = few_parts(4, 4, value_width=4)
    torch.testing.assert_close(
        attend_few(q, k, v, NO_BIAS, SCALE), torchs(q, k, v, None), rtol=0, atol=1e-14
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_row_without_keys_is_a_number_and_disturbs_no_other(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in few_parts(4, 2))
    mask_B1TS = allowed()
    wanted = attend_few(q, k, v, additive(mask_B1TS, dtype), SCALE)
    mask_B1TS[0, :, 2] = False
    got = attend_few(q, k, v, additive(mask_B1TS, dtype), SCALE)
    assert got.isfinite().all() and got.dtype == dtype
    others = torch.ones(BATCH, QUERIES, dtype=torch.bool)
    others[0, 2] = False
    assert torch.equal(got.transpose(1, 2)[others], wanted.transpose(1, 2)[others])


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


@settings(max_examples=100, deadline=None)
@given(packed_visibilities(), st.integers(1, 6), st.booleans())
def test_any_packed_visibility(visible: Spans, rows: int, causal: bool) -> None:
    T, S = visible.mask_B1TS.shape[2:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn_cache, "PIECE_NODES", rows)
        cut = Pieces.cut(visible, causal)
    q, k, v = random(2, 3, T, 4), random(2, 3, S, 4, seed=1), random(2, 3, S, 3, seed=2)
    got, want = attend_pieces(plain, q, k, v, cut), plain(q, k, v, visible.mask_B1TS)
    sees = visible.mask_B1TS.any(-1, keepdim=True)
    torch.testing.assert_close(got, want.where(sees, 0.0), rtol=0, atol=1e-12)
    assert all(piece.causal or piece.rows.stop - piece.rows.start <= rows for piece in cut.pieces)


def test_whole_documents_are_causal_and_short_ones_share_a_tile() -> None:
    documents = [0] * 600 + [1] * 20 + [2] * 30 + [3] * 700 + [-1] * 10
    found = Pieces.cut(View.packed(torch.tensor([documents, [0] * 1360])).visibility).pieces
    spans = [
        (p.sequence, p.rows.start, p.rows.stop, p.keys.start, p.keys.stop, p.causal) for p in found
    ]
    assert spans == [
        (0, 0, 600, 0, 600, True),
        (0, 600, 650, 600, 650, False),
        (0, 650, 1350, 650, 1350, True),
        (0, 1350, 1360, 1350, 1360, False),
        (1, 0, 1360, 0, 1360, True),
    ]


@pytest.mark.parametrize("kept", [0, nn_cache.MAX_KEPT_MASK_PAIRS])
def test_masks_of_pieces_are_made_once_for_all_layers(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as they are small together; what comes out is the same."""
    monkeypatch.setattr(nn_cache, "MAX_KEPT_MASK_PAIRS", kept)
    first_BT = torch.tensor([[0] * 40 + [40] * 30 + [70] * 50] * 2)
    spans = Spans(first_BT, torch.arange(120).expand(2, -1), 120)
    cut, made = Pieces.cut(spans), []
    monkeypatch.setattr(Spans, "part", lambda self, *at: made.append(at) or mask_of(self, *at))
    q, k, v = (random(2, 3, 120, 4, seed=seed) for seed in range(3))
    for _layer in range(3):
        got = attend_pieces(plain, q, k, v, cut)
        assert torch.equal(
            got, plain(q, k, v, mask_of(spans, slice(None), slice(0, 120), slice(None)))
        )
    assert len(made) == (0 if kept else 6)  # two rows and three layers


def test_a_prompt_is_causal_and_what_follows_a_prefix_is_not() -> None:
    whole, later = (
        Pieces.cut(View.chain(prefix, 600, 700).visibility).pieces for prefix in (0, 100)
    )
    assert [(p.keys, p.causal) for p in whole] == [(slice(0, 600), True)]
    assert [(p.rows, p.keys, p.causal) for p in later] == [
        (slice(0, 512), slice(0, 612), False),
        (slice(512, 600), slice(0, 700), False),
    ]


def test_sinks_join_a_window_s_piece() -> None:
    visible = View.packed(torch.zeros(1, 1100, dtype=torch.int64)).within(20, 3).visibility
    _, _, last = Pieces.cut(visible).pieces
    assert isinstance(last.keys, Tensor) and last.keys.tolist() == [
        0,
        1,
        2,
        *range(1024 - 19, 1100),
    ]


def test_gradients_come_through() -> None:
    """The drafter's attention without a nn_cache: groups of heads, and a visibility that is long."""
    T = 2100
    view = View.packed(torch.tensor([[0] * 1500 + [1] * 600]))
    found = []
    for visible in (view.visibility, Pairs(view.visibility.mask_B1TS, T)):
        leaves = [
            random(1, heads, T, 4, seed=i).requires_grad_() for i, heads in enumerate((2, 1, 1))
        ]
        out = attend(*leaves, visible)
        found.append([out, *torch.autograd.grad((out * random(1, 2, T, 4, seed=5)).sum(), leaves)])
    for ours, masked in zip(*found, strict=True):
        torch.testing.assert_close(ours, masked, rtol=0, atol=1e-11)
