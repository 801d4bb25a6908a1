"""Every rule, in batches: independence, padding, dtypes, compiling.

Legend: B sequences, N nodes with the root, L levels with the root's, V vocabulary, D draft vocabulary.
"""

import pytest
import torch
from torch import Tensor

from specdec.decoding.accept import DraftTree, Greedy, OneHot, Rule, WithoutReplacement
from specdec.decoding.sampling import AcceptanceNoise
from tests.decoding.enumeration import ids, random_law


def batch(
    B: int, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[DraftTree, Tensor, AcceptanceNoise]:
    """Trees of different shapes; drafts are any tokens, which a rule need not like."""
    generator = torch.Generator().manual_seed(seed)
    V, N, L, ids_D = 7, 6, 6, torch.tensor([0, 2, 3, 5])
    parents = [
        [0, *(int(torch.randint(0, i, (), generator=generator)) for i in range(1, N))]
        for _ in range(B)
    ]
    tokens_BN = ids_D[torch.randint(0, len(ids_D), (B, N), generator=generator)]
    p_BNV, q_BND = random_law((B, N, V), generator), random_law((B, N, len(ids_D)), generator)
    noise = AcceptanceNoise(
        torch.rand(B, N, generator=generator, dtype=torch.float64).to(dtype),
        torch.empty(B, L, V, dtype=torch.float64).exponential_(generator=generator).to(dtype),
    )
    return (
        DraftTree(tokens_BN, torch.tensor(parents), q_BND.to(dtype), ids_D),
        p_BNV.to(dtype),
        noise,
    )


RULES = [Greedy(), OneHot(), WithoutReplacement()]


def some(
    drafts: DraftTree, p_BNV: Tensor, noise: AcceptanceNoise, rows: list[int]
) -> tuple[DraftTree, Tensor, AcceptanceNoise]:
    few = DraftTree(
        drafts.tokens_BN[rows], drafts.parents_BN[rows], drafts.q_BND[rows], drafts.ids_D
    )
    return few, p_BNV[rows], AcceptanceNoise(noise.uniform_BN[rows], noise.exponential_BLV[rows])


@pytest.mark.parametrize("rule", RULES, ids=ids)
def test_no_sequence_sees_another(rule: Rule) -> None:
    everything = batch(64, dtype=torch.float32)
    whole = rule.accept(*everything)
    assert 1 < float(whole.path_BN.sum(1).float().mean()) < 5
    for rows in ([5], [63, 0, 5], list(range(40, 50))):
        part = rule.accept(*some(*everything, rows))
        assert torch.equal(part.path_BN, whole.path_BN[rows]) and torch.equal(
            part.next_B, whole.next_B[rows]
        )


@pytest.mark.parametrize("rule", RULES, ids=ids)
def test_float32_decides_as_float64_but_for_rounding(rule: Rule) -> None:
    wide, narrow = rule.accept(*batch(4000)), rule.accept(*batch(4000, dtype=torch.float32))
    assert (wide.path_BN != narrow.path_BN).any(1).sum() + (wide.next_B != narrow.next_B).sum() <= 2


@pytest.mark.parametrize("rule", RULES, ids=ids)
def test_padding_and_rows_without_children_are_not_looked_at(rule: Rule) -> None:
    drafts, p_BNV, noise = batch(300)
    before = rule.accept(drafts, p_BNV, noise)
    pad_B2 = torch.tensor([6, 7]).expand(300, 2)
    nan_B2V, nan_B2D = torch.full((300, 2, 7), torch.nan), torch.full((300, 2, 4), torch.nan)
    is_parent_BN = (drafts.parents_BN[:, 1:, None] == torch.arange(6)).any(1)
    q_BND = torch.where(is_parent_BN[..., None], drafts.q_BND, torch.nan)
    padded = DraftTree(
        torch.cat([drafts.tokens_BN, torch.zeros_like(pad_B2)], 1),
        torch.cat([drafts.parents_BN, pad_B2], 1),
        torch.cat([q_BND, nan_B2D], 1),
        drafts.ids_D,
    )
    uniform_BN = torch.cat([noise.uniform_BN, torch.zeros(300, 2)], 1)
    after = rule.accept(
        padded, torch.cat([p_BNV, nan_B2V], 1), noise._replace(uniform_BN=uniform_BN)
    )
    assert torch.equal(after.path_BN[:, :6], before.path_BN) and not after.path_BN[:, 6:].any()
    assert torch.equal(after.next_B, before.next_B)
