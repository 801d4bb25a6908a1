"""DraftTree taken at their word: as vLLM does in law, and as a plain walk does in every draw.

Legend: B sequences, N nodes with the root, L levels with the root's, V vocabulary, D draft vocabulary.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.decoding.accept import DraftTree, Greedy, OneHot
from specdec.decoding.sampling import AcceptanceNoise, LogitsProcessor, draw
from tests.decoding.enumeration import SHAPES, depths, random_law
from tests.decoding.trees import parent_lists, path_to


def strike_and_renormalise(
    p_NV: Tensor, tokens: list[int], parents: list[int]
) -> dict[tuple[int, int], float]:
    """vLLM's rule for drafters without probabilities, EAGLE's for trees: the law of (last node taken, next token)."""
    out: dict[tuple[int, int], float] = {}

    def walk(node: int, chance: float) -> None:
        r_V = p_NV[node].clone()
        for child in range(1, len(parents)):
            if parents[child] == node:
                accepted = float(r_V[tokens[child]])
                walk(child, chance * accepted)
                chance *= 1 - accepted
                r_V[tokens[child]] = 0
                r_V /= r_V.sum()
        for token, probability in enumerate(r_V.tolist()):
            out[node, token] = chance * probability

    walk(0, 1.0)
    return out


@pytest.mark.parametrize("parents", SHAPES)
def test_one_hot_takes_as_vllm_does_in_law(parents: list[int]) -> None:
    """By enumeration of all draws: each is a race that one token wins, and its probability is the product of p."""
    V, depth = 4, depths(parents)
    L, N = max(depth) + 1, len(parents)
    generator = torch.Generator().manual_seed(0)
    p_NV = random_law((N, V), generator)
    tokens = [0, *(1 + (i % 3) for i in range(N - 1))]
    wanted = strike_and_renormalise(p_NV, tokens, parents)
    found = dict.fromkeys(wanted, 0.0)
    for forced in itertools.product(range(V), repeat=L):
        race_BLV = torch.full((1, L, V), float("inf"))
        race_BLV[0, torch.arange(L), torch.tensor(forced)] = 1.0
        drafts = DraftTree(torch.tensor([tokens]), torch.tensor([parents]))
        path_BN, next_B = OneHot().accept(
            drafts, p_NV[None], AcceptanceNoise(torch.zeros(1, N), race_BLV)
        )
        path = path_BN[0].nonzero().flatten().tolist()
        assert path == path_to(path[-1], parents)
        chance = 1.0
        for level, node in enumerate(path):
            chance *= float(p_NV[node, forced[level]])
        found[path[-1], int(next_B)] += chance / V ** (L - len(path))  # levels not reached are free
    assert found == pytest.approx(wanted, abs=1e-15)


def plain_walk(
    p_NV: Tensor, race_LV: Tensor, tokens: list[int], parents: list[int]
) -> tuple[list[int], int]:
    """Nodes are merged if their paths say the same, so that equal siblings are one."""
    reached, level = [0], 0
    while True:
        token = int(draw(p_NV[reached[0]], race_LV[level]))
        below = [i for i in range(1, len(parents)) if parents[i] in reached and tokens[i] == token]
        if not below:
            return path_to(reached[0], parents), token
        reached, level = below, level + 1


@settings(max_examples=60, deadline=None, derandomize=True)
@given(parent_lists(most=12), st.integers(0, 2**20), st.booleans())
def test_one_hot_walks_any_tree_as_a_loop_does_and_as_greedy_does_without_chance(
    parents: list[int], seed: int, certain: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    V, N = 3, len(parents)
    L = max(depths(parents)) + 1
    tokens = torch.randint(0, V, (N,), generator=generator).tolist()
    by_context: dict[tuple[int, ...], Tensor] = {}
    for node in range(N):
        by_context.setdefault(
            tuple(tokens[i] for i in path_to(node, parents)), random_law((V,), generator)
        )
    p_NV = torch.stack(
        [by_context[tuple(tokens[i] for i in path_to(node, parents))] for node in range(N)]
    )
    if certain:
        p_NV = LogitsProcessor().probs(p_NV)
    race_LV = torch.empty(L, V, dtype=torch.float64).exponential_(generator=generator)
    drafts = DraftTree(torch.tensor([tokens]), torch.tensor([parents]))
    noise = AcceptanceNoise(torch.zeros(1, N), race_LV[None])
    path_BN, next_B = OneHot().accept(drafts, p_NV[None], noise)
    assert path_BN.dtype == torch.bool and next_B.dtype == torch.int64
    assert (path_BN[0].nonzero().flatten().tolist(), int(next_B)) == plain_walk(
        p_NV, race_LV, tokens, parents
    )
    if certain:
        greedy = Greedy().accept(drafts, p_NV[None], noise)
        assert torch.equal(greedy.path_BN, path_BN) and torch.equal(greedy.next_B, next_B)
