"""Features, logits and verification against the model's own forward, over the families."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from specdec.nn.view import View
from specdec.target import Target, TargetCache
from specdec.target.identity import IDENTIFYING
from tests.target.zoo import FAMILIES, LAYERS, VOCAB, WIDTH, assert_close, make, own_logits, tokens

families = pytest.mark.parametrize("family", FAMILIES)


def packed(length: int) -> View:
    return View.packed(torch.zeros(1, length, dtype=torch.int64))


@families
def test_taps_are_hugging_faces_hidden_states(family: str) -> None:
    model, ids_1T = make(family), tokens(14)
    target = Target(model)
    with torch.no_grad():
        own = model(input_ids=ids_1T, output_hidden_states=True)
    asked = [3, 0, LAYERS, 1]
    aux_1TNH, final_1TH = target(ids_1T, packed(14), asked)
    assert aux_1TNH.shape == (1, 14, 4, WIDTH)
    for n, boundary in enumerate(asked):
        if boundary < LAYERS:
            assert_close(aux_1TNH[:, :, n], own.hidden_states[boundary])
    assert_close(target.final_norm(aux_1TNH[:, :, 2]), own.hidden_states[-1])
    # before the norm, not after
    assert not torch.allclose(aux_1TNH[:, :, 2], own.hidden_states[-1], rtol=0.05)
    assert_close(final_1TH, own.hidden_states[-1])
    normed = target(ids_1T, packed(14), [LAYERS, 2], final_norm=True).aux_BTNH
    assert_close(normed[:, :, 0], final_1TH)
    assert_close(normed[:, :, 1], own.hidden_states[2])


@families
def test_logits_and_some_of_their_rows(family: str) -> None:
    model, ids_1T = make(family), tokens(10)
    target = Target(model)
    final_1TH = target(ids_1T, packed(10), ()).final_BTH
    own_1TV = own_logits(model, ids_1T)
    assert_close(target.logits(final_1TH), own_1TV)
    rows_D = torch.tensor([0, 5, 4, VOCAB - 1])
    assert_close(target.logits(final_1TH, rows_D), own_1TV[..., rows_D])
    assert target.vocab_size == VOCAB and target.head_weight().shape == (VOCAB, WIDTH)


@families
def test_packed_documents_are_as_alone(family: str) -> None:
    model = make(family)
    first, second, third = tokens(9, 1), tokens(7, 2), tokens(16, 3)
    ids_BT = torch.cat([torch.cat([first, second], dim=1), third])
    # the second row ends in padding
    documents_BT = torch.tensor([[0] * 9 + [1] * 7, [0] * 12 + [-1] * 4])
    target = Target(model)
    logits_BTV = target.logits(target(ids_BT, View.packed(documents_BT), ()).final_BTH)
    assert_close(logits_BTV[:1, :9], own_logits(model, first))
    assert_close(logits_BTV[:1, 9:], own_logits(model, second))
    assert_close(logits_BTV[1:, :12], own_logits(model, third[:, :12]))
    assert logits_BTV.isfinite().all()


def ancestors(parents: list[int]) -> Tensor:
    seen_QQ = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        seen_QQ[node] |= seen_QQ[parent]
    return seen_QQ


def verify_and_commit(target: Target, parents: list[int], prefix: int, seed: int) -> None:
    """A tree after a prefix, against every path on its own; then commit the deepest path and go on."""
    ids_1P, nodes_Q, rest_1R = (
        tokens(prefix, seed),
        tokens(len(parents), seed + 1)[0],
        tokens(6, seed + 2),
    )
    cache = target.new_cache(prefix + len(parents) + 8)

    def run(ids_1T: Tensor, view: View) -> Tensor:
        return target.logits(target(ids_1T, view, ()).final_BTH)

    split = prefix // 2  # a prompt in two pieces
    chain = View.chain(0, split, cache.capacity, cache)
    assert_close(run(ids_1P[:, :split], chain), own_logits(target.model, ids_1P[:, :split]))
    run(ids_1P[:, split:], View.chain(split, prefix - split, cache.capacity, cache))
    seen_QQ = ancestors(parents)
    depth_Q = seen_QQ.sum(-1) - 1
    logits_1QV = run(nodes_Q[None], View.append(prefix, seen_QQ, depth_Q, cache.capacity, cache))
    for leaf in set(range(len(parents))) - set(parents[1:]):
        path_P = seen_QQ[leaf].nonzero()[:, 0]
        own_1TV = own_logits(target.model, torch.cat([ids_1P, nodes_Q[None, path_P]], dim=1))
        assert_close(logits_1QV[:, path_P], own_1TV[:, prefix:])
    path_P = seen_QQ[int(depth_Q.argmax())].nonzero()[:, 0]
    cache.commit(torch.tensor([prefix]), path_P[None])
    text_1T = torch.cat([ids_1P, nodes_Q[None, path_P], rest_1R], dim=1)
    committed = prefix + len(path_P)
    own_1TV = own_logits(target.model, text_1T)
    one = View.chain(torch.tensor(committed), 1, cache.capacity, cache)
    assert_close(run(rest_1R[:, :1], one), own_1TV[:, committed : committed + 1])
    more = View.chain(committed + 1, 5, cache.capacity, cache)
    assert_close(run(rest_1R[:, 1:], more), own_1TV[:, committed + 1 :])


@families
def test_tree_verification_and_commit(family: str) -> None:
    verify_and_commit(Target(make(family)), [0, 0, 0, 1, 2, 2, 4, 4, 6], prefix=8, seed=5)


@families
def test_sequences_of_a_batch_are_as_alone(family: str) -> None:
    """Prompts of different lengths, trees and paths of their own, and the tokens after each path."""
    target = Target(make(family))
    parents, prefixes = ([0, 0, 0, 1, 2, 4], [0, 0, 1, 2, 0, 3], [0, 0, 1, 1, 1, 0]), (9, 2, 6)
    prompts, nodes_BQ = (
        [tokens(n, n) for n in prefixes],
        torch.cat([tokens(6, seed) for seed in (21, 22, 23)]),
    )
    rest_BR = torch.cat([tokens(3, seed) for seed in (31, 32, 33)])
    cache = target.new_cache(max(prefixes) + 6 + 3, 3)
    for b, ids_1P in enumerate(prompts):
        with cache.begin(b) as text:
            target(ids_1P, View.chain(0, ids_1P.shape[1], cache.capacity, text), ())
    seen_BQQ = torch.stack([ancestors(own) for own in parents])
    depth_BQ, length_B = seen_BQQ.sum(-1) - 1, torch.tensor(prefixes)
    view = View.append(length_B, seen_BQQ, depth_BQ, cache.capacity, cache)
    aux_BQNH, final_BQH = target(nodes_BQ, view, [0, 2])
    assert aux_BQNH.shape == (3, 6, 2, WIDTH)
    paths = [seen_BQQ[b, int(depth_BQ[b].argmax())].nonzero()[:, 0] for b in range(3)]
    most = max(map(len, paths))
    own_texts = [
        torch.cat([prompts[b], nodes_BQ[b : b + 1, paths[b]], rest_BR[b : b + 1]], dim=1)
        for b in range(3)
    ]
    for b, path_P in enumerate(paths):
        own_1TV = own_logits(target.model, own_texts[b])[:, prefixes[b] : prefixes[b] + len(path_P)]
        assert_close(target.logits(final_BQH[b : b + 1, path_P]), own_1TV)
    filled = [torch.cat([path_P, torch.arange(len(path_P), most)]) for path_P in paths]
    cache.commit(length_B, torch.stack(filled))
    length_B = length_B + torch.tensor([len(path_P) for path_P in paths])
    logits_B3V = target.logits(
        target(rest_BR, View.chain(length_B, 3, cache.capacity, cache), ()).final_BTH
    )
    for b, text_1T in enumerate(own_texts):
        assert_close(logits_B3V[b : b + 1], own_logits(target.model, text_1T)[:, -3:])


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    return [0] + [draw(st.integers(0, node - 1)) for node in range(1, draw(st.integers(1, 12)))]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_any_tree(family: str) -> None:
    target = Target(make(family))

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(parents=trees(), prefix=st.integers(2, 12), seed=st.integers(0, 99))
    def check(parents: list[int], prefix: int, seed: int) -> None:
        verify_and_commit(target, parents, prefix, seed)

    check()


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_all_columns_stay_where_slots_cannot_be_read_for_free(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = TargetCache.place

    def place_on_an_accelerator(self: TargetCache, view: View) -> int:
        place(self, view)
        self._columns = self.capacity
        return self.capacity

    monkeypatch.setattr(TargetCache, "place", place_on_an_accelerator)
    verify_and_commit(Target(make(family)), [0, 0, 0, 1, 2, 2, 4], prefix=7, seed=3)


def test_wrong_boundaries_are_refused() -> None:
    target = Target(make("llama"))
    for wrong in (-1, LAYERS + 1):
        with pytest.raises(
            ValueError,
            match=rf"no layer boundary {wrong}: this target has {LAYERS} layers, so 0 .* to {LAYERS}",
        ):
            target(tokens(4), packed(4), [1, wrong])


def test_it_is_frozen_and_in_evaluation_mode() -> None:
    model = make("llama").train().requires_grad_(True)
    target = Target(model)
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    with torch.enable_grad():
        aux_BTNH, final_BTH = target(tokens(4), packed(4), [1, 2])
        assert not aux_BTNH.requires_grad and not target.logits(final_BTH).requires_grad
        weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        (aux_BTNH * weight).sum().backward()  # usable in a graph: no inference tensors
    assert weight.grad is not None


def test_the_wrapped_model_is_left_as_it_was() -> None:
    model, ids_1T = make("mistral"), tokens(12)
    own_1TV = own_logits(model, ids_1T)
    Target(model)
    target = Target(model)  # once more, as with another tokenizer
    broken = View.packed(torch.zeros(1, 12, dtype=torch.int64))._replace(
        positions_BT=torch.zeros(1, 3, dtype=torch.int64)
    )
    with pytest.raises(RuntimeError):
        target(ids_1T, broken, [1, LAYERS])
    target.logits(target(ids_1T, packed(12), [0, LAYERS]).final_BTH, torch.tensor([3]))
    assert sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()) == 2 * (
        LAYERS + 1
    )  # at rest
    assert not any("forward" in vars(m) for m in model.modules())
    assert torch.equal(own_logits(model, ids_1T), own_1TV)
    pickle.dumps(target)  # to worker processes


def test_autocast_does_not_reach_it() -> None:
    target, ids_1T = Target(make("llama").float()), tokens(8)
    plain = target(ids_1T, packed(8), [2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = target(ids_1T, packed(8), [2])
        logits = target.logits(under.final_BTH)
    assert torch.equal(under.aux_BTNH, plain.aux_BTNH) and torch.equal(
        logits, target.logits(plain.final_BTH)
    )


def test_ends_of_text_come_from_every_config() -> None:
    model = make("llama")
    model.config.eos_token_id = 2
    model.generation_config.eos_token_id = [7, 9]
    assert Target(model).eos_token_ids == {2, 7, 9}
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    assert Target(model).eos_token_ids == frozenset()


def test_a_missing_tokenizer_says_so() -> None:
    with pytest.raises(ValueError, match="has no tokenizer"):
        _ = Target(make("llama")).tokenizer


def test_identity_names_the_target() -> None:
    identity = Target(make("qwen3"), source="here", revision="abc").identity
    fingerprint = identity["fingerprint"]
    compared = {name: identity.pop(name) for name in IDENTIFYING}
    assert compared["dtype"] == "float64" and compared["tokenizer"] is None
    assert identity == {
        "source": "here",
        "revision": "abc",
        "model_type": "qwen3",
        "hidden_size": WIDTH,
        "vocab_size": VOCAB,
        "num_layers": LAYERS,
    }
    assert fingerprint == Target(make("qwen3")).identity["fingerprint"]
    assert fingerprint != Target(make("qwen3", seed=1)).identity["fingerprint"]


def test_length_dependent_rotary_frequencies_bound_the_cache() -> None:
    model = make("llama")
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    target = Target(model)
    with pytest.raises(ValueError, match="129 slots or tokens are more than 128"):
        target(tokens(2), View.chain(0, 2, 129, target.new_cache(129)), ())
    with pytest.raises(ValueError, match="more than 128"):
        target(tokens(130), packed(130), ())
