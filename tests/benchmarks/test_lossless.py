"""The benchmark of losslessness in small: it passes what is right, and finds what is wrong."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks.losslessness.greedy import Case, Way, check, plain
from benchmarks.losslessness.report import faults, markdown, to_json
from benchmarks.losslessness.sampled import TREE, Count, count
from benchmarks.losslessness.targets import FAMILIES, SPECS, fitted, random_target, walks
from specdec.decoding import Chain, Generation, Request, SpeculativeDecoder
from specdec.decoding.rules import Rule, WithoutReplacement
from specdec.drafter import Drafter
from specdec.evaluation.greedy_check import Difference
from specdec.target import Target

pytestmark = pytest.mark.usefixtures("no_graphs")

REQUESTS = [Request([5], 40), Request(list(range(30)), 40)]
ABOUT = {
    "date": "2026-01-01", "command": "x", "cpu": "c", "cores": 1, "threads": 1, "memory_gb": 1, "platform": "p",
    "git_commit": "g", "git_dirty": False, "python": "3", "load_at_start": 0, "load_at_end": 0, "seconds": 1,
    "versions": {"torch": "9.9"},
    "asked": {"float64": 50}, "targets": ["t"],
}  # fmt: skip


@cache
def pair() -> tuple[Target, Drafter]:
    generator = torch.Generator().manual_seed(0)
    drafter = fitted(
        random_target("mixtral", torch.float32), SPECS["mixtral"], (walks(8, 48, generator) for _ in range(30))
    )
    return random_target("mixtral", torch.float64), drafter.double()


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_right_passes_and_was_tested(compiled: bool) -> None:
    told: list[int] = []
    target, drafter = pair()
    wanted = plain(target, drafter, Chain(3), REQUESTS)
    found = check("mixtral", target, drafter, Way(Chain(3), 2, compiled), wanted, told.append)
    assert found.compiled == compiled and counters["stats"]["unique_graphs"] == (2 if compiled else 0)
    assert faults({"float64": 80}, ["mixtral"], [found], []) == [] and sum(told) == found.tokens > 80
    assert found.accepted > 0.2 * found.passes and found.ended_inside >= 1


def test_every_wrong_token_is_found_in_a_batch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SpeculativeDecoder.generate_all

    def wrong(self: SpeculativeDecoder, requests: list[Request], end: Any = ()) -> Any:
        for number, made in original(self, requests, end):
            at = [place - len(requests[number].prompt) for place in (33, 36)]  # of the second text alone
            ids = [
                token ^ 1 if i in at and len(requests[number].prompt) > 20 else token
                for i, token in enumerate(made.ids)
            ]
            yield number, Generation(ids, *made[1:])

    target, drafter = pair()
    wanted = plain(target, drafter, Chain(3), REQUESTS)._replace(ends=frozenset())
    wanted = wanted._replace(ended=wanted.whole)
    monkeypatch.setattr(SpeculativeDecoder, "generate_all", wrong)
    found = check("llama", target, drafter, Way(Chain(3), 2), wanted, lambda n: None)
    assert [(one.prompt, one.position) for one in found.wrong] == [(1, 3), (1, 6)] * 2
    assert all(one.token == one.plain_token ^ 1 and one.gap > one.allowed for one in found.wrong)
    assert "wrong tokens" in faults({}, [], [found], [])[0]


class KeepsTheLaw(WithoutReplacement):
    """Forgets the residual."""

    def residual(self, r_BV: Tensor, q_BV: Tensor) -> Tensor:
        return r_BV


def test_draws_tell_a_right_rule_from_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    right = count("without_replacement", TREE, 0, 30_000, told.append)
    assert right.holds and sum(told) == right.draws == 30_000 and 0.2 < right.accepted < 2
    rules: dict[str, Rule] = {"without_replacement": KeepsTheLaw()}
    monkeypatch.setattr("specdec.decoding.sampling.RULES", rules)
    assert not count("without_replacement", TREE, 0, 30_000, told.append).holds


def test_the_report_names_every_fault() -> None:
    tie = Difference(0, 1, 2, 3, 0.0, 1e-5)
    good = Case("t", "float64", "g", 1, False, 2, 60, 20, 30, 1, (), ())
    bad = good._replace(near_ties=(tie,), wrong=(tie,), accepted=1, ended_inside=0)
    counts = [Count("r", "g", 0, 10, 0.5, 0.5, 1.0), Count("r", "g", 1, 10, 0.5, 1e-9, 1.0)]
    assert faults({"float64": 60}, ["t"], [good], counts[:1]) == []
    rough = [good._replace(dtype="float32", near_ties=(tie,) * ties) for ties in (1, 2)]  # of 60 tokens
    assert ["rounding is not that rough" in fault for fault in faults({}, [], rough, [])] == [True]
    told = faults({"float64": 61}, ["t", "u"], [bad], counts)
    assert len(told) == 7 and "float64: u was not come to" in told, told
    text = markdown(ABOUT, [good, bad], counts)
    assert "torch 9.9\n" in text
    assert "120 greedy tokens compared, **1 wrong**, 1 near-ties" in text and "**1e-09**" in text
    assert to_json(ABOUT, [good], counts[:1])["greedy"][0]["acceptance_length"] == 2.5


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_proves_itself(family: str) -> None:
    for dtype in (torch.float32, torch.float64):
        random_target(family, dtype).prove()
