"""What is measured of drafters whose answers are known, and of others beside what decoding does."""

import dataclasses
import math

import pytest
import torch

from specdec.decoding import Chain, Request, SpeculativeDecoder
from specdec.drafter import Drafter
from specdec.drift import measure as module
from specdec.drift.measure import measure
from specdec.drift.settings import Settings
from specdec.drift.texts import OwnText, own_texts
from specdec.nn.view import View
from specdec.target import Target
from tests.drift.made import PROMPTS, SMALL, SPECS, drafter, means, measured, target, texts
from tests.perfect import markov_target, perfect_drafter

ALL = Settings(depths=4, anchors=100)


def test_a_drafter_that_copies_its_target_is_always_right() -> None:
    easy = markov_target(context=0)
    for name in ("eagle1", "eagle3", "eagle3_1"):
        copy = perfect_drafter(easy, dataclasses.replace(SPECS[name], draft_vocab_size="all"))
        (text,) = own_texts(easy, PROMPTS[:1], 20)
        found = means(measure(easy, copy, text, Settings(depths=7, anchors=4)), copy)
        assert found["joint_acceptance"] == found["conditional_acceptance"] == [1.0] * 7
        assert found["covered_mass"] == pytest.approx([1.0] * 7)
        assert max(map(abs, found["kl"])) < 1e-6
        assert math.isnan(found["kl_between_steps"][0]) and min(found["kl_between_steps"][1:]) > 1


def test_a_normed_state_has_rms_one() -> None:
    found = {name: measured(name) for name in ("eagle3", "eagle3_1")}  # norms have unit weights
    assert found["eagle3_1"]["state_rms"] == pytest.approx([1.0] * 4, abs=1e-4)
    assert found["eagle3"]["state_rms"] == found["eagle3"]["out_rms"]
    for one in found.values():
        assert max(abs(rms - 1) for rms in one["out_rms"]) > 0.02


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "sliding_window"])
def test_acceptance_is_what_decoding_accepts_at_the_same_places(name: str) -> None:
    depths, text = 4, texts()[0]
    total = means(measure(target(), drafter(name), text, ALL), drafter(name))
    decoder = SpeculativeDecoder(target(), drafter(name), Chain(depths), batch=8)
    requests = [Request(text.ids[:anchor], 2) for anchor in text.anchors(100, depths)]
    accepted = [made.accepted[0] for _, made in decoder.generate_all(requests)]
    assert len(set(accepted)) > 2  # some are right, some are not
    for k in range(1, depths + 1):
        reached, right = sum(n >= k - 1 for n in accepted), sum(n >= k for n in accepted)
        assert total["joint_acceptance"][k - 1] == pytest.approx(right / len(accepted))
        assert total["conditional_acceptance"][k - 1] == pytest.approx(right / reached)


def plain_forward(model: Target, of: Drafter, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Without any cache: the drafter's features of every token, and the target's logits after it."""
    ids_1T = torch.tensor([ids])
    out = model.forward(ids_1T, View.packed(torch.zeros_like(ids_1T)), of.config.aux_layers, of.config.aux_final_norm)
    return of.fuse(out.aux_BTNH)[0], model.logits(out.final_BTH)[0]


@pytest.mark.parametrize("name", ["eagle1", "eagle3_1"])
def test_states_and_laws_are_those_of_the_text_with_its_drafts(name: str) -> None:
    """Worked out anew for one chain: without caches, the chain's tokens by the drafter's own unrolled steps."""
    one, text, depths = drafter(name), texts()[0], 3
    (anchor,) = text.anchors(1, depths)
    found = means(measure(target(), one, text, Settings(depths=depths, anchors=1)), one)
    ids = text.ids[: anchor + 1]
    features = [plain_forward(target(), one, ids)[0][: len(ids) - 1]]
    state, law_before = features[0][-1], None
    for k in range(depths):
        rows = torch.cat([features[0], *features[1:]])[None]
        step = one.step(torch.tensor([ids[1:]]), rows, View.packed(torch.zeros(1, rows.shape[1], dtype=torch.int64)))
        true, logits = plain_forward(target(), one, ids)
        law = one.logits(step.normed_BTH)[0, -1].log_softmax(-1)
        p = logits[-1][one.vocab.target_ids_D].log_softmax(-1)
        new = step.h_BTH[0, -1]
        cosine = torch.nn.functional.cosine_similarity
        assert found["state_rms"][k] == pytest.approx(float(new.square().mean().sqrt()), rel=1e-9)
        assert found["cosine"][k] == pytest.approx(float(cosine(new, state, dim=0)), abs=1e-9)
        assert found["feature_cosine"][k] == pytest.approx(float(cosine(new, true[-1], dim=0)), abs=1e-9)
        assert found["kl"][k] == pytest.approx(float((p.exp() * (p - law)).sum()), rel=1e-9)
        if law_before is not None:
            between = float((law.exp() * (law - law_before)).sum())
            assert found["kl_between_steps"][k] == pytest.approx(between, rel=1e-9)
        inside = logits[-1].softmax(-1)[one.vocab.target_ids_D].sum()
        assert found["covered_mass"][k] == pytest.approx(float(inside), rel=1e-9)
        ids = [*ids, int(one.vocab.to_target(law.argmax()))]
        features.append(new[None])
        state, law_before = new, law


def test_sources_are_the_targets_states_and_the_drafters_feature() -> None:
    one, text = drafter("eagle3_1"), texts()[0]
    sums = measure(target(), one, text, Settings(depths=3, anchors=1))
    (anchor,) = text.anchors(1, 3)
    ids_1T = torch.tensor([text.ids])
    aux = target().forward(ids_1T, View.packed(torch.zeros_like(ids_1T)), one.config.aux_layers).aux_BTNH
    aux = aux[:, anchor - 1 : anchor]
    wanted = [x.square().mean(-1).sqrt().flatten() for x in (aux, one.norms.aux(aux), one.fuse(aux))]
    assert sums.sources_G2[:, 0].tolist() == pytest.approx(torch.cat(wanted).tolist())
    assert sums.sources_G2[:, 1].tolist() == [1] * 7 and sums.chains == 1


@pytest.mark.parametrize("name", ["eagle3", "two_layer", "sliding_window"])
def test_chains_side_by_side_are_as_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together = measured(name, ALL)
    monkeypatch.setattr(module, "SIDE_BY_SIDE", 1)
    alone = measured(name, ALL)
    for key, row in together.items():
        assert row == pytest.approx(alone[key], abs=1e-12, nan_ok=True), key


def test_anchors_are_spread_over_the_answer() -> None:
    text = OwnText("", list(range(30)), 10)
    assert text.anchors(100, 4) == list(range(10, 26))
    assert text.anchors(4, 4) == [12, 16, 20, 24]
    assert text.anchors(1, 19) == [10] and text.anchors(1, 20) == []
    short = OwnText("", [3, 4, 5, 6, 7], 4)
    assert measure(target(), drafter(), short, SMALL).chains == 0


def test_nothing_is_drawn_and_nothing_changes() -> None:
    before, weights = torch.get_rng_state(), [p.clone() for p in drafter().parameters()]
    one = measure(target(), drafter(), texts()[0], SMALL)
    two = measure(target(), drafter(), texts()[0], SMALL)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, w) for p, w in zip(drafter().parameters(), weights, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))


@pytest.mark.parametrize("wrong", [{"depths": 0}, {"anchors": 0}, {"sink_tokens": 0}, {"recent": 0}])
def test_numbers_out_of_range(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Settings(**wrong)
    with pytest.raises(ValueError, match="at least 9"):
        Settings(depths=8).check_length(8)
