"""The plan of the blocked kernel: every node once, every key that is seen, no bias where there is nothing to hide."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.nn import tiles
from specdec.nn.sight import Pairs, Spans
from specdec.nn.tiles import Plan, kept_bytes
from specdec.nn.view import View
from tests.nn.sights import packed_sights


@settings(max_examples=100, deadline=None)
@given(packed_sights(), st.integers(1, 13), st.integers(1, 9), st.booleans())
def test_tiles_hold_every_node_once_and_no_key_too_few(sight: Spans, rows: int, most: int, by_pairs: bool) -> None:
    mask = sight.mask_B1TS[:, 0]
    plan = Plan(Pairs(sight.mask_B1TS) if by_pairs else sight, rows, most)
    assert [t for tile in plan.tiles for t in range(tile.rows.start, tile.rows.stop)] == list(range(mask.shape[1]))
    for tile in plan.tiles:
        assert tile.rows.stop - tile.rows.start <= rows
        seen = mask[:, tile.rows].any(0).any(0).nonzero()[:, 0].tolist()
        keys = [s for part in tile.parts for s in range(part.start, part.stop)]
        assert keys == (list(range(seen[0], seen[-1] + 1)) if seen else [])
        for part in tile.parts:
            assert part.stop - part.start <= most
            here, bias = mask[:, tile.rows, part], plan.bias(tile.rows, part)
            assert torch.equal((bias == 0)[:, 0, 0].expand_as(here), here)
            if not by_pairs:
                assert (bias.numel() == 1) == bool(here.all())


@pytest.mark.parametrize(("B", "T"), [(2, 40), (3, 700), (1, 2048), (2, 2304), (1, 5000), (1, 9000)])
def test_the_biases_of_whole_documents_take_what_was_foretold(B: int, T: int) -> None:
    plan = Plan(View.packed(torch.zeros(B, T, dtype=torch.int64)).sight)
    for part in plan.parts():
        plan.bias(*part)
    assert sum(bias.nbytes for bias in plan._biases.values()) == kept_bytes(B, T) > 0
    assert kept_bytes(1, 2**15) == 0


def test_a_long_document_needs_biases_on_its_diagonal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    view = View.packed(torch.zeros(1, 64, dtype=torch.int64))
    plan = Plan(view.sight, 8, 16)
    assert sum(plan.bias(*part).numel() > 1 for part in plan.parts()) == len(plan.tiles) == 8
    assert plan.bias(*list(plan.parts())[-1]) is plan.bias(*list(plan.parts())[-1])  # few enough to be kept
    monkeypatch.setattr(tiles, "KEPT", 2 * 8 * sum((8, 16) * 4) - 1)
    plan = Plan(view.sight, 8, 16)
    assert plan.bias(*list(plan.parts())[-1]) is not plan.bias(*list(plan.parts())[-1]) and not plan._biases
