"""Masks per layer, and hooks that leave again."""

import pytest
import torch

from specdec.nn.view import View
from specdec.target.anatomy import dissect
from specdec.target.capture import capture, layer_masks
from tests.target.zoo import LAYERS, make


def test_windows_measure_positions_not_slots() -> None:
    # prefix of 2; a root and two siblings of depth 1: slots 3 and 4 both stand at position 3
    seen_QQ = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    view = View.append(2, seen_QQ, torch.tensor([0, 1, 1]), 6)
    full, narrow, same = layer_masks(view, 5, (None, 2, None), torch.float64)
    assert full is same and full is not None and narrow is not None
    assert torch.equal(full[0, 0] == 0, view.mask_B1TS[0, 0, :, :5])
    assert (narrow[0, 0] == 0).int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 0, 1]]
    assert full.isfinite().all() and full.min() < -1e300


def test_a_window_wider_than_the_keys_costs_nothing() -> None:
    view = View.chain(2, 3, 8)
    wide, full = layer_masks(view, 5, (5 + 1, None), torch.float32)
    assert wide is full


def test_a_single_node_that_sees_all_needs_no_mask() -> None:
    full, narrow = layer_masks(View.chain(4, 1, 8), 5, (None, 2), torch.float32)
    assert full is None
    assert narrow is not None and (narrow[0, 0] == 0).int().tolist() == [[0, 0, 0, 1, 1]]


def test_hooks_leave_even_when_the_block_fails() -> None:
    model = make("llama")

    def count() -> int:
        return sum(len(m._forward_pre_hooks) for m in model.modules())

    def fail() -> None:
        with capture(dissect(model), [None] * LAYERS, {0, LAYERS}):
            raise KeyError(count())

    with pytest.raises(KeyError, match=str(LAYERS + 1)):
        fail()
    assert count() == 0


@pytest.mark.parametrize("by_place", [True, False])
def test_a_mask_reaches_the_layer_however_the_family_passes_it(by_place: bool) -> None:
    class Layer(torch.nn.Module):
        def forward(
            self, hidden_states: torch.Tensor, other: int, attention_mask: torch.Tensor | None = None
        ) -> object:
            return attention_mask

    anatomy = dissect(make("llama"))._replace(layers=torch.nn.ModuleList([Layer()]), mask_argument=2)
    state, given, own = torch.ones(1), torch.zeros(2), torch.zeros(3)
    with capture(anatomy, [given], {0}) as states:
        seen = anatomy.layers[0](state, 5, own) if by_place else anatomy.layers[0](state, 5, attention_mask=own)
    assert seen is given and states[0] is state
