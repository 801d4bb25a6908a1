"""A sight said by spans is the one said pair by pair."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.nn.sight import Pairs, Spans
from specdec.nn.view import View
from tests.nn.sights import packed_sights


@settings(max_examples=100, deadline=None)
@given(packed_sights(), st.data())
def test_every_answer_is_the_masks(sight: Spans, data: st.DataObject) -> None:
    mask = sight.mask_B1TS
    B, _, T, S = mask.shape
    pairs = Pairs(mask)
    a, i = data.draw(st.integers(0, T - 1)), data.draw(st.integers(0, S - 1))
    rows, keys = slice(a, data.draw(st.integers(a + 1, T))), slice(i, data.draw(st.integers(i + 1, S)))
    nodes = torch.tensor(
        data.draw(st.lists(st.lists(st.integers(0, T - 1), min_size=3, max_size=3), min_size=2, max_size=2))
    )
    for one in (sight, pairs):
        assert torch.equal(one.part(rows, keys), mask[:, :, rows, keys])
        assert torch.equal(one.of(nodes).mask_B1TS, torch.stack([mask[b, :, nodes[b]] for b in range(B)]))
        assert torch.equal(one.cut(i + 1).mask_B1TS, mask[..., : i + 1])
        grid = torch.meshgrid(torch.arange(B), torch.arange(T), torch.arange(S), indexing="ij")
        assert torch.equal(one.sees(*grid), mask[:, 0])
        assert torch.equal(one.spans().mask_B1TS, mask)
    assert torch.equal(sight.row(1).mask_B1TS, mask[1:])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-1, 2), min_size=1, max_size=12), st.integers(1, 13), st.integers(0, 4))
def test_a_window_narrows_spans_as_it_narrows_pairs(documents: list[int], window: int, step: int) -> None:
    view = View.packed(torch.tensor([documents]))
    view = view._replace(positions_BT=view.positions_BT + step)
    by_pairs = view._replace(sight=Pairs(view.mask_B1TS))
    assert torch.equal(view.within(window).mask_B1TS, by_pairs.within(window).mask_B1TS)
    chain = View.chain(torch.tensor([3, 0]), len(documents), len(documents) + 5)
    by_pairs = chain._replace(sight=Pairs(chain.mask_B1TS))
    assert torch.equal(chain.within(window).mask_B1TS, by_pairs.within(window).mask_B1TS)


def test_the_span_of_pairs_with_gaps_holds_them_all() -> None:
    spans = Pairs(torch.tensor([[[[0, 1, 0, 1, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]]], dtype=torch.bool)).spans()
    assert spans.first_BT[0, 0] == 1 and spans.last_BT[0].tolist() == [3, -1, 4] and spans.first_BT[0, 2] == 4
    assert not spans.mask_B1TS[0, 0, 1].any()
