"""The acceptance rules with real noise: what comes out, counted.

Legend: B draws at once, N nodes with the root, L levels with the root's, V vocabulary, D draft vocabulary.
"""

import pytest
import torch
from torch import Tensor

from specdec.decoding.rules import Drafts, Noise, OneHot, Rule, WithoutReplacement, WithReplacement
from tests.decoding.rules.lossless import depths, emission, random_law

V, D, B = 64, 48, 20_000


def p_value(counts: Tensor, expected: Tensor) -> float:
    """Of Pearson's chi-square; what is expected less than ten times is one bin."""
    rare = expected < 10
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    statistic = ((counts - expected) ** 2 / expected.clamp_min(1e-9)).sum()
    freedom = torch.tensor(len(counts) - 1.0, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def p_values(counts: Tensor, expected: Tensor) -> float:
    """The lower of that of all pairs, and that of the first tokens alone, a sharper test of fewer bins."""
    return min(p_value(counts, expected), p_value(*(x.view(V, V).sum(1) for x in (counts, expected))))


def count_pairs(rule: Rule, parents: list[int], seed: int, draws: int) -> tuple[Tensor, Tensor, float]:
    """How often each pair of tokens came out after the root, how often it should, and the mean of accepted drafts."""
    generator = torch.Generator().manual_seed(seed)

    def exponential(*shape: int) -> Tensor:
        return -torch.log1p(-torch.rand(shape, generator=generator))  # several times as fast as exponential_

    ids_D = torch.randperm(V, generator=generator)[:D].sort().values
    p_VV = random_law((V + 1, V), generator, 0.4)  # the law after a token; the last row is the root's
    q_VD = (p_VV[:, ids_D].log() + torch.randn(V + 1, D, generator=generator)).softmax(-1)
    expected = draws * (p_VV[-1, :, None] * p_VV[:-1]).flatten()
    p_VV, q_VD, cumulated_VV = p_VV.float(), q_VD.float(), p_VV.cumsum(-1)
    N, depth = len(parents), depths(parents)
    L, races = max(depth) + 1, max(depth) + 1 if isinstance(rule, OneHot) else 1  # else all levels may share one
    counts, accepted = torch.zeros(V * V, dtype=torch.float64), 0.0
    for _ in range(draws // B):
        tokens = [torch.full((B,), V)]
        for parent in sorted(set(parents)):
            width = parents.count(parent) - (parent == 0)
            q_BD = q_VD[tokens[parent]]
            tokens += ids_D[rule.children(q_BD, width, exponential(B, rule.races(width), D))].unbind(1)
        tokens_BN = torch.stack(tokens, 1)
        drafts = Drafts(tokens_BN, torch.tensor(parents).expand(B, N), q_VD[tokens_BN], ids_D)
        noise = Noise(torch.rand(B, N, generator=generator), exponential(B, races, V).expand(-1, L, -1))
        verdict = rule.accept(drafts, p_VV[tokens_BN], noise)
        accepted += float(verdict.path_BN.sum()) / B - 1
        out_BL = emission(verdict, tokens_BN, depth)
        coin_B1 = torch.rand(B, 1, generator=generator, dtype=torch.float64)
        on_B = torch.searchsorted(cumulated_VV[out_BL[:, 0]], coin_B1)[:, 0].clamp_max(V - 1)  # continued by the target
        second_B = torch.where(out_BL[:, 1] < 0, on_B, out_BL[:, 1])
        counts += torch.bincount(out_BL[:, 0] * V + second_B, minlength=V * V)
    return counts, expected, accepted / (draws // B)


class KeepsTheLaw(WithoutReplacement):
    """Forgets the residual."""

    def residual(self, r_BV: Tensor, q_BV: Tensor) -> Tensor:
        return r_BV


class Misjudged(WithReplacement):
    """Children drawn without replacement."""

    def races(self, width: int) -> int:
        return WithoutReplacement().races(width)

    def children(self, law_BD: Tensor, width: int, race_BRD: Tensor) -> Tensor:
        return WithoutReplacement().children(law_BD, width, race_BRD)


CASES = [
    (OneHot(), [0, 0, 0]),
    (WithoutReplacement(), [0, 0, 1]),
    (WithoutReplacement(), [0, 0, 0]),
    (WithReplacement(), [0, 0, 0]),
]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("rule", "parents"), CASES)
def test_a_million_pairs_of_tokens_are_the_targets(rule: Rule, parents: list[int], seed: int) -> None:
    """A million in five worlds."""
    counts, expected, accepted = count_pairs(rule, parents, seed, 200_000)
    assert p_values(counts, expected) > 1e-6
    assert 0.03 < accepted < 1.9  # neither never nor always


@pytest.mark.parametrize(("rule", "parents"), [(KeepsTheLaw(), [0, 0, 1]), (Misjudged(), [0, 0, 0])])
def test_the_count_tells_wrong_from_right(rule: Rule, parents: list[int]) -> None:
    assert p_values(*count_pairs(rule, parents, 0, 200_000)[:2]) < 1e-12
