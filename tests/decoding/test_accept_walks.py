"""Drawn drafts judged by plain walks of one sequence each, with the same noise: the same path and the same next token.

The law of what comes out cannot tell a rule that accepts too little. The walks are written from the papers, in Python's
floats. Many probabilities and coins are exactly zero: a draft that the target never says is not taken by any coin.

Legend: B sequences, N nodes with the root, L levels with the root's, V vocabulary, D draft vocabulary.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.decoding.accept import Accepted, Block, DraftTree, OneHot, Rule, WithoutReplacement
from specdec.decoding.sampling import AcceptanceNoise
from tests.decoding.trees import parent_lists, path_to

V = 4
IDS = [0, 2, 3]  # the draft vocabulary
NODES = 7
WEIGHTS = st.sampled_from([0, 0, 1, 2, 5])
# Chances are fractions of small numbers. A coin on one of them would fall to either side by the order of a sum.
NO_CHANCE = math.sqrt(0.97)


class Case(NamedTuple):
    """A tree, laws after its nodes, and noise."""

    tokens: list[int]
    parents: list[int]
    p: list[list[float]]  # target's law, over V
    q: list[list[float]]  # drafter's law, over V, zero outside of the draft vocabulary
    coins: list[float]
    times: list[list[float]]  # of a race, for each level


@st.composite
def laws(draw: st.DrawFn, ids: list[int]) -> list[float]:
    weights = draw(st.lists(WEIGHTS, min_size=len(ids), max_size=len(ids)))
    weights[draw(st.integers(0, len(ids) - 1))] += 1
    law = [0.0] * V
    for token, weight in zip(ids, weights, strict=True):
        law[token] = weight / sum(weights)
    return law


@st.composite
def cases(draw: st.DrawFn, chain: bool = False) -> Case:
    if chain:
        parents = [0, *range(draw(st.integers(0, NODES - 1)))]
    else:
        parents = draw(parent_lists(most=NODES))
    size = len(parents)
    tokens = draw(st.lists(st.sampled_from(IDS), min_size=size, max_size=size))
    p = [draw(laws(list(range(V)))) for _ in parents]
    q = [draw(laws(IDS)) for _ in parents]
    if chain:
        q[-1] = [0.0] * V  # nothing was drawn behind the last draft
        for node in range(1, size):
            drawable = [token for token in IDS if q[node - 1][token]]
            tokens[node] = draw(st.sampled_from(drawable))
    # a chance of one is a quotient of sums in block verification, which may lack a last bit
    largest = 1 - 1e-9 if chain else 1 - 2**-53
    coin = st.sampled_from([0.0, largest]) | st.floats(0, 1).map(NO_CHANCE.__mul__)
    coins = draw(st.lists(coin, min_size=size, max_size=size))
    random = draw(st.randoms(use_true_random=False))
    times = [[0.01 + random.random() for _ in range(V)] for _ in range(NODES)]
    return Case(tokens, parents, p, q, coins, times)


def winner(law: list[float], times: list[float]) -> int:
    """The token that arrives first."""
    ratios = [weight / time for weight, time in zip(law, times, strict=True)]
    return ratios.index(max(ratios))


def summed_to_one(law: list[float]) -> list[float]:
    return [weight / sum(law) for weight in law]


def one_hot(case: Case) -> tuple[list[int], int]:
    """The target draws at every node; the walk follows the child that it drew."""
    at = [0]
    for level in range(NODES):
        token = winner(case.p[at[0]], case.times[level])
        children = [
            child
            for child in range(1, len(case.parents))
            if case.parents[child] in at and case.tokens[child] == token
        ]
        if not children:
            break
        at = children
    return path_to(at[0], case.parents), token


def without_replacement(case: Case) -> tuple[list[int], int]:
    """Children of a node one after another, each against what its elders left."""
    node = 0
    rest, drafter = case.p[0], case.q[0]
    for child in range(1, len(case.parents)):
        x = case.tokens[child]
        if case.parents[child] != node or drafter[x] == 0:
            continue
        if case.coins[child] * drafter[x] < rest[x]:
            node = child
            rest, drafter = case.p[child], case.q[child]
            continue
        excess = [max(0.0, r - q) for r, q in zip(rest, drafter, strict=True)]
        rest = summed_to_one(excess)
        left = [0.0 if token == x else weight for token, weight in enumerate(drafter)]
        drafter = summed_to_one(left) if any(left) else left
    path = path_to(node, case.parents)
    return path, winner(rest, case.times[len(path) - 1])


def kept_shares(case: Case) -> list[float]:
    """What block verification keeps of every draft."""
    kept = [1.0]
    for node in range(1, len(case.parents)):
        x = case.tokens[node]
        kept.append(min(1.0, kept[-1] * case.p[node - 1][x] / case.q[node - 1][x]))
    return kept


def differences(case: Case) -> list[list[float]]:
    """What is kept of the target's law after every node, minus the drafter's law."""
    return [
        [kept * p - q for p, q in zip(case.p[node], case.q[node], strict=True)]
        for node, kept in enumerate(kept_shares(case))
    ]


def is_decided(case: Case) -> bool:
    """Whether rounding decides nothing: where two products cancel, one order leaves zero and another the last bit."""
    kept = kept_shares(case)
    return all(
        kept[node] == 1 or abs(difference) > 1e-9 or not case.q[node][token]
        for node, row in enumerate(differences(case))
        for token, difference in enumerate(row)
    )


def block(case: Case) -> tuple[list[int], int]:
    """Algorithm 2 of https://arxiv.org/abs/2403.10444: the last draft whose coin says so ends the path."""
    last = len(case.parents) - 1
    kept = kept_shares(case)
    excess = [[max(0.0, difference) for difference in row] for row in differences(case)]
    end = 0
    for node in range(1, last + 1):
        total = sum(excess[node])
        chance = kept[node]
        if node < last:
            chance = total / (total + 1 - kept[node]) if total else 0.0
        if case.coins[node] < chance:
            end = node
    law = case.p[end] if end == last or not any(excess[end]) else excess[end]
    return list(range(end + 1)), winner(summed_to_one(law), case.times[end])


def accept(rule: Rule, batch: list[Case], q_dtype: torch.dtype = torch.float64) -> Accepted:
    """All of them in one batch; nodes that a tree does not have are their own parents."""
    size = max(len(case.parents) for case in batch)
    tokens, parents, p, q, coins = [], [], [], [], []
    for case in batch:
        unused = range(len(case.parents), size)
        tokens.append(case.tokens + [IDS[0]] * len(unused))
        parents.append(case.parents + list(unused))
        p.append(case.p + [[1.0 / V] * V] * len(unused))
        q.append([[law[token] for token in IDS] for law in case.q] + [[1.0, 0, 0]] * len(unused))
        coins.append(case.coins + [0.0] * len(unused))
    drafts = DraftTree(
        torch.tensor(tokens),
        torch.tensor(parents),
        torch.tensor(q, dtype=q_dtype),
        torch.tensor(IDS),
    )
    noise = AcceptanceNoise(
        torch.tensor(coins, dtype=torch.float64),
        torch.tensor([case.times for case in batch], dtype=torch.float64),
    )
    verdict = rule.accept(drafts, torch.tensor(p, dtype=torch.float64), noise)
    assert verdict.path_BN.shape == (len(batch), size) and verdict.path_BN.dtype == torch.bool
    assert verdict.next_B.shape == (len(batch),) and verdict.next_B.dtype == torch.int64
    return verdict


def check(rule: Rule, walk: Callable[[Case], tuple[list[int], int]], batch: list[Case]) -> None:
    verdict = accept(rule, batch)
    paths = [row.nonzero().flatten().tolist() for row in verdict.path_BN]
    assert list(zip(paths, verdict.next_B.tolist(), strict=True)) == [walk(case) for case in batch]


@settings(max_examples=60, deadline=None)
@given(st.lists(cases(), min_size=1, max_size=8))
def test_the_targets_own_draws_are_a_plain_walk(batch: list[Case]) -> None:
    check(OneHot(), one_hot, batch)


@settings(max_examples=120, deadline=None)
@given(st.lists(cases(), min_size=1, max_size=8))
def test_rejection_without_replacement_is_a_plain_walk(batch: list[Case]) -> None:
    check(WithoutReplacement(), without_replacement, batch)


@settings(max_examples=120, deadline=None)
@given(st.lists(cases(chain=True).filter(is_decided), min_size=1, max_size=8))
def test_blocks_of_different_lengths_are_plain_walks(batch: list[Case]) -> None:
    check(Block(), block, batch)


def test_a_drafters_law_in_a_narrower_dtype_is_judged_in_the_targets() -> None:
    law = [0.5, 0.0, 0.25, 0.25]
    case = Case([0, 2], [0, 0], [law, law], [law, [0.0] * V], [0.0, 0.5], [[1.0] * V] * NODES)
    for rule in (WithoutReplacement(), Block()):
        wide = accept(rule, [case])
        narrow = accept(rule, [case], torch.bfloat16)
        assert torch.equal(wide.path_BN, narrow.path_BN)
        assert torch.equal(wide.next_B, narrow.next_B)


def test_a_law_without_excess_is_kept_beside_one_with_excess() -> None:
    p_BV = torch.tensor([[0.5, 0.5], [0.75, 0.25]])
    q_BV = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    expected = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    assert torch.equal(WithoutReplacement().residual(p_BV, q_BV), expected)
