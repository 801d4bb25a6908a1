"""An engine's passes beside our own prediction; our decoder stands for the engine."""

import pytest
import torch

from specdec.decoding import Chain, PlainDecoder, SpeculativeDecoder
from specdec.drafter import Drafter, DrafterSpec
from specdec.parity import passes
from specdec.parity.asked import Answer
from specdec.parity.passes import Engine, Position, compare_passes
from specdec.parity.texts import Text
from specdec.target import Target
from tests.perfect import disturb, markov_target, perfect_drafter
from tests.tiny import presets

DRAFTS, TOKENS = 4, 33
SHARE = 1e-9
PROMPTS = [[3, 9, 27, 20], [50]]


@pytest.fixture(scope="module")
def target() -> Target:
    return markov_target(context=0.4)


@pytest.fixture(scope="module", params=["eagle1", "eagle3", "eagle3_1"])
def drafter(request: pytest.FixtureRequest, target: Target) -> Drafter:
    return disturb(perfect_drafter(target, presets()[request.param]), 0.5)


def decoded(target: Target, drafter: Drafter) -> list[Answer]:
    decoder, found = SpeculativeDecoder(target, drafter, Chain(DRAFTS)), []
    for prompt in PROMPTS:
        made = decoder.generate(prompt, TOKENS)
        known = [1]
        for accepted in made.accepted[:-1]:
            known.append(known[-1] + accepted + 1)
        found.append(answer(prompt, made.ids, known, list(made.accepted)))
    return found


def answer(prompt: list[int], ids: list[int], known: list[int], accepted: list[int]) -> Answer:
    return Answer(prompt, ids, known, accepted, tuple(sum(a > k for a in accepted) for k in range(DRAFTS)))


def verdicts(found: Engine) -> list[str]:
    return [one.verdict for one in found.positions]


def test_the_prediction_is_what_decoding_accepts(target: Target, drafter: Drafter) -> None:
    answers = decoded(target, drafter)
    accepted = [a for one in answers for a in one.accepted]
    assert len(set(accepted)) > 2, "every number of accepted drafts should come up"
    found = compare_passes(target, drafter, answers, SHARE)
    assert found.holds and verdicts(found) == ["equal"] * DRAFTS
    assert [one.accepted for one in found.positions] == [one.expected for one in found.positions]
    assert found.positions[0].accepted == sum(a > 0 for a in accepted) > 0
    assert {one.passes for one in found.positions} == {len(accepted)}
    assert (found.tokens, found.rounding, found.different) == (len(PROMPTS) * TOKENS, 0, 0)


def test_a_pass_that_accepts_less_or_more_is_found_where_it_is(target: Target, drafter: Drafter) -> None:
    """The other passes stay what they are: none depends on how those before it went."""
    first, last = decoded(target, drafter)
    number = next(n for n, a in enumerate(first.accepted[:-1]) if a >= 2)
    start, many = first.known[number], first.accepted[number]
    less = answer(
        first.prompt, first.ids,
        [*first.known[: number + 1], start + 2, *first.known[number + 1 :]],
        [*first.accepted[:number], 1, many - 2, *first.accepted[number + 1 :]],
    )  # fmt: skip
    found = compare_passes(target, drafter, [less, last], SHARE)
    assert not found.holds and found.positions[1].different == 1
    assert verdicts(found)[1] == "DIFFERENT in 1"
    assert found.told()["positions"][1]["different"] == 1 and not found.told()["holds"]
    found = compare_passes(target, drafter, [less, last], 1.0)
    assert found.holds and verdicts(found)[1] == "equal but for rounding in 1"

    number = next(n for n, a in enumerate(first.accepted[:-1]) if a == 0)
    more = answer(
        first.prompt, first.ids,
        first.known[: number + 1] + first.known[number + 2 :],
        [*first.accepted[:number], 1 + first.accepted[number + 1], *first.accepted[number + 2 :]],
    )  # fmt: skip
    found = compare_passes(target, drafter, [more], SHARE)
    assert found.positions[0].different == 1 and not found.holds


def test_another_drafter_is_not_equal(target: Target, drafter: Drafter) -> None:
    """What an engine does that leaves a norm out, or reads its states a layer off."""
    other = disturb(perfect_drafter(target, DrafterSpec()), 0.5, seed=1)
    found = compare_passes(target, other, decoded(target, drafter), SHARE)
    assert not found.holds and found.positions[0].different > 0 and found.different == 0


def test_tokens_of_another_target(target: Target, drafter: Drafter) -> None:
    (first, *_) = decoded(target, drafter)
    wrong = first._replace(ids=[*first.ids[:5], (first.ids[5] + 1) % 61, *first.ids[6:]])
    found = compare_passes(target, drafter, [wrong], SHARE)
    assert found.different >= 1 and found.rounding == 0 and not found.holds
    before = found.different
    found = compare_passes(target, drafter, [wrong], 1.0)
    assert (found.different, found.rounding) == (0, before)


def test_a_draft_that_the_drafter_has_no_word_for(target: Target) -> None:
    """However wide the tolerance, a token outside the draft vocabulary is never drafted."""
    small = perfect_drafter(target, DrafterSpec(draft_vocab_size=30))
    known = set(small.vocab.target_ids_D.tolist())
    ids = PlainDecoder(target).generate(PROMPTS[0], TOKENS).ids
    place = next(n for n in range(1, TOKENS - DRAFTS) if ids[n] not in known)
    found = compare_passes(target, small, [answer(PROMPTS[0], ids, [place], [1])], SHARE)
    assert found.positions[0].different == 1 and found.positions[0].expected == 0


def test_no_room_behind_an_answer(drafter: Drafter, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target.config, "max_position_embeddings", len(PROMPTS[0]) + TOKENS)
    with pytest.raises(ValueError, match="exceed the target's"):
        compare_passes(target, drafter, decoded(target, drafter)[:1], SHARE)


@pytest.mark.parametrize(
    ("rounding", "fewer", "holds"), [(0, 0, True), (6, 0, True), (32, 16, True), (32, 32, False), (32, 0, False)]
)
def test_rounding_takes_either_side(rounding: int, fewer: int, holds: bool) -> None:
    """Close drafts that all fall to one side are a part that was lost, in a precision that hides it."""
    positions = [Position(1, 50, 30, 30 + rounding, rounding, 0)]
    found = Engine(positions, 100, 0, 0, fewer)
    assert found.holds == holds and found.told()["holds"] == holds
    assert found.chance == pytest.approx({0: 1.0, 6: 2 * 0.5**6}.get(rounding, 1.0 if fewer == 16 else 2 * 0.5**32))


def test_a_tie_of_the_target_behind_the_end_is_nobodys_fault(
    target: Target, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's last pass may see another continuation than ours, where the target itself is undecided."""
    (first, *_) = decoded(target, drafter)
    number = next(n for n, a in enumerate(first.accepted[:-1]) if a >= 2)
    start = first.known[number]
    # the answer ends behind the pass's first draft, and its second one is refused
    cut = answer(first.prompt, first.ids[: start + 1], first.known[: number + 1], [*first.accepted[:number], 1])
    whole = passes._of_target
    found = compare_passes(target, drafter, [cut], SHARE)
    assert found.positions[1].different == 1 and not found.holds

    def undecided(of: Target, text: Text) -> tuple[torch.Tensor, torch.Tensor]:
        short, lead = whole(of, text)
        return short, torch.zeros_like(lead)

    monkeypatch.setattr(passes, "_of_target", undecided)
    found = compare_passes(target, drafter, [cut], SHARE)
    assert found.holds and sum(one.rounding for one in found.positions) == 1
