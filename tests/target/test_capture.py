"""Masks per layer, and hooks that do nothing between forwards."""

import contextlib
import copy

import pytest
import torch
from transformers import PreTrainedModel

from specdec.nn.view import View
from specdec.target.anatomy import dissect
from specdec.target.capture import Tape, layer_masks
from tests.target.zoo import LAYERS, make, own_logits, tokens


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


def test_a_batch_has_a_mask_for_each_sequence() -> None:
    """Also for single nodes that see all there is: another sequence may be longer."""
    view = View.chain(torch.tensor([4, 2]), 1, 8)
    full, narrow = layer_masks(view, 5, (None, 2), torch.float32)
    assert full is not None and (full[:, 0, 0] == 0).int().tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert narrow is not None and (narrow[:, 0, 0] == 0).int().tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 0, 0]]


@pytest.mark.parametrize("fails", [False, True])
def test_between_forwards_the_hooks_do_nothing(fails: bool) -> None:
    """The model's own forward is what it was, masks of its own and all; also if the last one broke off."""
    model, ids_1T = make("mistral"), tokens(12)
    own_1TV = own_logits(model, ids_1T)
    tape = Tape(dissect(model))
    assert torch.equal(own_logits(model, ids_1T), own_1TV)
    blind = torch.eye(12, dtype=torch.float64).log()[None, None]  # nobody sees but itself
    with contextlib.suppress(KeyError), tape.running([blind] * LAYERS, {0, LAYERS}) as states:
        assert not torch.allclose(own_logits(model, ids_1T), own_1TV)
        assert set(states) == {0, LAYERS}
        if fails:
            raise KeyError
    assert torch.equal(own_logits(model, ids_1T), own_1TV)
    assert set(states) == {0, LAYERS}  # what was kept is the caller's, and nothing came after
    assert not any((tape._masks, tape._boundaries, tape._states))


def test_only_the_states_asked_for_are_kept() -> None:
    model, ids_1T = make("llama"), tokens(9)
    tape = Tape(dissect(model))
    with torch.no_grad():
        own = model(input_ids=ids_1T, output_hidden_states=True)
    for asked in ((), (2,), (LAYERS, 0), range(LAYERS + 1)):
        with tape.running(layer_masks(View.chain(0, 9, 9), 9, (None,) * LAYERS, torch.float64), asked) as states:
            last = own_logits(model, ids_1T)
        torch.testing.assert_close(last, own.logits, rtol=0, atol=1e-12)
        assert set(states) == set(asked)
        for boundary, state in states.items():
            got = model.model.norm(state) if boundary == LAYERS else state
            torch.testing.assert_close(got, own.hidden_states[boundary], rtol=0, atol=1e-12)


def test_a_model_has_one_tape_until_its_layers_change() -> None:
    model, ids_1T = make("llama"), tokens(6)
    tape = Tape.of(dissect(model))
    assert Tape.of(dissect(model)) is tape and Tape.of(dissect(make("llama"))) is not tape
    masks = layer_masks(View.chain(0, 6, 6), 6, (None,) * LAYERS, torch.float64)
    for changed in (copy.deepcopy, _without_its_first_layer):
        other = changed(model)
        fresh = Tape.of(dissect(other))
        assert fresh is not tape and Tape.of(dissect(other)) is fresh
        last = len(other.model.layers)
        with fresh.running(masks[:last], {0, last}) as states:
            own_logits(other, ids_1T)
        assert set(states) == {0, last} and not tape._states


def _without_its_first_layer(model: PreTrainedModel) -> PreTrainedModel:
    model.model.layers = model.model.layers[1:]
    model.config.num_hidden_layers -= 1
    return model


@pytest.mark.parametrize("by_place", [True, False])
def test_a_mask_reaches_the_layer_however_the_family_passes_it(by_place: bool) -> None:
    class Layer(torch.nn.Module):
        def forward(
            self, hidden_states: torch.Tensor, other: int, attention_mask: torch.Tensor | None = None
        ) -> object:
            return attention_mask

    anatomy = dissect(make("llama"))._replace(layers=torch.nn.ModuleList([Layer()]), mask_argument=2)
    state, given, own = torch.ones(1), torch.zeros(2), torch.zeros(3)
    tape = Tape(anatomy)

    def run() -> object:
        return anatomy.layers[0](state, 5, own) if by_place else anatomy.layers[0](state, 5, attention_mask=own)

    with tape.running([given], {0}) as states:
        assert run() is given and states[0] is state
    assert run() is own
    with tape.running([None], ()) as states:
        assert run() is None and not states
