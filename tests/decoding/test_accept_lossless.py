"""What comes out has the law of the target, exactly.

Legend: B sequences, N nodes with the root, L levels with the root's, V vocabulary, D draft vocabulary.
"""

import pytest
import torch
from torch import Tensor

from specdec.decoding.accept import (
    Accepted,
    Block,
    DraftTree,
    OneHot,
    Rule,
    WithoutReplacement,
)
from specdec.decoding.sampling import AcceptanceNoise, LogitsProcessor
from tests.decoding.enumeration import (
    CHAIN,
    PAIRS,
    SHAPES,
    THREE,
    World,
    all_trees,
    error,
    ids,
    lossless,
    pick,
    random_world,
)

LOSSLESS = [(WithoutReplacement(), "distinct"), (OneHot(), "most likely")]


@pytest.mark.parametrize("parents", SHAPES)
@pytest.mark.parametrize(("rule", "drawn"), LOSSLESS, ids=ids)
def test_what_comes_out_has_the_law_of_the_target(
    rule: Rule, drawn: str, parents: list[int]
) -> None:
    assert lossless(rule, parents, drawn)


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_a_block_is_judged_as_one(drafts: int) -> None:
    parents = [0, *range(drafts)]
    assert (
        max(
            error(Block(), random_world(seed, drafts + 1, 3, (0, 2)), parents, "distinct")
            for seed in range(3)
        )
        < 1e-12
    )
    assert max(error(Block(), world, CHAIN, "distinct") for world in hard_worlds().values()) < 1e-12


def test_a_block_accepts_more_than_draft_by_draft() -> None:
    trees = all_trees(random_world(5, levels=4, V=3, ids=(0, 1, 2)), [0, 0, 1, 2], "distinct")
    generator = torch.Generator().manual_seed(0)
    index_M = trees.probability_T.multinomial(20_000, replacement=True, generator=generator)
    drafts, p_MNV = pick(trees, index_M)
    coins_MN = torch.rand(drafts.tokens_BN.shape, generator=generator, dtype=torch.float64)
    noise = AcceptanceNoise(coins_MN, torch.ones(*p_MNV.shape, dtype=torch.float64))
    block, drafts_alone = (
        float(rule.accept(drafts, p_MNV, noise).path_BN.double().sum(1).mean())
        for rule in (Block(), WithoutReplacement())
    )
    assert block > drafts_alone + 0.02


@pytest.mark.parametrize(("V", "ids_D"), [(3, (0, 1, 2)), (5, (1, 4)), (4, (2,))])
@pytest.mark.parametrize(("rule", "drawn"), LOSSLESS, ids=ids)
def test_for_any_vocabularies(rule: Rule, drawn: str, V: int, ids_D: tuple[int, ...]) -> None:
    """Even draft vocabularies that are smaller than a node has children: fillers are passed over."""
    assert error(rule, random_world(7, V=V, ids=ids_D), [0, 0, 0], drawn) < 1e-12
    assert error(rule, random_world(8, V=V, ids=ids_D), CHAIN, drawn) < 1e-12


def hard_worlds() -> dict[str, World]:
    """Laws with zeros, equal laws, and laws that have nothing in common."""
    world, whole = random_world(3), random_world(4, ids=(0, 1, 2, 3))
    cut = LogitsProcessor(temperature=0.8, top_p=0.7)
    one_hot = [torch.zeros_like(q).scatter(-1, q.argmax(-1, keepdim=True), 1.0) for q in world.q]
    in_common = torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    return {
        "the same": whole._replace(q=whole.p),
        "the same but for rounding": whole._replace(
            q=[(p.sqrt() * p.sqrt()) / 3 * 3 for p in whole.p]
        ),
        "the target warped": world._replace(p=[cut.probs(p.log()) for p in world.p]),
        "both warped": whole._replace(
            p=[cut.probs(p.log()) for p in whole.p], q=[cut.probs(q.log()) for q in whole.q]
        ),
        "the drafter certain": world._replace(q=one_hot),
        "the target greedy": world._replace(p=[LogitsProcessor().probs(p) for p in world.p]),
        "nothing in common": whole._replace(
            p=[p * (1 - in_common) / (p * (1 - in_common)).sum(-1, keepdim=True) for p in whole.p],
            q=[q * in_common / (q * in_common).sum(-1, keepdim=True) for q in whole.q],
        ),
        "sums off one": world._replace(
            p=[p * (1 + 3e-7) for p in world.p], q=[q * (1 - 5e-7) for q in world.q]
        ),
    }


@pytest.mark.parametrize("name", hard_worlds())
@pytest.mark.parametrize(("rule", "drawn"), LOSSLESS[:2], ids=ids)
def test_at_the_edges(rule: Rule, drawn: str, name: str) -> None:
    worlds = hard_worlds()
    parents = (PAIRS, THREE)[
        (list(worlds).index(name) + (drawn == "distinct")) % 2
    ]  # by one rule one, by one the other
    assert error(rule, worlds[name], parents, drawn) < 1e-12


def test_the_rule_without_replacement_may_be_given_repeated_drafts() -> None:
    """It passes over a repeated child; given that it is new, a child has the law that the rule takes it to have."""
    assert lossless(WithoutReplacement(), THREE, "repeatedly")


class DrafterCut(WithoutReplacement):
    """Is told a q that was cut to its two most likely tokens after drawing."""

    def accept(self, drafts: DraftTree, p_BNV: Tensor, noise: AcceptanceNoise) -> Accepted:
        q_BND = LogitsProcessor(temperature=1.0, top_k=2).probs(drafts.q_BND.log())
        return super().accept(drafts._replace(q_BND=q_BND), p_BNV, noise)


def test_children_that_q_gives_nothing_are_as_if_not_drawn() -> None:
    """Those left have the law that is q on what it gives something to."""
    assert lossless(DrafterCut(), CHAIN, "distinct") and lossless(DrafterCut(), PAIRS, "distinct")
