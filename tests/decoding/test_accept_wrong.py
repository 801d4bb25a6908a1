"""Wrong rules, each caught by the check that the right ones pass.

Legend: B sequences, N nodes with the root, L levels with the root's, V vocabulary, D draft vocabulary.
"""

import pytest
import torch
from torch import Tensor

from specdec.decoding.accept import Accepted, DraftTree, OneHot, Rule, WithoutReplacement, at
from specdec.decoding.sampling import AcceptanceNoise, LogitsProcessor, draw
from tests.decoding.enumeration import CHAIN, PAIRS, errors, ids, lossless


def _sum_one(law: Tensor) -> Tensor:
    return law / law.sum(-1, keepdim=True)


class UpsideDown(WithoutReplacement):
    def takes(self, uniform_B: Tensor, r_x_B: Tensor, q_x_B: Tensor) -> Tensor:
        return uniform_B * r_x_B < q_x_B


class WithoutTheDrafter(WithoutReplacement):
    """Accepts with p(x), as if the draft were certain, but it was drawn."""

    def takes(self, uniform_B: Tensor, r_x_B: Tensor, q_x_B: Tensor) -> Tensor:
        return uniform_B < r_x_B


class TakesHalfAgain(WithoutReplacement):
    """A lenient threshold."""

    def takes(self, uniform_B: Tensor, r_x_B: Tensor, q_x_B: Tensor) -> Tensor:
        return uniform_B * q_x_B < 1.5 * r_x_B


class NoResidual(WithoutReplacement):
    def residual(self, r_BV: Tensor, q_BV: Tensor) -> Tensor:
        return r_BV


class AbsoluteResidual(WithoutReplacement):
    def residual(self, r_BV: Tensor, q_BV: Tensor) -> Tensor:
        return _sum_one((r_BV - q_BV).abs())


class ResidualOfTheDrafter(WithoutReplacement):
    def residual(self, r_BV: Tensor, q_BV: Tensor) -> Tensor:
        return _sum_one((q_BV - r_BV).clamp_min(0))


class ResidualNotNormalised(WithoutReplacement):
    def residual(self, r_BV: Tensor, q_BV: Tensor) -> Tensor:
        return (r_BV - q_BV).clamp_min(0)


class LeftNotNormalised(WithoutReplacement):
    def left(self, q_BV: Tensor, x_B1: Tensor) -> Tensor:
        return q_BV.scatter(1, x_B1, 0.0)


class KeepsTheRefused(WithoutReplacement):
    def left(self, q_BV: Tensor, x_B1: Tensor) -> Tensor:
        return q_BV


class TargetColderHere(WithoutReplacement):
    def accept(self, drafts: DraftTree, p_BNV: Tensor, noise: AcceptanceNoise) -> Accepted:
        return super().accept(drafts, _sum_one(p_BNV**2), noise)


class DrafterColderHere(WithoutReplacement):
    def accept(self, drafts: DraftTree, p_BNV: Tensor, noise: AcceptanceNoise) -> Accepted:
        return super().accept(drafts._replace(q_BND=_sum_one(drafts.q_BND**2)), p_BNV, noise)


class TopPHere(WithoutReplacement):
    def accept(self, drafts: DraftTree, p_BNV: Tensor, noise: AcceptanceNoise) -> Accepted:
        return super().accept(
            drafts, LogitsProcessor(temperature=1.0, top_p=0.8).probs(p_BNV.log()), noise
        )


class DrafterOfTheNextNode(WithoutReplacement):
    def accept(self, drafts: DraftTree, p_BNV: Tensor, noise: AcceptanceNoise) -> Accepted:
        return super().accept(drafts._replace(q_BND=drafts.q_BND.roll(-1, 1)), p_BNV, noise)


class TargetOfTheNodeBefore(WithoutReplacement):
    def accept(self, drafts: DraftTree, p_BNV: Tensor, noise: AcceptanceNoise) -> Accepted:
        return super().accept(drafts, p_BNV.roll(1, 1), noise)


class BonusOfTheRoot(WithoutReplacement):
    def accept(self, drafts: DraftTree, p_BNV: Tensor, noise: AcceptanceNoise) -> Accepted:
        path_BN, next_B = super().accept(drafts, p_BNV, noise)
        return Accepted(
            path_BN,
            torch.where(path_BN[:, -1], draw(p_BNV[:, 0], noise.exponential_BLV[:, -1]), next_B),
        )


class BonusOfTheParent(WithoutReplacement):
    """The law that the last draft was judged by, not the one after it."""

    def accept(self, drafts: DraftTree, p_BNV: Tensor, noise: AcceptanceNoise) -> Accepted:
        path_BN, next_B = super().accept(drafts, p_BNV, noise)
        wrong_B = draw(at(p_BNV, drafts.parents_BN[:, -1]), noise.exponential_BLV[:, -1])
        return Accepted(path_BN, torch.where(path_BN[:, -1], wrong_B, next_B))


class CorrectionWithoutResidual(WithoutReplacement):
    def accept(self, drafts: DraftTree, p_BNV: Tensor, noise: AcceptanceNoise) -> Accepted:
        path_BN = super().accept(drafts, p_BNV, noise).path_BN
        last_B = (path_BN * torch.arange(1, path_BN.shape[1] + 1)).argmax(1)
        return Accepted(path_BN, draw(at(p_BNV, last_B), noise.exponential_BLV[:, 0]))


class SiblingsByToken(WithoutReplacement):
    """Tries the two first children in the order of their ids, not in that of drawing."""

    def accept(self, drafts: DraftTree, p_BNV: Tensor, noise: AcceptanceNoise) -> Accepted:
        N = drafts.tokens_BN.shape[1]
        order_N = torch.arange(N)
        swapped_N = order_N.clone()
        swapped_N[1], swapped_N[2] = 2, 1
        swap_B1 = (drafts.tokens_BN[:, 1] > drafts.tokens_BN[:, 2])[:, None]
        order_BN = torch.where(swap_B1, swapped_N, order_N)
        path_BN, next_B = super().accept(
            drafts._replace(tokens_BN=drafts.tokens_BN.gather(1, order_BN)), p_BNV, noise
        )
        return Accepted(path_BN.gather(1, order_BN), next_B)


class DraftIdsAsTargetIds(WithoutReplacement):
    def accept(self, drafts: DraftTree, p_BNV: Tensor, noise: AcceptanceNoise) -> Accepted:
        return super().accept(drafts._replace(ids_D=torch.arange(len(drafts.ids_D))), p_BNV, noise)


class OneHotDrawsAgain(OneHot):
    """The token after the walk is drawn anew, so that refused children come back."""

    def accept(self, drafts: DraftTree, p_BNV: Tensor, noise: AcceptanceNoise) -> Accepted:
        path_BN = super().accept(drafts, p_BNV, noise).path_BN
        last_B = (path_BN * torch.arange(1, path_BN.shape[1] + 1)).argmax(1)
        return Accepted(path_BN, draw(at(p_BNV, last_B), noise.exponential_BLV[:, -1]))


class OneHotOfTheRoot(OneHot):
    def accept(self, drafts: DraftTree, p_BNV: Tensor, noise: AcceptanceNoise) -> Accepted:
        return super().accept(drafts, p_BNV[:, :1].expand_as(p_BNV), noise)


class OneHotWarmer(OneHot):
    def accept(self, drafts: DraftTree, p_BNV: Tensor, noise: AcceptanceNoise) -> Accepted:
        return super().accept(drafts, _sum_one(p_BNV.sqrt()), noise)


RIGHT: dict[str, Rule] = {
    "most likely": OneHot(),
    "distinct": WithoutReplacement(),
}
TWO = [0, 0, 0]
WRONG = [
    (UpsideDown(), CHAIN, "distinct"),
    (WithoutTheDrafter(), CHAIN, "distinct"),
    (TakesHalfAgain(), CHAIN, "distinct"),
    (NoResidual(), CHAIN, "distinct"),
    (AbsoluteResidual(), CHAIN, "distinct"),
    (ResidualOfTheDrafter(), CHAIN, "distinct"),
    (ResidualNotNormalised(), TWO, "distinct"),
    (LeftNotNormalised(), TWO, "distinct"),
    (KeepsTheRefused(), PAIRS, "distinct"),
    (TargetColderHere(), CHAIN, "distinct"),
    (DrafterColderHere(), CHAIN, "distinct"),
    (TopPHere(), CHAIN, "distinct"),
    (DrafterOfTheNextNode(), CHAIN, "distinct"),
    (TargetOfTheNodeBefore(), CHAIN, "distinct"),
    (BonusOfTheRoot(), CHAIN, "distinct"),
    (BonusOfTheParent(), CHAIN, "distinct"),
    (CorrectionWithoutResidual(), CHAIN, "distinct"),
    (SiblingsByToken(), TWO, "distinct"),
    (DraftIdsAsTargetIds(), CHAIN, "distinct"),
    (WithoutReplacement(), CHAIN, "most likely"),  # not drawn at all
    (OneHotDrawsAgain(), CHAIN, "most likely"),
    (OneHotOfTheRoot(), PAIRS, "most likely"),
    (OneHotWarmer(), PAIRS, "most likely"),
]


@pytest.mark.parametrize(("rule", "parents", "drawn"), WRONG, ids=ids)
def test_the_same_check_fails_a_wrong_rule(rule: Rule, parents: list[int], drawn: str) -> None:
    right = RIGHT[drawn]
    assert lossless(right, parents, drawn)
    assert not lossless(rule, parents, drawn)
    assert min(errors(rule, parents, drawn)) > 1e-3  # by far
