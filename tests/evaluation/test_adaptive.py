"""What tune computes of chains that end by confidence is what decoding gives."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from specdec.decoding import AdaptiveChain, Chain, DraftShape, SpeculativeDecoder, StaticTree
from specdec.drafter import Drafter, DrafterConfig
from specdec.evaluation.adaptive import (
    Costs,
    Recorder,
    Recording,
    adaptive_notes,
    cost_threshold,
    drafts_at,
    faster,
    next_draft_cost,
    record_chains,
    recording_of,
    simulated,
)
from specdec.evaluation.config import Pair
from specdec.evaluation.metrics import Answer
from specdec.evaluation.prompts import Prompt
from specdec.target import Target
from tests.data.tiny import CHATML, tiny_tokenizer
from tests.perfect import disturb, markov_target, perfect_drafter
from tests.tiny import LAYERS, presets, tiny_target

PROMPTS = [[3, 4, 5], [9], [7, 50, 2, 31, 19]]
DEPTH = 5
NEW = 40
COSTS = Costs(
    np.array([0.0, 2.0, 3.0, 4.0, 5.0, 6.0]), np.array([10.0, 11.0, 12.0, 13.0, 14.0, 15.0])
)
SHAPES: list[DraftShape] = [
    Chain(1), Chain(4), AdaptiveChain(DEPTH, 0.6), AdaptiveChain(DEPTH, 0.2), AdaptiveChain(3, 0.4),
    AdaptiveChain(DEPTH, 0.0, 0.6), AdaptiveChain(DEPTH, 0.3, 0.5),
]  # fmt: skip


@cache
def pair() -> tuple[Target, Drafter]:
    target = markov_target("llama", 0.45)
    spec = replace(presets()["eagle3_1"], draft_vocab_size=50)
    return target, disturb(perfect_drafter(target, spec, sharpness=1.5), 0.45)


@cache
def recordings() -> list[Recording]:
    recorder = Recorder(DEPTH)
    decoder = SpeculativeDecoder(*pair(), recorder)
    out = []
    for number, prompt in enumerate(PROMPTS):
        recorder.places.clear()
        ids = decoder.generate(prompt, NEW, ()).ids
        assert [place.token for place in recorder.places] == ids[:-1]
        out.append(recording_of(str(number), recorder.places))
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_computed_passes_are_those_of_decoding(shape: DraftShape) -> None:
    """The last pass apart, which may go beyond the end."""
    decoder = SpeculativeDecoder(*pair(), shape)
    lengths = set[int]()
    for prompt, answer in zip(PROMPTS, simulated(recordings(), shape, COSTS), strict=True):
        made = decoder.generate(prompt, NEW, ())
        assert answer.drafted == made.drafted
        assert answer.accepted[:-1] == made.accepted[:-1]
        lengths |= {*made.drafted}
    assert isinstance(shape, Chain) or len(lengths) > 1


def recorded(right: list[int], *confidences: list[float]) -> Recording:
    return Recording("a", np.array(right), np.array(confidences))


def test_the_drafter_s_calls_are_counted() -> None:
    """Calls in vain too; a product ends a chain before one."""
    recording = recorded([0, 0, 0], [0.9, 0.5, 0.9], [0.2, 0.9, 0.9], [0.9, 0.9, 0.9])
    for shape, drafts, calls in (
        (Chain(2), [2, 2, 2], [2, 2, 2]),
        (AdaptiveChain(3, 0.5), [2, 1, 3], [2, 1, 3]),
        (AdaptiveChain(3, 0.0, 0.6), [1, 0, 3], [2, 1, 3]),
    ):
        assert [column.tolist() for column in drafts_at(shape, recording)] == [drafts, calls]


def test_times_are_those_of_calls_and_drafts() -> None:
    """Two passes: two drafts of which the last was left out, and a whole chain."""
    recording = recorded([1, 0, 1, 0], [0.9, 0.2], [0.1, 0.1], [0.9, 0.9], [0.1, 0.1])
    (answer,) = simulated([recording], AdaptiveChain(2, 0.0, 0.5), COSTS)
    assert answer.accepted == (1, 1) and answer.drafted == (1, 2) and answer.tokens == 4
    assert answer.seconds == pytest.approx((3 + 11 + 3 + 12) / 1e3)


def test_costs_are_straight_between_measured_lengths() -> None:
    def answers(draft: float, verify: float) -> list[Answer]:
        """Three, of which one met a busy machine."""
        base = Answer("a", None, 4, (1, 1), (1, 1), 1.0, 0.1, 10, None)
        usual = base._replace(draft_ms=(draft, draft), verify_ms=(verify - 1, verify + 1))
        busy = usual._replace(draft_ms=(99.0, 99.0), verify_ms=(99.0, 99.0), plain_seconds=9.0)
        return [usual, busy, usual]

    shapes = [Chain(5), StaticTree(), Chain(1)]
    measured = [answers(6.0, 15.0), answers(9.0, 90.0), answers(2.0, 11.0)]
    assert Costs.of(shapes[:2], measured[:2]) is None
    costs = Costs.of(shapes, measured)
    assert costs is not None
    np.testing.assert_allclose(costs, COSTS)
    assert costs.next_draft_ms == pytest.approx(2.0)  # 1 ms of drafting, 1 ms of verification


def test_the_cost_rule_finds_the_best_length_of_a_chain() -> None:
    """Where every draft has the same chance, the best length is fixed: of 4, as by the closed form of the speed-up.

    A cost that were a share of a plain pass would give 7.
    """
    costs = Costs(np.arange(9.0), 10 + np.arange(9.0))
    right = np.random.default_rng(0).geometric(0.2, 20_000) - 1
    recording = Recording("a", right, np.full((len(right), 8), 0.8))
    answers = {depth: simulated([recording], Chain(depth), costs) for depth in range(1, 9)}
    best = min(answers, key=lambda depth: answers[depth][0].seconds)
    threshold = cost_threshold([recording], next_draft_cost(costs, answers[best]))
    drafts, _ = drafts_at(AdaptiveChain(8, threshold), recording)
    assert best == 4 and {*drafts.tolist()} == {4}
    drafts, _ = drafts_at(AdaptiveChain(8, cost_threshold([recording], 0.2)), recording)
    assert {*drafts.tolist()} == {7}


@pytest.mark.parametrize(
    ("low", "high", "chance"), [(1.1, 1.3, False), (0.9, 1.2, True), (0.7, 0.9, False)]
)
def test_a_ratio_is_chance_only_if_its_interval_has_one(
    low: float, high: float, chance: bool
) -> None:
    ratio = {"mean": (low + high) / 2, "low": low, "high": high}
    rows = {
        "fixed": {"shape": "chain:depth=2"},
        "adaptive": {"shape": "adaptive", "over_fixed": ratio},
    }
    (note,) = adaptive_notes({"measured": rows})
    assert ("chance" in note) == chance


def test_the_cost_rule_goes_by_what_is_accepted() -> None:
    """A drafter that says 0.9 where one draft in ten is accepted, and 0.5 where all are, is not believed."""
    sure = [recorded([1 + (n == 0)], [0.9, 0.9]) for n in range(10)]
    unsure = [recorded([2], [0.5, 0.5]) for _ in range(10)]
    assert cost_threshold(sure, 0.2) == pytest.approx(0.9) or cost_threshold(sure, 0.2) == 1.0
    assert cost_threshold([*sure, *unsure], 0.2) == pytest.approx(0.5)
    assert cost_threshold([recorded([1], [0.9, 0.9])], 0.2) == 1.0  # never pays


def test_the_comparison_is_paired() -> None:
    """Prompts differ by far, and each is a tenth faster: the interval knows."""

    def answers(seconds: list[float]) -> list[Answer]:
        return [
            Answer(str(n), None, 10, (1,), (1,), second, 0.0, 0, None)
            for n, second in enumerate(seconds)
        ]

    ratio = faster(answers([1.0, 10.0, 3.0]), answers([1.1, 11.0, 3.3]))
    assert ratio is not None and ratio.low is not None and ratio.high is not None
    assert ratio.mean == pytest.approx(1.1) and ratio.high - ratio.low < 1e-6


def test_a_conversation_that_is_left_out_late_leaves_no_places() -> None:
    """Its first turn was recorded, and would pass for another prompt's answer."""
    tokenizer = tiny_tokenizer(CHATML)
    target = Target(tiny_target(vocab_size=len(tokenizer)).model, tokenizer)
    config = DrafterConfig.for_target(
        presets()["eagle3_1"], target.config, vocab_size=target.vocab_size, num_target_layers=LAYERS,
        identity={"source": "tiny"},
    )  # fmt: skip
    pair = Pair(target, Drafter(config, torch.arange(config.draft_vocab_size)).double(), True, "")
    prompts = [
        Prompt("raw", None, None, None, "the grass is"),
        Prompt("late", None, ["what is two plus two?", "sky " * 520], None, None),
    ]
    (wanted,) = record_chains(pair, prompts[:1], 3, 9)
    (recording,) = record_chains(pair, prompts, 3, 9)
    np.testing.assert_array_equal(recording.confidence_IK, wanted.confidence_IK)
