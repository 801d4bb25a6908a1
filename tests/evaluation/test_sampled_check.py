"""Draws counted against the target's law: the real rules have it, a biased one has not."""

import dataclasses

import pytest
import torch

from specdec.decoding import Chain, Sampling
from specdec.decoding.rules import Drafts, Noise, Rule, Verdict, WithoutReplacement
from specdec.evaluation.sampled_check import check_sampled
from tests.evaluation.made import soft_target

PROMPT = [3, 4, 5]


@pytest.mark.parametrize("rule", ["one_hot", "without_replacement"])
def test_sampled_decoding_has_the_targets_law(rule: str) -> None:
    target, drafter = soft_target()
    sampling = Sampling(temperature=0.9, rule=rule, draft_temperature=1.2)  # type: ignore[arg-type]
    found = check_sampled(target, drafter, Chain(2), sampling, PROMPT, 600)
    assert found.holds and found.impossible == 0 and found.degrees > 3 and found.runs == 600
    assert (found.vocabulary, found.length) == (3, 3)


@pytest.mark.parametrize("runs", [1, 9])
def test_too_few_draws_prove_nothing(runs: int) -> None:
    """Any two cells would expect fewer than five draws each."""
    target, drafter = soft_target()
    found = check_sampled(target, drafter, Chain(2), Sampling(temperature=0.9, rule="one_hot"), PROMPT, runs)
    assert found.degrees == 0 and found.impossible == 0 and not found.holds


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
    assert not check_sampled(target, drafter, Chain(2), sampling, PROMPT, 600).holds
