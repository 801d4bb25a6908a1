"""Levels against drafters made for them, against the drafter's cache, and against the decoder."""

import dataclasses
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.decoding import Chain, PlainDecoder, SpeculativeDecoder
from specdec.drafter import Drafter
from specdec.evaluation.pair import Pair
from specdec.explain.answers import answered
from specdec.explain.levels import OWN_FEATURES, TRUE_FEATURES, VOCABULARY, measure, passes
from specdec.explain.run import Asked, explain
from specdec.parity.ours import cached
from specdec.parity.texts import Text
from specdec.target import Target
from tests.explain import made
from tests.explain.made import DEPTH, NEW, PROMPTS, SPECS, explained, lengths, losses
from tests.perfect import perfect_drafter
from tests.tiny import presets

ENDS = (9, 27, 40, 55)


@pytest.mark.parametrize("name", SPECS)
def test_of_a_perfect_drafter_nothing_is_lost(name: str) -> None:
    found = explained(made.sure(), perfect_drafter(made.sure(), SPECS[name]))
    assert set(lengths(found).values()) == {DEPTH + 1}
    assert set(losses(found).values()) == {0.0}
    assert found.waterfall.check.holds and found.waterfall.check.same == found.waterfall.check.passes > len(PROMPTS)


def test_a_reduced_vocabulary_costs_its_ceiling_and_nothing_else() -> None:
    drafter = perfect_drafter(made.sure(), presets()["eagle3_1"])
    found = explained(made.sure(), drafter)
    vocabulary, *others = losses(found).values()
    assert vocabulary > 1 and others == [0.0, 0.0, 0.0]
    ceiling = lengths(found)["vocabulary"]
    assert ceiling == lengths(found)["observed"] == DEPTH + 1 - vocabulary
    known, committed, begun = set(drafter.vocab.target_ids_D.tolist()), 0, 0
    for prompt in PROMPTS:  # by hand
        answer = PlainDecoder(made.sure()).generate(prompt, NEW + DEPTH).ids
        n = 1
        while n < NEW:
            run = [token in known for token in answer[n : n + DEPTH]]
            count = 1 + (run.index(False) if False in run else DEPTH)
            n, committed, begun = n + count, committed + count, begun + 1
    assert ceiling == committed / begun


def test_a_recurrence_that_ruins_its_state_is_drift_and_nothing_else() -> None:
    prompt = PROMPTS[1]
    found = explained(made.sure(), made.drifting(made.sure(), prompt), [prompt])
    assert losses(found) == {"vocabulary": 0.0, "true_features": 0.0, "own_features": DEPTH - 1, "own_tokens": 0.0}
    assert lengths(found)["observed"] == 2
    assert found.waterfall.check.holds


@pytest.mark.parametrize(("name", "level"), [("eagle1", 0.7), ("eagle3", 0.2), ("eagle3_1", 0.2)])
@pytest.mark.parametrize("end", [(), ENDS])
def test_the_bars_add_up_to_what_the_decoder_accepts_pass_by_pass(
    name: str, level: float, end: tuple[int, ...]
) -> None:
    target = made.unsure(end)
    drafter = made.erring(name, target, level)
    found = explained(target, drafter)
    levels = found.waterfall.by_name
    decoder = SpeculativeDecoder(target, drafter, Chain(DEPTH))
    one_by_one = [list(decoder.generate(prompt, NEW, end).accepted) for prompt in PROMPTS]
    assert levels["own_tokens"].accepted == levels["observed"].accepted == [own for own in one_by_one if own]
    assert {0, 1, 2} <= {count for own in one_by_one for count in own}  # or the equality says little
    own, true = levels["own_features"], levels["true_features"]
    begun = [passes(run) for run in true.everywhere or []]  # drift is what the passes of true features lose
    at_these = [[run[place] for place in some] for run, some in zip(own.everywhere or [], begun, strict=True)]
    assert own.accepted == at_these != true.accepted
    sum_ = lengths(found)["perfect"] - sum(losses(found).values())
    assert sum_ == pytest.approx(lengths(found)["observed"], abs=1e-12)
    down = [lengths(found)[key] for key in ("perfect", "vocabulary", "true_features")]
    assert all(one >= two for one, two in pairwise(down)) and losses(found)["true_features"] > 0.3


def test_a_window_that_hides_own_drafts_is_refused() -> None:
    """In the unroll a node sees all of its own steps."""
    drafter = perfect_drafter(made.sure(), dataclasses.replace(SPECS["eagle3_1"], attention_window=16))
    with pytest.raises(ValueError, match="attention_window 16 is less than 17 drafts"):
        explain(Pair(made.sure(), drafter, True), Asked(PROMPTS[:1], ["0"], NEW, 17))


def test_end_tokens_are_counted_as_decoding_counts_them() -> None:
    """At every length of answer: ends inside, at its end, and among the drafts behind it."""
    target = made.unsure(ENDS)
    drafter = perfect_drafter(target, SPECS["eagle1"])
    seen = set()
    for new in range(2, 14):
        found = explained(target, drafter, PROMPTS[:4], new)
        levels = found.waterfall.by_name
        assert levels["own_tokens"].accepted == levels["observed"].accepted, new
        assert all(len(text.ids) == text.prompt + text.kept + DEPTH for text in found.texts)
        seen |= {None if text.end is None else (text.end > text.kept) - (text.end < text.kept) for text in found.texts}
        assert all(text.end is None or text.ids[text.prompt + text.end - 1] in ENDS for text in found.texts)
    assert {0, 1, None} <= seen


@pytest.mark.parametrize("name", ["eagle1", "eagle3_1"])
def test_features_are_whose_they_are_said_to_be(name: str) -> None:
    """Beside chains that are grown one by one in the drafter's cache."""
    target = made.unsure()
    drafter = made.erring(name, target, 0.4)
    texts = answered(target, PROMPTS[1:4], 9, DEPTH)
    for text, run in zip(texts, measure(target, drafter, texts, DEPTH), strict=True):
        own, true = by_hand(target, drafter, text.ids, text.prompt, 8)
        assert (run[OWN_FEATURES], run[TRUE_FEATURES]) == (own, true)
        assert run[VOCABULARY] == [DEPTH] * 8


def by_hand(target: Target, drafter: Drafter, ids: list[int], prompt: int, places: int) -> tuple[list[int], list[int]]:
    """Accepted drafts of every place with own and with true features."""
    anchors = [prompt - 1 + n for n in range(places + DEPTH - 1)]
    chains = Text([*ids, *[0] * DEPTH], prompt)
    with torch.no_grad():
        said_AK = cached(target, drafter, chains, anchors, DEPTH - 1).log_probs_AKV.argmax(-1).tolist()
    due = [[ids[anchor + 2 + k] for k in range(DEPTH)] for anchor in anchors[:places]]
    own = [run([a == b for a, b in zip(said_AK[n], due[n], strict=True)]) for n in range(places)]
    true = [run([said_AK[n + k][0] == due[n][k] for k in range(DEPTH)]) for n in range(places)]
    return own, true


def run(hits: list[bool]) -> int:
    return [*hits, False].index(False)


def test_texts_side_by_side_are_what_they_are_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    target = made.unsure()
    drafter = made.erring("eagle3", target, 0.2)
    texts = answered(target, PROMPTS, 9, DEPTH)
    together = measure(target, drafter, texts, DEPTH)
    monkeypatch.setattr("specdec.explain.levels.TOKENS", 1)
    monkeypatch.setattr("specdec.explain.levels.ROWS", 3)
    assert measure(target, drafter, texts, DEPTH) == together


@given(st.lists(st.integers(0, 5), max_size=30))
def test_passes_follow_each_other(accepted: list[int]) -> None:
    begun = passes(accepted)
    assert begun[:1] == [0][: len(accepted)]
    assert all(two == one + accepted[one] + 1 for one, two in pairwise(begun))
    assert not begun or begun[-1] < len(accepted) <= begun[-1] + accepted[begun[-1]] + 1
