"""What is measured of drafters whose answers are known, and of others beside what forwards without a cache give."""

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

from specdec.diagnostics import drift_measure
from specdec.diagnostics.anchors import AnchoredText, answered_texts
from specdec.diagnostics.drift_attention import Observed, attention_weights, observing
from specdec.diagnostics.drift_figures import drift_summary
from specdec.diagnostics.drift_measure import (
    FED_BACK,
    INPUTS,
    ROWS,
    SERIES,
    drafted,
    drift_document,
    read_inputs,
)
from specdec.drafter import Drafter
from specdec.nn.cache import StaticCache
from specdec.nn.layers import Attention
from specdec.nn.view import View
from specdec.target import Target
from tests.diagnostics.made import PROMPTS, SPECS, drafter, measure, places, target, texts
from tests.perfect import markov_target, perfect_drafter
from tests.target.zoo import FAMILIES, assert_close, make, tokens
from tests.tiny import BLOCKS, HIDDEN, VOCAB, tiny_drafter

PARTS = ("sink_mass", "prompt_mass", "recent_mass", "own_mass", "rest_mass")
PREFIX, NODES, CAPACITY = 20, 3, 26


def means(sums: Tensor) -> dict[str, list[float]]:
    """By name, at every depth; NaN where nothing counts."""
    return dict(zip(SERIES | ROWS, (sums[..., 0] / sums[..., 1]).tolist(), strict=True))


def from_one(anchor: int, of: Drafter, depths: int) -> Tensor:
    """The sums of one chain in the first text, side by side with another that does not count."""
    text = texts()[0]
    anchored = AnchoredText(target(), of, text.ids, depths, 2)
    return drafted(anchored, [anchor, anchor + 1], text.prompt, anchor + 1).sums_FK2


def test_a_drafter_that_copies_its_target_is_always_right() -> None:
    easy = markov_target(context=0)
    for name in ("eagle1", "eagle3", "eagle3_1"):
        perfect = perfect_drafter(easy, dataclasses.replace(SPECS[name], draft_vocab_size="all"))
        (text,) = answered_texts(easy, PROMPTS[:1], 20)
        found = means(measure(easy, perfect, text, 7))
        assert found["joint_acceptance"] == found["conditional_acceptance"] == [1.0] * 7
        assert max(map(abs, found["kl"])) < 1e-6


def plain_forward(model: Target, of: Drafter, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Without any cache: the drafter's features of the target's states, and the target's logits."""
    ids_1T = torch.tensor([ids])
    view, config = View.packed(torch.zeros_like(ids_1T)), of.config
    out = model.forward(ids_1T, view, config.aux_layers, config.fusion.final_norm)
    return of.fuse(out.aux_BTNH)[0], model.logits(out.final_BTH)[0]


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "eagle3_1"])
def test_states_are_those_of_the_chain_and_kl_is_along_the_text(name: str) -> None:
    """Worked out anew for one chain: without caches, the tokens read by the drafter's own unrolled steps."""
    one, text, depths = drafter(name), texts()[0], 3
    anchor = places(text, depths)[10]
    sums = from_one(anchor, one, depths)
    found, cosine = means(sums), torch.nn.functional.cosine_similarity
    feature, _ = plain_forward(target(), one, text.ids)
    true, logits = plain_forward(target(), one, text.ids)
    assert sums[0, 0, 1] == 1
    for given in (False, True):
        ids, features, state = text.ids[: anchor + 1], [feature[:anchor]], feature[anchor - 1]
        for k in range(depths):
            rows = torch.cat(features)[None]
            view = View.packed(torch.zeros(1, rows.shape[1], dtype=torch.int64))
            with observing_out(one) as outs:
                step = one.step(torch.tensor([ids[1:]]), rows, view)
            log_q, new = one.logits(step.normed_BTH)[0, -1].log_softmax(-1), step.h_BTH[0, -1]
            if given:
                log_p = logits[anchor + k][one.vocab.target_ids_D].log_softmax(-1)
                assert found["kl"][k] == pytest.approx(
                    float((log_p.exp() * (log_p - log_q)).sum()), rel=1e-9
                )
                wanted = float(cosine(new, true[anchor + k], dim=0))
                assert found["feature_cosine"][k] == pytest.approx(wanted, abs=1e-9)
            else:
                assert found["state_rms"][k] == pytest.approx(
                    float(new.square().mean().sqrt()), rel=1e-9
                )
                assert found["out_rms"][k] == pytest.approx(
                    float(outs[0][0, -1].square().mean().sqrt()), rel=1e-9
                )
                assert found["cosine"][k] == pytest.approx(
                    float(cosine(new, state, dim=0)), abs=1e-9
                )
                change = float((new - state).norm() / new.norm())
                assert found["update"][k] == pytest.approx(change, rel=1e-9)
            ids = [
                *ids,
                text.ids[anchor + 1 + k] if given else int(one.vocab.to_target(log_q.argmax())),
            ]
            features.append(new[None])
            state = new


@contextlib.contextmanager
def observing_out(one: Drafter) -> Iterator[list[Tensor]]:
    """What the last layer gives, before the output norm."""
    outs: list[Tensor] = []
    hook = one.layers.register_forward_hook(lambda module, args, output: outs.append(output))
    yield outs
    hook.remove()


def indifferent(name: str) -> Drafter:
    """Its queries are zero, so that all visible keys weigh the same."""
    out = copy.deepcopy(drafter(name))
    with torch.no_grad():
        for module in out.modules():
            if isinstance(module, Attention):
                module.qkv_proj.weight[: module.heads * module.head_dim] = 0
        if hasattr(out.entry, "token_qkv_proj"):
            out.entry.token_qkv_proj.weight[
                : out.config.num_attention_heads * out.config.head_dim
            ] = 0
    return out


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "two_layer", "sliding_window"])
def test_an_indifferent_drafter_spreads_its_attention_evenly(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drift_measure, "SINK", 2)
    monkeypatch.setattr(drift_measure, "RECENT", 3)
    text = texts()[0]
    anchor = places(text, 4)[10]
    assert anchor > 12 and text.prompt == 4
    found = means(from_one(anchor, indifferent(name), 4))
    for k in range(4):
        rows = anchor + k  # the text's up to the root's, and what was drafted
        hidden = max(0, rows - 16) if name == "sliding_window" else 0
        seen = rows - hidden
        assert found["sink_mass"][k] == pytest.approx(max(0, 2 - hidden) / seen)
        assert found["prompt_mass"][k] == pytest.approx(max(0, 2 - max(0, hidden - 2)) / seen)
        assert found["recent_mass"][k] == pytest.approx(3 / seen)
        # the anchor's row and what was drafted
        assert found["own_mass"][k] == pytest.approx((k + 1) / seen)
        assert found["drafted_mass"][k] == pytest.approx(k / seen)
        assert found["sink_own_mass"][k] == pytest.approx(
            found["sink_mass"][k] + found["own_mass"][k]
        )
        assert found["entropy"][k] == pytest.approx(math.log(seen))
        assert found["strongest_mass"][k] == pytest.approx(1 / seen)
        assert found["row_0"][k] == pytest.approx(0 if hidden else 1 / seen)


@pytest.mark.parametrize("row", [0, 3])
def test_a_sink_is_found_at_its_row_and_counts_once(
    row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All attention is put on one committed row, by weights planted behind the drafter's own."""
    monkeypatch.setattr(drift_measure, "observing", sink_planted_at(row))
    text = texts()[0]
    anchor = places(text, 4)[10]
    found = means(from_one(anchor, drafter("eagle3"), 4))
    assert found["strongest_mass"] == found[f"row_{row}"] == pytest.approx([1.0] * 4)
    assert found["sink_mass"] == pytest.approx([float(row == 0)] * 4)
    assert found[f"row_{row + 1}"] == pytest.approx([0.0] * 4)
    # a chain does not see the rows from its anchor's own on
    early = from_one(places(text, 4)[0], drafter("eagle3"), 4)[len(SERIES) :, 0, 1]
    assert early.tolist() == [float(n < places(text, 4)[0] - 1) for n in range(len(ROWS))]


def sink_planted_at(row: int) -> Callable[[Drafter], AbstractContextManager[Observed]]:
    """An observation of a drafter whose weights all lie on one row."""

    class Planted(dict[int, Tensor]):
        def __setitem__(self, layer: int, weights_BhTS: Tensor) -> None:
            planted = torch.zeros_like(weights_BhTS)
            planted[..., row] = 1
            super().__setitem__(layer, planted)

    @contextlib.contextmanager
    def observing_planted(one: Drafter) -> Iterator[Observed]:
        with observing(one) as seen:
            seen.weights_BhTS = Planted()
            yield seen

    return observing_planted


def test_shares_add_up_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift_measure, "RECENT", 2)
    found = means(measure(target(), drafter(), texts()[1], 7))
    for k in range(7):
        assert sum(found[part][k] for part in PARTS) == pytest.approx(1, abs=1e-12)


def test_a_block_feeds_nothing_back() -> None:
    """What is said of a state that is handed on has no value; everything else has, and makes a document."""
    sums_FK2 = measure(target(), tiny_drafter(SPECS["dflash"]), texts()[1], 7)
    assert {name for name, row in zip(SERIES, sums_FK2, strict=False) if not row.any()} == FED_BACK
    inputs = torch.ones(len(INPUTS), 3, 2, dtype=torch.float64)
    found = drift_document(["a", "b"], [sums_FK2] * 2, [inputs] * 2, (2, 3), 7, 7)
    assert found["series"]["cosine"]["mean"] == [None] * 7
    assert (
        drift_summary(found)["state_rms_growth"]["mean"] is None
        and drift_summary(found)["out_rms_growth"]["mean"] > 0
    )


def test_nothing_is_drawn_and_nothing_changes() -> None:
    before, weights = torch.get_rng_state(), [p.clone() for p in drafter().parameters()]
    one, two = (measure(target(), drafter(), texts()[0], 4) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, w) for p, w in zip(drafter().parameters(), weights, strict=True))
    assert torch.equal(one, two)


# whose steps are nodes of one call
@pytest.mark.parametrize("name", sorted(set(SPECS) - set(BLOCKS)))
def test_observed_weights_times_values_are_the_attentions_output(name: str) -> None:
    one = tiny_drafter(SPECS[name])
    config = one.config
    cache = StaticCache(
        config.num_layers, config.num_key_value_heads, CAPACITY, config.head_dim, torch.float64
    )
    generator = torch.Generator().manual_seed(0)
    aux = torch.randn(
        1, PREFIX, len(config.aux_layers), HIDDEN, generator=generator, dtype=torch.float64
    )
    ids = torch.randint(0, VOCAB, (1, PREFIX), generator=generator)
    one.step(ids, one.fuse(aux), View.chain(0, PREFIX, CAPACITY, cache))
    heads: dict[int, Tensor] = {}  # what every attention hands to its output matrix
    for module in one.modules():
        if hasattr(module, "o_proj"):
            # transformers' name for it
            layer = module.layer if isinstance(module, Attention) else module.layer_idx
            keep = lambda _, args, layer=layer: heads.update({layer: args[0]})  # noqa: E731
            module.o_proj.register_forward_pre_hook(keep)
    tree = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 1]], dtype=torch.bool)[None]
    view = View.append(PREFIX, tree, torch.tensor([[0, 0, 1]]), CAPACITY, cache)
    feature = one.fuse(aux[:, :NODES])
    plain = one.step(ids[:, :NODES], feature, view)
    with observing(one) as seen:
        step = one.step(ids[:, :NODES], feature, view)
    assert all(torch.equal(x, y) for x, y in zip(plain, step, strict=True))
    assert sorted(seen.weights_BhTS) == list(range(config.num_layers)) == sorted(heads)
    for layer, weights in seen.weights_BhTS.items():
        values = cache.values_BgSd[layer].repeat_interleave(
            config.num_attention_heads // config.num_key_value_heads, 1
        )
        # else zeros
        made = (weights @ values)[..., : heads[layer].shape[-1] // config.num_attention_heads]
        assert (made.transpose(1, 2).flatten(2) - heads[layer]).abs().max() < 1e-12
        sees = (
            view.visibility.mask_B1TS
            if config.attention_window == "full"
            else view.within(16).visibility.mask_B1TS
        )
        assert (weights > 0).any(1, keepdim=True).equal(sees)
    assert seen.out_BTH is not None and torch.equal(one.norms.output(seen.out_BTH), step.normed_BTH)
    with pytest.raises(KeyError), observing(one):
        raise KeyError
    assert not any(
        module._forward_pre_hooks
        for module in one.modules()
        if not isinstance(module, torch.nn.Linear)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_targets_weights_are_those_that_transformers_reports(family: str) -> None:
    """Beyond the windows of families that have some; afterwards the model attends as it did before."""
    plain, model, ids_1T = make(family), Target(make(family)), tokens(24)
    before, view = model.config._attn_implementation, View.packed(torch.zeros_like(ids_1T))
    final = model.forward(ids_1T, view, ()).final_BTH
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = plain(input_ids=ids_1T, output_attentions=True, use_cache=False).attentions
    layers = range(model.num_layers)
    with attention_weights(model, layers) as found:
        model.forward(ids_1T, view, ())
    assert sorted(found) == list(layers)
    for layer in layers:
        assert_close(found[layer], wanted[layer])
    assert model.config._attn_implementation == before
    assert torch.equal(model.forward(ids_1T, view, ()).final_BTH, final)
    with attention_weights(model, [1]) as found:
        model.forward(ids_1T, view, ())
    assert list(found) == [1]


@pytest.mark.parametrize("name", ["eagle1", "eagle3_1"])
def test_what_the_target_gives(name: str) -> None:
    one, ids, prompt = drafter(name), texts()[0].ids, 4
    config, places = one.config, len(one.config.aux_layers) + 3
    found = dict(zip(INPUTS, read_inputs(target(), one, ids, prompt), strict=True))
    view = View.packed(torch.zeros(1, len(ids), dtype=torch.int64))
    aux = (
        target()
        .forward(torch.tensor([ids]), view, config.aux_layers, config.fusion.final_norm)
        .aux_BTNH[0]
    )
    states = [
        *aux.unbind(1),
        aux.flatten(1),
        one.norms.aux(aux[None])[0].flatten(1),
        one.fuse(aux[None])[0],
    ]
    for place, state in enumerate(states):
        sink, *others = (state.square().mean(-1).sqrt()).tolist()
        middle = sorted(others)[(len(others) - 1) // 2]
        expected = [sink, middle, sink / middle]
        assert [float(found[key][place, 0]) for key in list(INPUTS)[2:]] == pytest.approx(expected)
    plain = copy.deepcopy(target().model)
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        weights = plain(
            input_ids=torch.tensor([ids]), output_attentions=True, use_cache=False
        ).attentions
    for place in range(places):
        boundary = config.aux_layers[place] if place < len(config.aux_layers) else 0
        assert (
            found["target_sink_mass"][place, 1]
            == found["target_own_mass"][place, 1]
            == (boundary > 0)
        )
        if boundary:
            answer = weights[boundary - 1][0, :, prompt:]
            assert float(found["target_sink_mass"][place, 0]) == pytest.approx(
                float(answer[..., 0].mean()), rel=1e-5
            )
            own = torch.stack(
                [answer[:, q, prompt + q].mean() for q in range(answer.shape[1])]
            ).mean()
            assert float(found["target_own_mass"][place, 0]) == pytest.approx(float(own), rel=1e-5)


def test_a_target_without_weights_is_refused() -> None:
    refused = pytest.raises(
        ValueError, match="in memory: the eager attention of layer 1 gives no weights"
    )
    with refused, attention_weights(target(), [-1, 1]):
        pass  # no layer has run
