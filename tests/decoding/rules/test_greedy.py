"""Greedy acceptance in batches is that of each sequence.

Legend: B sequences, N nodes with the root, L levels with the root's, V vocabulary, D draft vocabulary.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.decoding.acceptance import accept_greedy
from specdec.decoding.rules import Drafts, Greedy, Noise, ancestors
from specdec.decoding.tree import DraftTree
from tests.decoding.trees import parent_lists


@settings(max_examples=150, deadline=None, derandomize=True)
@given(parent_lists(most=16), st.integers(0, 2**20))
def test_greedy_is_the_rule_for_one_sequence(parents: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    B, V, N = 3, 3, len(parents)
    tokens_BN = torch.randint(0, V, (B, N), generator=generator)
    p_BNV = torch.randint(0, 3, (B, N, V), generator=generator).float()  # ties
    drafts = Drafts(tokens_BN, torch.tensor(parents).expand(B, N))
    seen_BNN = ancestors(drafts.parents_BN)
    path_BN, next_B = Greedy().accept(drafts, p_BNV, no_noise(B, N, V))
    for b in range(B):
        tree = DraftTree(tokens_BN[b], torch.tensor(parents))
        assert torch.equal(seen_BNN[b], tree.ancestors_NN())
        wanted = accept_greedy(tree, tree.ancestors_NN(), p_BNV[b])
        assert torch.equal(path_BN[b], wanted.path_N) and next_B[b] == wanted.next_1


def no_noise(B: int, N: int, V: int, L: int = 1) -> Noise:
    return Noise(torch.zeros(B, N), torch.ones(B, L, V))
