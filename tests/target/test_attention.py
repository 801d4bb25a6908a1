"""Masks, states and attention of a target's layers: the family's own, by pieces too, and the model shows none of it."""

import contextlib
import copy
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

import specdec.target.attention as attention
from specdec.nn import cache as nn_cache
from specdec.nn.cache import FEW_QUERIES
from specdec.nn.view import View
from specdec.target import Target
from specdec.target.attention import Tape, layer_masks, use_own_attention
from specdec.target.identity import model_fingerprint
from specdec.target.model_parts import OURS, OURS_EAGER, model_parts
from tests.no_pairs import NoPairs
from tests.target.zoo import FAMILIES, LAYERS, SINGLE, SIZES, assert_close, make, own_logits, tokens

WITH_SDPA = [family for family in FAMILIES if family not in ("gemma2", "gpt_oss")]


def implementation(model: PreTrainedModel) -> str:
    return str(model.config._attn_implementation)


def count_few(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many queries each call of the plain products has."""
    seen: list[int] = []
    original = attention.attend_few

    def spy(*args: torch.Tensor, **kwargs: object) -> torch.Tensor:
        seen.append(args[0].shape[2])
        return original(*args, **kwargs)

    monkeypatch.setattr(attention, "attend_few", spy)
    return seen


@pytest.mark.parametrize("length", [1, 7, FEW_QUERIES, FEW_QUERIES + 1])
@pytest.mark.parametrize("family", WITH_SDPA)
def test_few_and_many_queries_have_the_numbers_of_sdpa(
    family: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last tokens of two texts after their prefix, against the whole texts with sdpa, and that with eager."""
    plain, target = make(family), Target(make(family))
    assert implementation(plain) == "sdpa" and implementation(target.model) == OURS
    ids_BT, prefix = torch.cat([tokens(length + 9, seed) for seed in (1, 2)]), 9
    own_BTV = own_logits(plain, ids_BT)
    cache = target.new_cache(length + prefix, 2)
    target(ids_BT[:, :prefix], View.chain(torch.tensor([0, 0]), prefix, cache.capacity, cache), ())
    seen = count_few(monkeypatch)
    view = View.chain(torch.tensor([prefix, prefix]), length, cache.capacity, cache)
    assert_close(target.logits(target(ids_BT[:, prefix:], view, ()).final_BTH), own_BTV[:, prefix:])
    assert set(seen) == ({length} if length <= FEW_QUERIES else set())
    plain.set_attn_implementation("eager")
    assert_close(own_logits(plain, ids_BT), own_BTV)


@pytest.mark.parametrize("family", WITH_SDPA)
def test_the_models_own_forward_is_that_of_sdpa_to_the_last_bit(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It brings masks of its own, or none."""
    plain, model = make(family), make(family)
    use_own_attention(model)
    seen = count_few(monkeypatch)
    for length in (1, 9):
        assert torch.equal(own_logits(model, tokens(length)), own_logits(plain, tokens(length)))
    ids_BT = torch.cat([tokens(9), tokens(9, 2)])
    padding_BT = torch.tensor([[0] * 3 + [1] * 6, [1] * 9])
    with torch.no_grad():
        ours, own = (
            x(input_ids=ids_BT, attention_mask=padding_BT, use_cache=False).logits
            for x in (model, plain)
        )
    assert torch.equal(ours, own) and not seen


@pytest.mark.parametrize("family", ["llama", "gemma3_wrapper"])
def test_who_the_target_is_does_not_change(family: str) -> None:
    model = make(family)
    wanted = model_fingerprint(model.config.to_dict(), model.state_dict())
    before = copy.deepcopy(model.config.to_dict())
    target = Target(model)
    assert implementation(model) == OURS and model.config.to_dict() == before
    assert target.identity["fingerprint"] == wanted
    # wrapped again
    assert Target(model).identity == target.identity and implementation(model) == OURS


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_model_with_eager_attention_keeps_its_numbers(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(family)
    model.set_attn_implementation("eager")
    own_1TV = own_logits(model, tokens(12))
    seen = count_few(monkeypatch)
    target = Target(model)
    view = View.packed(torch.zeros(1, 12, dtype=torch.int64))
    assert_close(target.logits(target(tokens(12), view, ()).final_BTH), own_1TV)
    assert implementation(model) == OURS_EAGER and not seen
    assert torch.equal(own_logits(model, tokens(12)), own_1TV)


def test_an_eager_attention_that_asks_for_its_name_is_left_alone() -> None:
    model = make("gpt2")
    model.set_attn_implementation("eager")
    model.config.reorder_and_upcast_attn = True
    assert implementation(Target(model).model) == "eager"


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_saved_model_loads_anywhere(family: str, tmp_path: Path) -> None:
    """What is written names no attention of ours."""
    model = Target(make(family)).model
    model.save_pretrained(tmp_path)
    assert OURS not in (tmp_path / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert implementation(again) == "sdpa"
    assert_close(own_logits(again, tokens(9)), own_logits(model, tokens(9)))
    assert Target(again).identity["fingerprint"] == Target(model).identity["fingerprint"]


def test_windows_measure_positions_not_slots() -> None:
    # prefix of 2; a root and two siblings of depth 1: slots 3 and 4 both stand at position 3
    seen_QQ = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    view = View.append(2, seen_QQ, torch.tensor([0, 1, 1]), 6)
    full, narrow, same = layer_masks(view, 5, (None, 2, None), torch.float64)
    assert full is same and full is not None and narrow is not None
    assert torch.equal(full[0, 0] == 0, view.visibility.mask_B1TS[0, 0, :, :5])
    assert (narrow[0, 0] == 0).int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 0, 1]]
    assert full.isfinite().all() and full.min() < -1e300


def test_a_single_node_that_sees_all_needs_no_mask() -> None:
    full, narrow = layer_masks(View.chain(4, 1, 8), 5, (None, 2), torch.float32)
    assert full is None
    assert narrow is not None and (narrow[0, 0] == 0).int().tolist() == [[0, 0, 0, 1, 1]]


@pytest.mark.parametrize("fails", [False, True])
def test_between_forwards_the_hooks_do_nothing(fails: bool) -> None:
    """The model's own forward is what it was, masks of its own and all; also if the last one broke off."""
    model, ids_1T = make("mistral"), tokens(12)
    own_1TV = own_logits(model, ids_1T)
    tape = Tape(model_parts(model))
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
    tape = Tape(model_parts(model))
    with torch.no_grad():
        own = model(input_ids=ids_1T, output_hidden_states=True)
    for asked in ((), (2,), (LAYERS, 0), range(LAYERS + 1)):
        with tape.running(
            layer_masks(View.chain(0, 9, 9), 9, (None,) * LAYERS, torch.float64), asked
        ) as states:
            last = own_logits(model, ids_1T)
        torch.testing.assert_close(last, own.logits, rtol=0, atol=1e-12)
        assert set(states) == set(asked)
        for boundary, state in states.items():
            got = model.model.norm(state) if boundary == LAYERS else state
            torch.testing.assert_close(got, own.hidden_states[boundary], rtol=0, atol=1e-12)


def test_several_tapes_of_a_model_leave_each_other_alone() -> None:
    model, ids_1T = make("llama"), tokens(6)
    tapes = [Tape(model_parts(model)) for _ in range(2)]
    masks = layer_masks(View.chain(0, 6, 6), 6, (None,) * LAYERS, torch.float64)
    for tape, other in (tapes, tapes[::-1]):
        with tape.running(masks, {0, LAYERS}) as states:
            own_logits(model, ids_1T)
        assert set(states) == {0, LAYERS} and not other._states


@pytest.mark.parametrize("by_place", [True, False])
def test_a_mask_reaches_the_layer_however_the_family_passes_it(by_place: bool) -> None:
    class Layer(torch.nn.Module):
        def forward(
            self,
            hidden_states: torch.Tensor,
            other: int,
            attention_mask: torch.Tensor | None = None,
        ) -> object:
            return attention_mask

    anatomy = model_parts(make("llama"))._replace(
        layers=torch.nn.ModuleList([Layer()]), mask_argument=2
    )
    state, given, own = torch.ones(1), torch.zeros(2), torch.zeros(3)
    tape = Tape(anatomy)

    def run() -> object:
        return (
            anatomy.layers[0](state, 5, own)
            if by_place
            else anatomy.layers[0](state, 5, attention_mask=own)
        )

    with tape.running([given], {0}) as states:
        assert run() is given and states[0] is state
    assert run() is own
    with tape.running([None], ()) as states:
        assert run() is None and not states


ROW = [0] * 17 + [1] * 3 + [2] * 2 + [3] * 12 + [-1] * 6


@pytest.fixture
def all_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FEW_QUERIES", "MAX_MASK_PAIRS"):
        monkeypatch.setattr(nn_cache, name, 0)
    monkeypatch.setattr(nn_cache, "PIECE_NODES", 5)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_says_the_same_in_pieces(
    family: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Packed rows, documents and padding; a prompt in a cache, and more of it after that."""
    target, T = Target(make(family)), len(ROW)
    ids_2T = torch.cat([tokens(T, 1), tokens(T, 2)])
    documents_2T = torch.tensor([ROW, [0] * T])
    cut = 30

    def states() -> list[torch.Tensor]:
        packed = target(ids_2T, View.packed(documents_2T), range(LAYERS + 1))
        cache = target.new_cache(T + 4)
        first = target(ids_2T[:1, :cut], View.chain(0, cut, T + 4, cache), [2])
        second = target(ids_2T[:1, cut:], View.chain(cut, T - cut, T + 4, cache), [2])
        return [x for out in (packed, first, second) for x in out]

    masked = states()
    request.getfixturevalue("all_is_long")
    calls, attend = [], nn_cache.attend_pieces
    monkeypatch.setattr(
        "specdec.target.attention.attend_pieces", lambda *args: calls.append(1) or attend(*args)
    )
    # whose softmax is float32
    narrow = family in SINGLE or target.config._attn_implementation == OURS_EAGER
    tolerance = 2e-5 if narrow else 1e-10
    for ours, own in zip(states(), masked, strict=True):
        scale = float(own.abs().max())
        torch.testing.assert_close(ours, own, rtol=0, atol=tolerance * scale)
    assert len(calls) == 3 * LAYERS


def small(sliding: int | None) -> PreTrainedModel:
    sizes = {**SIZES, "num_hidden_layers": 1, "max_position_embeddings": 8192}
    if sliding is None:
        return LlamaForCausalLM(LlamaConfig(**sizes))
    return MistralForCausalLM(MistralConfig(**sizes, sliding_window=sliding))


@pytest.mark.parametrize("sliding", [None, 700])
def test_no_tensor_of_all_pairs_is_made(sliding: int | None) -> None:
    torch.manual_seed(0)
    target, T = Target(small(sliding)), 6000
    ids_1T, documents_1T = (
        tokens(T),
        torch.tensor([[0] * 4000 + [1] * 1500 + [2] * 300 + [-1] * 200]),
    )
    with NoPairs(T):
        packed = target(ids_1T, View.packed(documents_1T), [1])
        cache = target.new_cache(T)
        target(ids_1T, View.chain(0, T, T, cache), ())
    alone = target(ids_1T[:, 4000:5500], View.packed(torch.zeros(1, 1500, dtype=torch.int64)), [1])
    torch.testing.assert_close(packed.aux_BTNH[:, 4000:5500], alone.aux_BTNH, rtol=1e-4, atol=1e-5)


def test_verification_copies_no_keys_elsewhere_than_on_a_cpu_either() -> None:
    """For all 16 heads, as kernels that take a mask have them first, they would be 4 million numbers."""
    sizes = {
        **SIZES,
        "num_hidden_layers": 1,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "head_dim": 64,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes | {"num_key_value_heads": 2})).to("meta")
    use_own_attention(model)
    q, k, v = (
        torch.empty(1, heads, n, 64, device="meta") for heads, n in ((16, 5), (2, 4096), (2, 4096))
    )
    with NoPairs(2048):
        mask_11TS = torch.zeros(1, 1, 5, 4096, device="meta")
        out, _ = attention._attention(model.model.layers[0].self_attn, q, k, v, mask_11TS)
    assert out.shape == (1, 5, 16, 64)


def test_the_guard_sees_masks() -> None:
    with pytest.raises(AssertionError, match="elements"), NoPairs(2000):
        Target(small(None))(tokens(2000), View.packed(torch.zeros(1, 2000, dtype=torch.int64)), ())
