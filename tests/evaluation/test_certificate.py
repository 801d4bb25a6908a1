"""The statement that decoding is lossless covers every growth and rule, and one check that fails fails it."""

import dataclasses
import json

import pytest

from specdec.decoding import Chain, DynamicTree, Sampling
from specdec.evaluation.certificate import certify
from specdec.target import Target
from tests.evaluation.made import alter, soft_target

PROMPTS = [[3, 4, 5], [9], list(range(20))]


def test_the_statement_covers_every_growth_and_rule() -> None:
    target, drafter = soft_target()
    said: list[str] = []
    growths = [Chain(2), DynamicTree(depth=2, top_k=2, nodes=4)]
    found = certify(target, drafter, growths, PROMPTS[:2], max_new_tokens=6, runs=300, on_check=said.append)
    assert found["holds"] and json.loads(json.dumps(found)) == found
    kinds = [(check["check"], check.get("rule")) for check in found["checks"]]
    greedy, drawn = ("GreedyCheck", None), [("SampledCheck", "WithReplacement"), ("SampledCheck", "WithoutReplacement")]
    assert kinds == [greedy, ("SampledCheck", "OneHot"), *drawn, greedy, ("SampledCheck", "OneHot")]
    assert len(said) == len(kinds) and found["checks"][0]["tokens"] == 12
    assert all(check["passes"] > 0 < check["accepted"] for check in found["checks"])


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


def test_in_16_bits_no_draws_are_made_and_the_statement_says_so(caplog: pytest.LogCaptureFixture) -> None:
    target, drafter = soft_target()
    low, drafter = Target(target.model.bfloat16()), drafter.bfloat16()
    found = certify(low, drafter, [Chain(2)], PROMPTS, max_new_tokens=6, runs=300)
    assert [check["check"] for check in found["checks"]] == ["GreedyCheck"] and found["sampled"] is None
    assert "draws are checked in float32 alone" in caplog.text


def test_what_verified_nothing_certifies_nothing() -> None:
    target, drafter = soft_target()
    found = certify(target, drafter, [Chain(2)], PROMPTS[:1], max_new_tokens=1, runs=300)
    assert not found["holds"] and "no pass verified anything" in found["checks"][0]["fault"]
