"""The attention of sdpa targets gives the numbers of sdpa, and the model does not show it."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import specdec.target.attention as attention
from specdec.nn.few_queries import MOST
from specdec.nn.view import View
from specdec.target import Target
from specdec.target.attention import EAGER, NAME, use_own_attention
from specdec.target.fingerprint import fingerprint
from tests.target.zoo import FAMILIES, assert_close, make, own_logits, tokens

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


@pytest.mark.parametrize("length", [1, 7, MOST, MOST + 1])
@pytest.mark.parametrize("family", WITH_SDPA)
def test_few_and_many_queries_have_the_numbers_of_sdpa(
    family: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last tokens of two texts after their prefix, against the whole texts with sdpa, and that with eager."""
    plain, target = make(family), Target(make(family))
    assert implementation(plain) == "sdpa" and implementation(target.model) == NAME
    ids_BT, prefix = torch.cat([tokens(length + 9, seed) for seed in (1, 2)]), 9
    own_BTV = own_logits(plain, ids_BT)
    cache = target.new_cache(length + prefix, 2)
    target(ids_BT[:, :prefix], View.chain(torch.tensor([0, 0]), prefix, cache.capacity, cache), ())
    seen = count_few(monkeypatch)
    view = View.chain(torch.tensor([prefix, prefix]), length, cache.capacity, cache)
    assert_close(target.logits(target(ids_BT[:, prefix:], view, ()).final_BTH), own_BTV[:, prefix:])
    assert set(seen) == ({length} if length <= MOST else set())
    plain.set_attn_implementation("eager")
    assert_close(own_logits(plain, ids_BT), own_BTV)


@pytest.mark.parametrize("family", WITH_SDPA)
def test_the_models_own_forward_is_that_of_sdpa_to_the_last_bit(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It brings masks of its own, or none."""
    plain, model = make(family), make(family)
    use_own_attention(model)
    seen = count_few(monkeypatch)
    for length in (1, 9):
        assert torch.equal(own_logits(model, tokens(length)), own_logits(plain, tokens(length)))
    ids_BT = torch.cat([tokens(9), tokens(9, 2)])
    padding_BT = torch.tensor([[0] * 3 + [1] * 6, [1] * 9])
    with torch.no_grad():
        ours, own = (x(input_ids=ids_BT, attention_mask=padding_BT, use_cache=False).logits for x in (model, plain))
    assert torch.equal(ours, own) and not seen


def test_gradients_go_through_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    use_own_attention(model)
    seen = count_few(monkeypatch)
    mask_11TT = torch.full((5, 5), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    model(input_ids=tokens(5), attention_mask=mask_11TT, use_cache=False).logits.sum().backward()
    assert not seen and model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("family", ["llama", "gemma3_wrapper"])
def test_who_the_target_is_does_not_change(family: str) -> None:
    model = make(family)
    wanted = fingerprint(model.config.to_dict(), model.state_dict())
    before = copy.deepcopy(model.config.to_dict())
    target = Target(model)
    assert implementation(model) == NAME and model.config.to_dict() == before
    assert target.identity["fingerprint"] == wanted
    assert Target(model).identity == target.identity and implementation(model) == NAME  # wrapped again


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_model_with_eager_attention_keeps_its_numbers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(family)
    model.set_attn_implementation("eager")
    own_1TV = own_logits(model, tokens(12))
    seen = count_few(monkeypatch)
    target = Target(model)
    view = View.packed(torch.zeros(1, 12, dtype=torch.int64))
    assert_close(target.logits(target(tokens(12), view, ()).final_BTH), own_1TV)
    assert implementation(model) == EAGER and not seen
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
    assert NAME not in (tmp_path / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert implementation(again) == "sdpa"
    assert_close(own_logits(again, tokens(9)), own_logits(model, tokens(9)))
    assert Target(again).identity["fingerprint"] == Target(model).identity["fingerprint"]
