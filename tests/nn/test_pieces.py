"""Attention by pieces is attention under the mask, and makes nothing of the size of the mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from specdec.nn import pieces
from specdec.nn.cache import attend
from specdec.nn.pieces import Cut, attend_pieces, is_long
from specdec.nn.sight import Pairs, Spans
from specdec.nn.view import View
from tests.nn.sights import packed_sights


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


@settings(max_examples=100, deadline=None)
@given(packed_sights(), st.integers(1, 6))
def test_any_packed_sight(sight: Spans, rows: int) -> None:
    T, S = sight.mask_B1TS.shape[2:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "ROWS", rows)
        cut = Cut.of(sight)
    q, k, v = random(2, 3, T, 4), random(2, 3, S, 4, seed=1), random(2, 3, S, 3, seed=2)
    got, want = attend_pieces(plain, q, k, v, cut), plain(q, k, v, sight.mask_B1TS)
    sees = sight.mask_B1TS.any(-1, keepdim=True)
    torch.testing.assert_close(got, want.where(sees, 0.0), rtol=0, atol=1e-12)
    assert all(piece.causal or piece.rows.stop - piece.rows.start <= rows for piece in cut.pieces)


def test_whole_documents_are_causal_and_short_ones_share_a_tile() -> None:
    documents = [0] * 600 + [1] * 20 + [2] * 30 + [3] * 700 + [-1] * 10
    found = Cut.of(View.packed(torch.tensor([documents, [0] * 1360])).sight.spans()).pieces
    spans = [(p.sequence, p.rows.start, p.rows.stop, p.keys.start, p.keys.stop, p.causal) for p in found]
    assert spans == [
        (0, 0, 600, 0, 600, True),
        (0, 600, 650, 600, 650, False),
        (0, 650, 1350, 650, 1350, True),
        (0, 1350, 1360, 1350, 1360, False),
        (1, 0, 1360, 0, 1360, True),
    ]


def test_a_prompt_is_causal_and_what_follows_a_prefix_is_not() -> None:
    whole, later = (Cut.of(View.chain(prefix, 600, 700).sight.spans()).pieces for prefix in (0, 100))
    assert [(p.keys, p.causal) for p in whole] == [(slice(0, 600), True)]
    assert [(p.rows, p.keys, p.causal) for p in later] == [
        (slice(0, 512), slice(0, 612), False),
        (slice(512, 600), slice(0, 700), False),
    ]


def test_many_pairs_of_spans_are_long() -> None:
    assert not is_long(View.packed(torch.zeros(1, 2048, dtype=torch.int64)).sight)
    assert is_long(View.packed(torch.zeros(1, 2049, dtype=torch.int64)).sight)
    assert is_long(View.chain(0, 65, 2**16).sight) and not is_long(View.chain(0, 64, 2**17).sight)  # as few queries
    assert not is_long(Pairs(torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(1, 1, 4096, 4096)))


def test_gradients_come_through() -> None:
    """The drafter's attention without a cache: groups of heads, and a sight that is long."""
    T = 2100
    view = View.packed(torch.tensor([[0] * 1500 + [1] * 600]))
    found = []
    for sight in (view.sight, Pairs(view.mask_B1TS)):
        leaves = [random(1, heads, T, 4, seed=i).requires_grad_() for i, heads in enumerate((2, 1, 1))]
        out = attend(*leaves, sight)
        found.append([out, *torch.autograd.grad((out * random(1, 2, T, 4, seed=5)).sum(), leaves)])
    for ours, masked in zip(*found, strict=True):
        torch.testing.assert_close(ours, masked, rtol=0, atol=1e-11)
