"""Draws counted against the target's law: the real rules have it, a biased one has not."""

import dataclasses

import pytest
import torch

from specdec.decoding import Chain, Sampling
from specdec.decoding.rules import Drafts, Noise, Rule, Verdict, WithoutReplacement
from specdec.evaluation.sampled_check import check_sampled, most_open
from tests.evaluation.made import soft_target

PROMPT = [3, 4, 5]


@pytest.mark.parametrize("rule", ["one_hot", "without_replacement"])
def test_sampled_decoding_has_the_targets_law(rule: str) -> None:
    target, drafter = soft_target()
    sampling = Sampling(temperature=0.9, rule=rule, draft_temperature=1.2)  # type: ignore[arg-type]
    found = check_sampled(target, drafter, Chain(2), sampling, PROMPT, 600)
    assert found.fault is None and found.impossible == 0 and found.degrees > 3 and found.runs == 600
    assert (found.vocabulary, found.length) == (3, 3)


@pytest.mark.parametrize("runs", [1, 9])
def test_too_few_draws_prove_nothing(runs: int) -> None:
    """Any two cells would expect fewer than five draws each."""
    target, drafter = soft_target()
    found = check_sampled(target, drafter, Chain(2), Sampling(temperature=0.9, rule="one_hot"), PROMPT, runs)
    assert found.degrees == found.impossible == 0 and found.continuations == 27
    assert found.fault and found.fault.endswith("draw more")


@dataclasses.dataclass(frozen=True)
class AcceptsAll(WithoutReplacement):
    """Every draft is taken, whatever the target says."""

    def accept(self, drafts: Drafts, p_BNV: torch.Tensor, noise: Noise) -> Verdict:
        verdict = super().accept(drafts, p_BNV, noise)
        return verdict._replace(path_BN=torch.ones_like(verdict.path_BN))


def test_a_biased_rule_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = soft_target()
    rules: dict[str, Rule] = {"without_replacement": AcceptsAll()}
    monkeypatch.setattr("specdec.decoding.sampling.RULES", rules)
    sampling = Sampling(temperature=0.9, rule="without_replacement", draft_temperature=3.0)
    found = check_sampled(target, drafter, Chain(2), sampling, PROMPT, 600)
    assert found.fault and found.p_value < 1e-12
    assert dataclasses.replace(found, impossible=0).fault == f"p-value {found.p_value:.1e}"


def test_of_a_law_without_choice_every_draw_says_all() -> None:
    """Top-p leaves one token at each place: nothing can be counted, and nothing else can be said."""
    target, drafter = soft_target()
    sampling = Sampling(temperature=0.9, top_p=1e-6, rule="one_hot")
    found = check_sampled(target, drafter, Chain(2), sampling, PROMPT, 20)
    assert (found.continuations, found.degrees, found.fault) == (1, 0, None)
    assert dataclasses.replace(found, impossible=3).fault == "3 of 20 draws are such as the target never makes"


def test_draws_follow_the_prompt_after_which_they_tell_most(monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = soft_target()
    sampling, prompts = Sampling(temperature=0.9, rule="one_hot"), [[5], [6, 7], [8], list(range(30)) * 4]
    even = {3: [1 / 3] * 3, 2: [0.5, 0.5], 1: [1.0]}
    laws = {5: even[1], 6: even[3], 8: even[2], 0: even[3]}
    monkeypatch.setattr(
        "specdec.evaluation.sampled_check._continuations",
        lambda target, sampling, prompt: {(n,): p for n, p in enumerate(laws[prompt[0]])},
    )
    assert most_open(target, sampling, prompts, 100, 3) == 1
    assert most_open(target, sampling, prompts, 12, 3) == 2  # a third of twelve is too few for a cell
    room = target.config.max_position_embeddings
    with pytest.raises(ValueError, match="no prompt leaves room for 3 more tokens"):
        most_open(target, sampling, [[1] * (room - 2)], 100, 3)
