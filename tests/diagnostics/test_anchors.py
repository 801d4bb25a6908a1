"""Chains drafted side by side at places of a text, beside the decoder and beside training's unroll."""

import pytest
import torch

from specdec.decoding import Chain, PlainDecoder, Request, SpeculativeDecoder
from specdec.diagnostics import anchors as module
from specdec.diagnostics.anchors import AnchoredText, answered_texts
from specdec.nn.blocked import Blocked
from tests.diagnostics.made import PROMPTS, drafter, places, target, texts

DEPTH = 4


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "two_layer", "sliding_window"])
def test_drafts_match_where_decoding_accepts_them(name: str) -> None:
    text = texts()[0]
    anchors = places(text, DEPTH)
    one = AnchoredText(target(), drafter(name), text.ids, DEPTH)
    chains = one.draft(anchors)
    due_AK = torch.tensor([text.ids[anchor + 1 : anchor + 1 + DEPTH] for anchor in anchors])
    accepted = (chains.tokens_AK == due_AK).cumprod(1).sum(1).tolist()
    decoder = SpeculativeDecoder(target(), drafter(name), Chain(DEPTH), batch=8)
    # the first pass begins at the anchor
    requests = [Request(text.ids[:anchor], 2) for anchor in anchors]
    assert len(set(accepted)) > 2  # some are right, some are not
    assert [made.accepted[0] for _, made in sorted(decoder.generate_all(requests))] == accepted


@pytest.mark.parametrize("name", ["eagle1", "eagle3_1", "two_layer"])
def test_given_the_texts_tokens_chains_are_the_unroll(name: str) -> None:
    """From the first token that has a state before it: in the prompt, too."""
    text, one = texts()[0], drafter(name)
    anchors = list(range(1, len(text.ids) - DEPTH))
    anchored = AnchoredText(target(), one, text.ids, DEPTH)
    chains = anchored.draft(anchors, anchored.behind(anchors))
    ids_1T = torch.tensor([text.ids])
    zero_1T, slots = torch.zeros_like(ids_1T), torch.tensor(anchors) - 1
    view = module.View.packed(zero_1T)
    aux = (
        target().forward(ids_1T, view, one.config.aux_layers, one.config.fusion.final_norm).aux_BTNH
    )
    with torch.no_grad():
        steps = list(one.unroll(ids_1T, aux, zero_1T, DEPTH, Blocked()))
        features = torch.stack(
            [one.fuse(aux)[0, slots], *(step.h_BTH[0, slots] for step in steps)], 1
        )
        log_probs = torch.stack(
            [one.logits(step.normed_BTH[0, slots]).log_softmax(-1) for step in steps], 1
        )
    torch.testing.assert_close(chains.features_AJH, features)
    torch.testing.assert_close(chains.log_probs_AKD, log_probs)
    assert torch.equal(chains.tokens_AK, one.vocab.to_target(log_probs.argmax(-1)))


@pytest.mark.parametrize("name", ["eagle3", "two_layer", "sliding_window"])
def test_chains_side_by_side_are_as_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = texts()[0]
    anchors = places(text, DEPTH)
    together = AnchoredText(target(), drafter(name), text.ids, DEPTH)
    assert list(together.groups(anchors)) == [list(anchors)]
    chains = together.draft(anchors)
    monkeypatch.setattr(module, "CHAINS_SIDE_BY_SIDE", 1)
    alone = AnchoredText(target(), drafter(name), text.ids, DEPTH)
    for place, (anchor,) in enumerate(alone.groups(anchors)):
        for wanted, found in zip(chains, alone.draft([anchor]), strict=True):
            if wanted is None:  # without a confidence head
                assert found is None
                continue
            torch.testing.assert_close(found[0], wanted[place])


def test_answers_are_the_targets_own() -> None:
    found = answered_texts(target(), PROMPTS, 6)
    for text, (name, ids) in zip(found, PROMPTS, strict=True):
        assert (text.prompt_id, text.prompt) == (name, len(ids))
        assert text.ids == [*ids, *PlainDecoder(target()).generate(ids, 6).ids]
