"""Faults in acceptance: the certificate of ``specdec evaluate --certify`` finds each by its draws or tokens."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec.decoding import Chain, Sampling, SpeculativeDecoder
from specdec.decoding.accept import Accepted, DraftTree, Greedy, Rule, WithoutReplacement
from specdec.decoding.sampling import AcceptanceNoise
from specdec.evaluation.lossless import TOP_K, check_greedy, check_sampled
from tests.decoding import test_accept_wrong as wrong
from tests.evaluation.made import soft_target
from tests.tiny import presets, tiny_drafter, tiny_target

PROMPT = [3, 4, 5]
RUNS = 200
SAMPLING = Sampling(temperature=0.9, rule="without_replacement", draft_temperature=3.0, top_k=TOP_K)


@dataclasses.dataclass(frozen=True)
class AcceptsAll(WithoutReplacement):
    """Every draft is taken, whatever the target says."""

    def accept(self, drafts: DraftTree, p_BNV: Tensor, noise: AcceptanceNoise) -> Accepted:
        verdict = super().accept(drafts, p_BNV, noise)
        return verdict._replace(path_BN=torch.ones_like(verdict.path_BN))


SAMPLED: dict[str, Rule] = {
    "every draft is accepted": AcceptsAll(),
    "the condition upside down": wrong.UpsideDown(),
    "the target's law of the node before": wrong.TargetOfTheNodeBefore(),
    "the target colder than asked": wrong.TargetColderHere(),
    "top-p that was not asked for": wrong.TopPHere(),
}
"""Those that a few hundred draws tell apart; the exact law of tests/decoding/test_accept_wrong.py finds many more."""


def decoder_of(shape_depth: int) -> SpeculativeDecoder:
    """Draws whose continuations can all be listed."""
    target, drafter = soft_target()
    return SpeculativeDecoder(
        target, drafter, Chain(shape_depth), replace(SAMPLING, top_k=TOP_K), batch=32
    )


def test_without_a_fault_it_holds() -> None:
    assert check_sampled(decoder_of(2), PROMPT, RUNS)["fault"] is None


@pytest.mark.parametrize("fault", SAMPLED)
def test_a_biased_acceptance_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.decoding.accept.RULES", {"without_replacement": SAMPLED[fault]})
    found = check_sampled(decoder_of(2), PROMPT, RUNS)
    assert found["fault"], found


def one_more(path_BN: Tensor) -> Tensor:
    """A draft more than the target's choice allows."""
    further = path_BN.clone()
    further[:, 1:] |= path_BN[:, :-1]
    return further


GREEDY: dict[str, Callable[[Accepted], Accepted]] = {
    "one draft too many": lambda verdict: verdict._replace(path_BN=one_more(verdict.path_BN)),
    "another bonus token": lambda verdict: verdict._replace(next_B=(verdict.next_B + 1) % 61),
    "every draft": lambda verdict: verdict._replace(path_BN=torch.ones_like(verdict.path_BN)),
}


@pytest.mark.parametrize("fault", [None, *GREEDY])
def test_a_wrong_greedy_acceptance_is_found(
    fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Greedy.accept
    if fault is not None:
        change = GREEDY[fault]
        monkeypatch.setattr(Greedy, "accept", lambda self, *of: change(right(self, *of)))
    decoder = SpeculativeDecoder(tiny_target(), tiny_drafter(presets()["eagle3_1"]), Chain(3))
    found = check_greedy(decoder, [PROMPT, [9]], 12)
    assert bool(found["fault"]) == (fault is not None), found
