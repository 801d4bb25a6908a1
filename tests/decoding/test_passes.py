"""Two passes in a row have the law of the target: the noise of the second is none that the first has read.

Legend: B sequences, K drafts, V vocabulary.
"""

import pytest
import torch
from torch import Tensor

from specdec.decoding import AdaptiveChain, Chain, ChildSampling, DraftShape
from specdec.decoding.accept import Block, Rule, WithoutReplacement
from specdec.decoding.sampling import DRAFT, acceptance_noise, draw_distinct, exponential
from specdec.drafter import DraftVocab
from specdec.drafting.mode import Frontier
from tests.decoding.enumeration import ids, random_law
from tests.decoding.test_draws import p_value

V = 3
K = 2
B = 100_000
P_VV = random_law((V, V), torch.Generator().manual_seed(5), 0.5)  # after each token
Q_VV = random_law((V, V), torch.Generator().manual_seed(6), 0.5)


class ByPlace(ChildSampling):
    """Wrong: the noise of a draft is that of its place, which the next pass reads again."""

    def find(self, logits_BKD: Tensor, width: int, level: int) -> tuple[Tensor, Tensor]:
        q_BKD = logits_BKD.softmax(-1)
        place_B1 = (self.place_B + level)[:, None]
        return draw_distinct(q_BKD, exponential(self.seed_B, place_B1, DRAFT, V), width), q_BKD


def one_pass(
    rule: Rule, shape: DraftShape, kind: type[ChildSampling], seed_B: Tensor, place_B: Tensor, root_B: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The first two tokens that come out, and how many there are."""
    start = Frontier(torch.zeros(len(root_B), 1, 1), Q_VV[root_B].log()[:, None])

    def expand(ids_BK: Tensor, h_BKH: Tensor, seen: Tensor, depth: Tensor) -> Frontier:
        return Frontier(h_BKH, Q_VV[ids_BK[:, 0]].log()[:, None])

    children = kind(rule, 1.0, seed_B, place_B)
    tree = shape.grow(root_B, start, expand, DraftVocab(torch.arange(V), V), children)
    nodes = tree.tokens_BN.shape[1]
    noise = acceptance_noise(seed_B, place_B, nodes, K + 1, V)
    verdict = rule.accept(tree, P_VV[tree.tokens_BN], noise)
    count_B = verdict.path_BN.sum(-1)
    drafts_BN = torch.cat([tree.tokens_BN[:, 1:], verdict.next_B[:, None].expand(-1, 2)], 1)
    order_2 = torch.arange(2)
    out_B2 = torch.where(order_2 < count_B[:, None] - 1, drafts_BN[:, :2], verdict.next_B[:, None])
    return out_B2, count_B


def counted(rule: Rule, shape: DraftShape, kind: type[ChildSampling] = ChildSampling) -> float:
    """The p-value of pairs of tokens, of which one pass or two have made both."""
    seed_B = torch.arange(B)
    root_B = torch.zeros_like(seed_B)
    pairs_B2, count_B = one_pass(rule, shape, kind, seed_B, root_B + 10, root_B)
    short_B = count_B == 1
    next_B2, _ = one_pass(
        rule, shape, kind, seed_B[short_B], root_B[short_B] + 11, pairs_B2[short_B, 0]
    )
    pairs_B2[short_B, 1] = next_B2[:, 0]
    counts = torch.bincount(pairs_B2[:, 0] * V + pairs_B2[:, 1], minlength=V * V).double()
    return p_value(counts, (P_VV[0][:, None] * P_VV).flatten() * B)


@pytest.mark.parametrize("shape", [Chain(K), AdaptiveChain(K, 0.5)], ids=lambda shape: shape.name)
@pytest.mark.parametrize("rule", [WithoutReplacement(), Block()], ids=ids)
def test_two_passes_have_the_law_of_the_target(rule: Rule, shape: DraftShape) -> None:
    assert counted(rule, shape) > 1e-4


def test_noise_that_is_read_twice_is_found() -> None:
    """By blocks, which refuse a draft by what stands behind it."""
    assert counted(Block(), Chain(K), ByPlace) < 1e-9
