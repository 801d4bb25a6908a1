"""Recorded proposals beside ours: what differs is found where it is, and too weak a comparison is no verdict."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec.diagnostics.loud import loud_drafter, loud_spec
from specdec.diagnostics.parity_files import Files, read_files
from specdec.diagnostics.parity_proposals import (
    CONTEXT,
    LEAST_BY_CONTEXT,
    LEAST_PROPOSALS,
    ProposalComparison,
    Rounding,
    compare_proposals,
)
from specdec.diagnostics.parity_readings import shortfall
from specdec.diagnostics.planted import FAULTS, planted
from specdec.drafter import Drafter, DrafterSpec
from specdec.engines.proposals import RecordedAnswer, RecordedPass
from specdec.export import export_drafter
from specdec.target import Target
from tests.diagnostics.recorded import recorded_answers, with_draft
from tests.perfect import markov_target, perfect_drafter
from tests.tiny import VOCAB, tiny_target

PROMPTS = [[(7 * n + 3) % 61 for n in range(20)], [11, 4]]
TOKENS, DRAFTS, SHARE = 10, 3, 1e-9


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module", params=["eagle1", "eagle3_1"])
def drafter(request: pytest.FixtureRequest, target: Target) -> Drafter:
    return loud_drafter(target, loud_spec(target, request.param))


@pytest.fixture(scope="module")
def answers(target: Target, drafter: Drafter) -> list[RecordedAnswer]:
    return recorded_answers(target, drafter, PROMPTS, TOKENS, DRAFTS)


def verdicts(comparison: ProposalComparison) -> list[str]:
    return [position.verdict for position in comparison.positions]


def test_the_same_proposals_are_equal(
    target: Target, drafter: Drafter, answers: list[RecordedAnswer]
) -> None:
    comparison = compare_proposals(target, drafter, answers, SHARE)
    assert comparison.fault is None and verdicts(comparison) == ["equal"] * DRAFTS
    assert comparison.proposals == len(PROMPTS) * TOKENS * DRAFTS
    assert (comparison.tokens, comparison.near_tokens, comparison.wrong_tokens) == (
        len(PROMPTS) * TOKENS,
        0,
        0,
    )
    assert [position.accepted for position in comparison.positions] == [
        position.expected for position in comparison.positions
    ]
    assert comparison.left_out == comparison.apart == 0 and comparison.differences == []


@pytest.mark.parametrize("position", range(DRAFTS))
def test_one_other_token_is_found_where_it_is(
    position: int, target: Target, drafter: Drafter, answers: list[RecordedAnswer]
) -> None:
    right = answers[0].passes[5].drafts[position]
    wrong = (
        int(drafter.vocab.target_ids_D[0])
        if right != int(drafter.vocab.target_ids_D[0])
        else right + 1
    )
    changed = [with_draft(answers[0], 5, position, wrong), answers[1]]
    comparison = compare_proposals(target, drafter, changed, SHARE)
    assert verdicts(comparison)[position] == "DIFFERENT in 1" and comparison.fault is not None
    first = comparison.differences[0]
    assert (first.text, first.position, first.proposed, first.likeliest) == (
        0,
        position + 1,
        wrong,
        right,
    )
    assert first.place == answers[0].passes[5].place + 1 + position
    within = compare_proposals(target, drafter, changed, 1.0)
    assert within.fault is None and within.positions[position].near_ties == 1
    assert 0 < within.largest_near_tie <= 1


def test_a_token_outside_of_the_draft_vocabulary_is_no_near_tie(target: Target) -> None:
    drafter = loud_drafter(target, DrafterSpec(draft_vocab_size=30))
    answers = recorded_answers(target, drafter, PROMPTS, TOKENS, DRAFTS)
    known = set(drafter.vocab.target_ids_D.tolist())
    for token in (min(set(range(VOCAB)) - known), -1, VOCAB):
        comparison = compare_proposals(
            target, drafter, [with_draft(answers[0], 2, 1, token), answers[1]], 1.0
        )
        assert verdicts(comparison)[1].startswith("DIFFERENT in 1"), token


def test_another_drafter_and_another_target(
    target: Target, drafter: Drafter, answers: list[RecordedAnswer]
) -> None:
    other = loud_drafter(target, loud_spec(target, "eagle3"), seed=1)
    assert compare_proposals(target, other, answers, SHARE).positions[0].different > TOKENS
    wrong = answers[0]._replace(ids=[*answers[0].ids[:-1], (answers[0].ids[-1] + 1) % VOCAB])
    wrong = wrong._replace(passes=wrong.passes[:-1])
    comparison = compare_proposals(target, drafter, [wrong], SHARE)
    assert comparison.wrong_tokens == 1 and "1 of 10 tokens are not this target's" in str(
        comparison.fault
    )


def test_what_is_recorded_must_be_of_this_text(
    target: Target, drafter: Drafter, answers: list[RecordedAnswer]
) -> None:
    moved = answers[0].passes[3]._replace(place=answers[0].passes[3].place + 1)
    with pytest.raises(ValueError, match="calls its drafter otherwise than those that are known"):
        compare_proposals(target, drafter, [answers[0]._replace(passes=[moved])], SHARE)
    with pytest.raises(ValueError, match="does it serve another target"):
        compare_proposals(target, drafter, [answers[0]._replace(ids=[VOCAB])], SHARE)
    with pytest.raises(ValueError, match="proposed nothing inside its answers"):
        compare_proposals(target, drafter, [answers[0]._replace(passes=[])], SHARE)
    chunk = RecordedPass(4, PROMPTS[0][-1], answers[0].passes[0].drafts)
    chunked = answers[0]._replace(passes=[chunk, *answers[0].passes])
    comparison = compare_proposals(target, drafter, [chunked], SHARE)
    assert comparison.misread == 1 and "give --max-num-batched-tokens" in str(comparison.fault)
    assert comparison.proposals == TOKENS * DRAFTS
    behind = answers[0].passes[0]._replace(place=len(PROMPTS[0]) + TOKENS)
    longer = answers[0]._replace(passes=[*answers[0].passes, behind])
    assert compare_proposals(target, drafter, [longer], SHARE).left_out == 1


def test_accepted_drafts_are_counted(target: Target) -> None:
    """A drafter that knows the target's law; counts alone do not show a proposal that nobody accepts."""
    lawful = markov_target()
    drafter = perfect_drafter(lawful, DrafterSpec(draft_vocab_size=VOCAB))
    answers = recorded_answers(lawful, drafter, [[3, 9]], TOKENS, DRAFTS)
    comparison = compare_proposals(lawful, drafter, answers, SHARE)
    assert [position.accepted for position in comparison.positions] == [TOKENS - DRAFTS] * DRAFTS
    changed = with_draft(answers[0], 4, 1, (answers[0].passes[4].drafts[1] + 1) % VOCAB)
    assert compare_proposals(lawful, drafter, [changed], SHARE).apart == 1


FUSED = {"a boundary one layer off", "boundaries in another order"}
OF_EAGLE3 = {"hidden_norm missing", "input_layernorm missing", "norm missing", "d2t one token off",
             "the target's head in place of its own", "the other feedback (norm_output)",
             "the other residual path (norm_before_residual)"}  # fmt: skip
# the faults that are of parts which a design has not, or that cannot be planted in it
RARE = {
    "fc_norm missing",
    "input_norm missing",
    "q_norm missing",
    "the drafter's own window missing",
    "the token before a draft one off (Markov head)",
}
WITHOUT = {
    "eagle1": FUSED | OF_EAGLE3 | RARE,
    "eagle3": RARE,
    "eagle3_1": RARE - {"fc_norm missing"},
    "qwen3": RARE - {"fc_norm missing", "q_norm missing"} | {"queries one position off"},
    "nvidia": RARE - {"input_norm missing"},
}


@pytest.fixture(scope="module")
def files(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    """Exports of loud drafters, by preset."""
    exports = {}
    for name in ("eagle1", "eagle3", "eagle3_1", "qwen3", "nvidia", "sliding_window", "dspark"):
        directory = tmp_path_factory.mktemp("exports") / name
        export_drafter(loud_drafter(target, loud_spec(target, name)), target, directory)
        exports[name] = read_files(directory)
    return exports


@pytest.mark.parametrize(
    "name",
    [
        "eagle1",
        "eagle3_1",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("eagle3", "qwen3", "nvidia")),
    ],
)
def test_a_loud_drafter_shows_every_fault_that_it_has_a_place_for(
    name: str, target: Target, files: dict[str, Files]
) -> None:
    drafter = loud_drafter(target, loud_spec(target, name))
    answers = recorded_answers(target, drafter, PROMPTS, TOKENS, DRAFTS)
    method = "eagle" if name == "eagle1" else "eagle3"
    comparison = compare_proposals(target, drafter, answers, SHARE, files[name], method)
    assert comparison.fault is None and comparison.too_weak is None
    changed = {probe.fault: probe.changed for probe in comparison.probes}
    assert changed[CONTEXT] > comparison.proposals // 4  # type: ignore[operator]
    hidden = {"weights rounded to bfloat16"} | (
        {"norms' epsilon times 100"} if name == "eagle1" else set()
    )
    assert set(comparison.unseen) <= hidden, changed
    assert {probe.fault for probe in comparison.probes if probe.changed is None} == WITHOUT[name]
    assert comparison.not_tried == (["queries one position off"] if name == "qwen3" else [])
    assert comparison.rounding == Rounding(0, 0)


def test_every_fault_is_planted_somewhere(target: Target, files: dict[str, Files]) -> None:
    """And none changes the files that it was given."""
    before = {
        name: (repr(raw), {k: w.clone() for k, w in weights.items()})
        for name, (raw, weights) in files.items()
    }
    head_VH = target.head_weight()
    for fault in FAULTS:
        copies = {
            name: planted(fault, given, head_VH, target.num_layers) for name, given in files.items()
        }
        assert any(isinstance(copy, tuple) for copy in copies.values()), fault
    for name, (raw, weights) in files.items():
        assert repr(raw) == before[name][0]
        assert all(torch.equal(weights[key], value) for key, value in before[name][1].items())


def test_a_drafter_that_looks_at_the_last_token_alone_gets_no_verdict(tmp_path: Path) -> None:
    lawful = markov_target()
    spec = DrafterSpec(draft_vocab_size=VOCAB - 1)
    drafter = perfect_drafter(lawful, spec)
    export_drafter(drafter, lawful, tmp_path / "served")
    answers = recorded_answers(lawful, drafter, PROMPTS, TOKENS, DRAFTS)
    exported = read_files(tmp_path / "served")
    comparison = compare_proposals(lawful, drafter, answers, SHARE, exported)
    assert comparison.fault is None
    assert f"and {LEAST_BY_CONTEXT} are needed" in str(comparison.too_weak)
    assert {"a window of 8", "rope base times 10"} <= set(comparison.unseen)
    few = compare_proposals(
        lawful, drafter, [answers[0]._replace(passes=answers[0].passes[:2])], SHARE, exported
    )
    assert f"and {LEAST_PROPOSALS} are needed" in str(few.too_weak)
    assert "the export was not compared" in str(
        compare_proposals(lawful, drafter, answers, SHARE).too_weak
    )


def test_numbers_that_are_none_are_no_rounding(
    target: Target, answers: list[RecordedAnswer]
) -> None:
    broken = loud_drafter(target, loud_spec(target, "eagle3_1"))
    broken.norms.output.weight[0] = float("nan")  # type: ignore[index, union-attr]
    comparison = compare_proposals(target, broken, answers, 1.0)
    assert comparison.fault is not None
    assert comparison.positions[0].different == comparison.positions[0].proposals


def test_more_near_ties_than_an_independent_implementation_has_are_no_verdict() -> None:
    assert Rounding(3, 0).explains and Rounding(9, 3).explains
    assert not Rounding(4, 0).explains and not Rounding(10, 3).explains


def test_long_answers_are_probed_at_some_of_their_passes(
    target: Target, files: dict[str, Files], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.diagnostics.parity_proposals.MOST_PROBED", 12)
    drafter = loud_drafter(target, loud_spec(target, "eagle3_1"))
    answers = recorded_answers(target, drafter, PROMPTS, TOKENS, DRAFTS)
    comparison = compare_proposals(target, drafter, answers, SHARE, files["eagle3_1"])
    assert (
        comparison.proposals == 2 * TOKENS * DRAFTS
        and comparison.probes[0].proposals == 12 * DRAFTS
    )
    assert comparison.fault is None and comparison.rounding == Rounding(0, 0)


def test_a_fault_that_makes_near_ties_alone_counts_as_unseen(
    target: Target, files: dict[str, Files]
) -> None:
    """The probes go by the margin that the verdict goes by."""
    drafter = loud_drafter(target, loud_spec(target, "eagle3_1"))
    answers = recorded_answers(target, drafter, PROMPTS, TOKENS, DRAFTS)
    sharp = compare_proposals(target, drafter, answers, SHARE, files["eagle3_1"])
    blunt = compare_proposals(target, drafter, answers, 0.5, files["eagle3_1"])
    assert sharp.probes[0].changed and not blunt.probes[0].changed
    assert CONTEXT in blunt.unseen and "depend on more than the last token" in str(blunt.too_weak)


def test_a_request_that_is_prefilled_again_may_be_misread_inside_its_answer(
    target: Target, drafter: Drafter, answers: list[RecordedAnswer]
) -> None:
    passes = answers[0].passes
    again = RecordedPass(passes[2].place, (passes[2].last + 1) % VOCAB, passes[2].drafts)
    preempted = answers[0]._replace(passes=[*passes[:6], again, *passes[6:]])
    assert compare_proposals(target, drafter, [preempted], SHARE).misread == 1


def test_shortfall_is_a_share_of_the_range() -> None:
    scores = torch.tensor([[4.0, 2.0, 0.0], [float("-inf"), 1.0, 3.0]])
    assert shortfall(scores, torch.tensor([1, 1])).tolist() == [0.5, 1.0]
    assert shortfall(scores, torch.tensor([0, 2])).tolist() == [0.0, 0.0]


def test_loud_designs_fit_their_target() -> None:
    shallow = tiny_target(num_hidden_layers=4)
    assert loud_spec(shallow, "eagle3").aux_layers == [1, 2, 3]
    assert loud_spec(shallow, "eagle3").draft_vocab_size == 2 * VOCAB // 3
    assert loud_spec(shallow, "eagle1").draft_vocab_size == "all"
    drafter = loud_drafter(shallow, replace(loud_spec(shallow, "eagle3"), draft_vocab_size=40))
    gaps = drafter.vocab.target_ids_D.diff()
    assert bool((gaps > 1).any()) and int(drafter.vocab.target_ids_D[0]) >= 0
    with pytest.raises(ValueError, match="reuses the target's own layer"):
        loud_spec(shallow, "mtp")
    with pytest.raises(ValueError, match="no preset 'eagle9'"):
        loud_spec(shallow, "eagle9")
