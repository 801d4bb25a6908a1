"""The statement that decoding is lossless: true of the real decoders, and not of broken ones."""

import dataclasses
import json
from typing import Any

import pytest
import torch

from specdec.decoding import Chain, DynamicTree, Growth, Request, Sampling, SpeculativeDecoder, StaticTree
from specdec.decoding.rules import Drafts, Noise, Rule, Verdict, WithoutReplacement
from specdec.evaluation.certificate import certify, check_greedy, check_sampled
from tests.evaluation.made import alter
from tests.perfect import markov_target, perfect_drafter
from tests.tiny import presets, tiny_drafter, tiny_target

PROMPTS = [[3, 4, 5], [9], list(range(20))]
GROWTHS: list[Growth] = [Chain(3), StaticTree(), DynamicTree(depth=3, top_k=3, nodes=9)]
TARGET, DRAFTER = tiny_target(), tiny_drafter(presets()["eagle3_1"])


@pytest.mark.parametrize("growth", GROWTHS, ids=lambda growth: growth.name)
def test_greedy_decoding_says_what_the_target_says(growth: Growth) -> None:
    found = check_greedy(TARGET, DRAFTER, growth, PROMPTS, 20)
    assert found.holds and found.tokens == 60 and found.near_ties == found.wrong == () and found.growth == growth.name


def test_every_wrong_token_is_found_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that says another token at two places of a text."""

    def wrong(_: SpeculativeDecoder, asked: Request, ids: list[int]) -> list[int]:
        at = [place - len(asked.prompt) for place in (7, 12)]
        return [token ^ 1 if i in at else token for i, token in enumerate(ids)]

    alter(monkeypatch, wrong)
    found = check_greedy(TARGET, DRAFTER, Chain(2), PROMPTS[:1], 20)
    assert [(d.prompt, d.position) for d in found.wrong] == [(0, 4), (0, 9)] and not found.holds
    for difference in found.wrong:
        assert difference.token == difference.plain_token ^ 1
        assert difference.gap > difference.allowed > 0
        with torch.no_grad():
            text = [*PROMPTS[0], *SpeculativeDecoder(TARGET, DRAFTER, Chain(1)).generate(PROMPTS[0], 1).ids]
            assert TARGET.model(torch.tensor([text])).logits.isfinite().all()


@pytest.mark.parametrize(("other", "fault"), [(1, False), (2, True)], ids=["of the tie", "a third"])
def test_a_near_tie_is_no_fault_and_a_third_token_is_one(other: int, fault: bool) -> None:
    """Two tokens with one head row are equally likely: whichever of them is said, it is rounding's choice."""
    target = tiny_target()
    with torch.no_grad():
        rows = target.model.get_output_embeddings().weight
        rows[1:60:2] = rows[:60:2]
        rows[60:] = 0
    with pytest.MonkeyPatch.context() as patch:
        alter(patch, lambda decoder, asked, ids: [ids[0] ^ other, *ids[1:]])
        found = check_greedy(target, DRAFTER, Chain(2), PROMPTS[1:2], 6)
    told, untold = (found.wrong, found.near_ties) if fault else (found.near_ties, found.wrong)
    assert found.holds != fault and len(told) == 6 and not untold
    assert told[0].gap > told[0].allowed if fault else told[0].gap == 0


def soft_target() -> tuple[Any, Any]:
    target = markov_target()
    with torch.no_grad():
        target.model.lm_head.weight *= 0.1
    return target, perfect_drafter(target, presets()["eagle3_1"])


@pytest.mark.parametrize("rule", ["one_hot", "without_replacement"])
def test_sampled_decoding_has_the_targets_law(rule: str) -> None:
    target, drafter = soft_target()
    sampling = Sampling(temperature=0.9, rule=rule, draft_temperature=1.2)  # type: ignore[arg-type]
    found = check_sampled(target, drafter, Chain(2), sampling, PROMPTS[0], 600)
    assert found.holds and found.impossible == 0 and found.degrees > 3 and found.runs == 600
    assert (found.vocabulary, found.length) == (3, 3)


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
    assert not check_sampled(target, drafter, Chain(2), sampling, PROMPTS[0], 600).holds


def test_the_statement_covers_every_growth_and_rule() -> None:
    target, drafter = soft_target()
    said: list[str] = []
    growths = [Chain(2), DynamicTree(depth=2, top_k=2, nodes=4)]
    found = certify(target, drafter, growths, PROMPTS[:2], max_new_tokens=6, runs=60, on_check=said.append)
    assert found["holds"] and json.loads(json.dumps(found)) == found
    kinds = [(check["check"], check.get("rule")) for check in found["checks"]]
    greedy, drawn = ("GreedyCheck", None), [("SampledCheck", "WithReplacement"), ("SampledCheck", "WithoutReplacement")]
    assert kinds == [greedy, ("SampledCheck", "OneHot"), *drawn, greedy, ("SampledCheck", "OneHot")]
    assert len(said) == len(kinds) and found["checks"][0]["tokens"] == 12


@pytest.mark.parametrize(
    ("asked", "temperature"),
    [(Sampling(temperature=0.7, top_p=0.95, repetition_penalty=1.2, seed=5), 0.7), (Sampling(min_p=0.01, seed=5), 1.0)],
    ids=["drawn", "greedy"],
)
def test_draws_are_made_as_the_evaluation_makes_them(asked: Sampling, temperature: float) -> None:
    target, drafter = soft_target()
    found = certify(target, drafter, [Chain(2)], PROMPTS[:1], max_new_tokens=4, runs=200, sampling=asked)
    assert found["holds"] and found["seed"] == 5
    drawn = [check for check in found["checks"] if check["check"] == "SampledCheck"]
    assert [check["sampling"]["rule"] for check in drawn] == ["one_hot", "with_replacement", "without_replacement"]
    for check in drawn:
        assert check["sampling"] == dataclasses.asdict(asked) | {
            "temperature": temperature, "top_k": 3, "rule": check["sampling"]["rule"]
        }  # fmt: skip


def test_one_check_that_fails_fails_the_statement(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = soft_target()
    alter(monkeypatch, lambda decoder, asked, ids: [(ids[0] + 1) % target.vocab_size, *ids[1:]])
    assert not certify(target, drafter, [Chain(2)], PROMPTS[:1], max_new_tokens=4, runs=20)["holds"]
