"""Every rule, in batches: independence, padding, dtypes, compiling.

Legend: B sequences, N nodes with the root, L levels with the root's, V vocabulary, D draft vocabulary.
"""

import pytest
import torch
from torch import Tensor

from specdec.decoding.rules import Drafts, Greedy, Noise, OneHot, Rule, WithoutReplacement, WithReplacement
from tests.decoding.rules.lossless import CHAIN, ids, random_law
from tests.decoding.trees import path_to

SAMPLED = [(WithReplacement(), "repeatedly"), (WithoutReplacement(), "distinct")]


def batch(B: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Drafts, Tensor, Noise]:
    """Trees of different shapes; drafts are any tokens, which a rule need not like."""
    generator = torch.Generator().manual_seed(seed)
    V, N, L, ids_D = 7, 6, 6, torch.tensor([0, 2, 3, 5])
    parents = [[0, *(int(torch.randint(0, i, (), generator=generator)) for i in range(1, N))] for _ in range(B)]
    tokens_BN = ids_D[torch.randint(0, len(ids_D), (B, N), generator=generator)]
    p_BNV, q_BND = random_law((B, N, V), generator), random_law((B, N, len(ids_D)), generator)
    noise = Noise(
        torch.rand(B, N, generator=generator, dtype=torch.float64).to(dtype),
        torch.empty(B, L, V, dtype=torch.float64).exponential_(generator=generator).to(dtype),
    )
    return Drafts(tokens_BN, torch.tensor(parents), q_BND.to(dtype), ids_D), p_BNV.to(dtype), noise


RULES = [Greedy(), OneHot(), WithReplacement(), WithoutReplacement()]


def some(drafts: Drafts, p_BNV: Tensor, noise: Noise, rows: list[int]) -> tuple[Drafts, Tensor, Noise]:
    few = Drafts(drafts.tokens_BN[rows], drafts.parents_BN[rows], drafts.q_BND[rows], drafts.ids_D)
    return few, p_BNV[rows], Noise(noise.coin_BN[rows], noise.race_BLV[rows])


@pytest.mark.parametrize("rule", RULES, ids=ids)
def test_no_sequence_sees_another(rule: Rule) -> None:
    everything = batch(64, dtype=torch.float32)
    whole = rule.accept(*everything)
    assert 1 < float(whole.path_BN.sum(1).float().mean()) < 5
    for rows in ([5], [63, 0, 5], list(range(40, 50))):
        part = rule.accept(*some(*everything, rows))
        assert torch.equal(part.path_BN, whole.path_BN[rows]) and torch.equal(part.next_B, whole.next_B[rows])


@pytest.mark.parametrize("rule", [WithReplacement(), WithoutReplacement()], ids=ids)
def test_the_last_token_is_drawn_with_the_race_of_its_level(rule: Rule) -> None:
    """So that noise made for a place in the text is used for that place."""
    drafts, p_BNV, noise = batch(500)
    before = rule.accept(drafts, p_BNV, noise)
    elsewhere_BL = torch.arange(noise.race_BLV.shape[1]) != before.path_BN.sum(1, keepdim=True) - 1
    other_BLV = torch.where(elsewhere_BL[..., None], noise.race_BLV.flip(-1), noise.race_BLV)
    assert torch.equal(rule.accept(drafts, p_BNV, noise._replace(race_BLV=other_BLV)).next_B, before.next_B)
    other_BLV = torch.where(elsewhere_BL[..., None], noise.race_BLV, noise.race_BLV.flip(-1))
    assert (rule.accept(drafts, p_BNV, noise._replace(race_BLV=other_BLV)).next_B != before.next_B).float().mean() > 0.5


@pytest.mark.parametrize("rule", RULES, ids=ids)
def test_a_path_is_a_line_from_the_root(rule: Rule) -> None:
    drafts, p_BNV, noise = batch(500)
    path_BN = rule.accept(drafts, p_BNV, noise).path_BN
    for path_N, parents_N in zip(path_BN, drafts.parents_BN.tolist(), strict=True):
        nodes = path_N.nonzero().flatten().tolist()
        assert nodes == path_to(nodes[-1], parents_N)


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
    padded = Drafts(
        torch.cat([drafts.tokens_BN, torch.zeros_like(pad_B2)], 1),
        torch.cat([drafts.parents_BN, pad_B2], 1),
        torch.cat([q_BND, nan_B2D], 1),
        drafts.ids_D,
    )
    coin_BN = torch.cat([noise.coin_BN, torch.zeros(300, 2)], 1)
    after = rule.accept(padded, torch.cat([p_BNV, nan_B2V], 1), noise._replace(coin_BN=coin_BN))
    assert torch.equal(after.path_BN[:, :6], before.path_BN) and not after.path_BN[:, 6:].any()
    assert torch.equal(after.next_B, before.next_B)


@pytest.mark.parametrize("rule", RULES, ids=ids)
def test_it_compiles_into_one_graph(rule: Rule) -> None:
    inputs = batch(8)
    compiled = torch.compile(rule.accept, fullgraph=True, backend="eager")(*inputs)
    wanted = rule.accept(*inputs)
    assert torch.equal(compiled.path_BN, wanted.path_BN) and torch.equal(compiled.next_B, wanted.next_B)


def test_a_rounding_residual_of_nothing_leaves_the_law() -> None:
    """Equal laws, and a coin that no right program would reject at but for rounding."""
    law = torch.tensor([[0.25, 0.75]])
    assert torch.equal(WithoutReplacement().residual(law, law), law)


@pytest.mark.parametrize(("rule", "drawn"), SAMPLED, ids=ids)
def test_a_drafter_with_the_law_of_the_target_is_never_refused(rule: Rule, drawn: str) -> None:
    generator = torch.Generator().manual_seed(0)
    B, V = 20_000, 50
    p_BNV = random_law((3, V), generator).to(torch.float32).expand(B, -1, -1)
    child = [
        rule.children(p_BNV[:, node], 1, torch.empty(B, 1, V).exponential_(generator=generator))[:, 0]
        for node in range(2)
    ]
    drafts = Drafts(
        torch.stack([torch.zeros_like(child[0]), *child], 1), torch.tensor(CHAIN).expand(B, 3), p_BNV, torch.arange(V)
    )
    verdict = rule.accept(drafts, p_BNV, Noise(torch.rand(B, 3, generator=generator), torch.ones(B, 3, V)))
    assert verdict.path_BN.all()
