"""The run that a prediction is held against."""

import pytest

from specdec.decoding import PlainDecoder, SpeculativeDecoder
from specdec.drafter import DrafterSpec
from specdec.evaluation.tuning.profile import measure_profile
from specdec.evaluation.tuning.shape import Shape
from specdec.evaluation.tuning.trial import Trial, groups, measure_trial
from tests.perfect import markov_target, perfect_drafter


def test_groups_hold_two_prompts_a_sequence_and_every_prompt() -> None:
    prompts = [[n] for n in range(9)]
    assert [[request.prompt[0] for request in group] for group in groups(prompts, 2, 5)] == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 0, 1, 2],
    ]  # fmt: skip
    assert [len(group) for group in groups(prompts[:1], 4, 5)] == [8, 8]
    assert {request.max_new_tokens for group in groups(prompts, 1, 5) for request in group} == {5}


def test_the_run_has_the_acceptance_that_was_replayed() -> None:
    target = markov_target(context=0.6)
    drafter = perfect_drafter(target, DrafterSpec(draft_vocab_size="all"))
    prompts, shape, seen = [[1, 2, 3], [4], [5, 6], [7]], Shape(2, 3, 6), []
    decoder = SpeculativeDecoder(target, drafter, shape.growth, batch=2)
    trial = measure_trial(
        decoder, PlainDecoder(target, batch=2), prompts * 2, 9, 2.0, on_group=lambda: seen.append(None)
    )
    assert trial.acceptance_length == pytest.approx(
        measure_profile(target, drafter, prompts, 9, (2,)).acceptance(shape).length
    )
    assert trial.acceptance_length > 1.2 and trial.prompts == 8 and len(seen) == 2
    assert trial.measured > 0 and trial.calls > 0


def test_the_error_is_the_prediction_s() -> None:
    assert Trial(2.2, 2.0, 1.9, 2.5, 8, 100).error == pytest.approx(10)
    assert Trial(1.5, 2.0, 1.9, 2.5, 8, 100).error == pytest.approx(-25)
