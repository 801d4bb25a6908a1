"""Chains that end where the drafter is unsure: where they end, what a batch makes of it, and that nothing is biased.

Legend: B sequences, N nodes with the root, V vocabulary, D draft vocabulary.
"""

import itertools
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from specdec.decoding import (
    AdaptiveChain,
    Chain,
    ChildSampling,
    DraftTree,
    PlainDecoder,
    Request,
    Sampling,
    SpeculativeDecoder,
)
from specdec.decoding.accept import Block, Rule, WithoutReplacement
from specdec.decoding.sampling import AcceptanceNoise
from specdec.drafter import DraftVocab
from specdec.drafting.mode import Frontier
from tests.decoding.enumeration import Trees, World, chain_law, ids, law_of, random_world
from tests.decoding.oracle import Law, draft_vocab, grow, grow_batch
from tests.perfect import disturb, markov_target, perfect_drafter
from tests.tiny import presets

DEPTH = 2
# confidences of the drafts on the way: products 0.9, 0.72, 0.36, 0.324, 0.162
SURE = (0.9, 0.8, 0.5, 0.9, 0.5)


def law_with(confidences: tuple[float, ...]) -> Law:
    """Two tokens, the likelier one of this probability at each level."""
    return lambda path: torch.tensor([confidences[len(path)], 1 - confidences[len(path)]]).log()


@pytest.mark.parametrize(
    ("shape", "drafts", "steps"),
    [
        (AdaptiveChain(5, 0.0), 5, 4),
        (AdaptiveChain(5, 0.5), 3, 2),  # the third draft, after which the product is lower, stays
        (AdaptiveChain(5, 0.34), 4, 3),
        (AdaptiveChain(5, 0.95), 1, 0),  # the first has been made by then
        (AdaptiveChain(5, 0.0, 0.6), 2, 2),  # the third is left out, once the drafter has run
        (AdaptiveChain(5, 0.0, 0.95), 0, 0),
        (AdaptiveChain(5, 0.34, 0.6), 2, 2),
    ],
)
def test_a_chain_ends_where_the_drafter_is_unsure(
    shape: AdaptiveChain, drafts: int, steps: int
) -> None:
    tree, oracle = grow(shape, law_with(SURE), draft_vocab(2))
    chain, _ = grow(Chain(5), law_with(SURE), draft_vocab(2))
    assert torch.equal(tree.tokens_BN, chain.tokens_BN[:, : drafts + 1])
    assert torch.equal(tree.parents_BN, chain.parents_BN[:, : drafts + 1])
    assert len(oracle.levels) == steps


def test_one_graph_never_holds_a_chain_that_reads_its_length() -> None:
    for depth in (1, 2, 8):
        for least in (0.0, 0.5):
            assert len(AdaptiveChain(depth, 0.3, least).sizes) > 1


class Branching(AdaptiveChain):
    """A tree, as the session must believe."""

    in_order = False


def test_a_tree_that_reads_its_depth_is_not_compiled() -> None:
    target = markov_target("llama", 0.45)
    drafter = perfect_drafter(target, presets()["eagle3_1"])
    SpeculativeDecoder(target, drafter, Branching(3))
    with pytest.raises(ValueError, match="--compile off"):
        SpeculativeDecoder(target, drafter, Branching(3), compiled=True)


def test_a_batch_is_as_long_as_its_longest_chain() -> None:
    laws = [law_with(SURE), law_with((0.4, 0.9, 0.9, 0.9, 0.9)), law_with((0.9,) * 5)]
    children = ChildSampling(
        WithoutReplacement(), 1.0, torch.arange(3), torch.zeros(3, dtype=torch.int64)
    )
    tree, oracle = grow_batch(AdaptiveChain(4, 0.7), laws, draft_vocab(2), children)
    assert tree.parents_BN.tolist() == [[0, 0, 1, 2, 4], [0, 0, 2, 3, 4], [0, 0, 1, 2, 3]]
    assert tree.q_BND is not None
    assert (tree.q_BND.sum(-1) > 0).tolist() == [
        [True, True, True, False, False],
        [True, False, False, False, False],
        [True, True, True, True, False],
    ]
    assert {len(levels) for levels in oracle.all_levels} == {3}


class Forced(NamedTuple):
    """Draws what it is told to, a row for each sequence."""

    drafts_BK: Tensor

    def find(self, logits_BKD: Tensor, width: int, level: int) -> tuple[Tensor, Tensor]:
        return self.drafts_BK[:, level, None, None], logits_BKD.softmax(-1)


class DrawnFirst(AdaptiveChain):
    """A wrong one: the draft is left out if the token that was drawn is unlikely."""

    def grow(self, *arguments) -> DraftTree:  # type: ignore[no-untyped-def]
        tree = super().grow(*arguments)
        assert tree.q_BND is not None and tree.ids_D is not None
        order_N = torch.arange(tree.tokens_BN.shape[1])
        column_BN1 = torch.searchsorted(tree.ids_D, tree.tokens_BN)[..., None].clamp_max(
            len(tree.ids_D) - 1
        )
        likely_BN = tree.q_BND.roll(1, 1).gather(-1, column_BN1)[..., 0] >= 0.3
        stays_BN = torch.cat([likely_BN[:, :1] | True, likely_BN[:, 1:]], 1).cumprod(1).bool()
        parents_BN = torch.where(stays_BN, tree.parents_BN, order_N)
        is_parent_BN = (parents_BN[:, 1:, None] == order_N).any(1)
        return tree._replace(parents_BN=parents_BN, q_BND=tree.q_BND * is_parent_BN[..., None])


def grown(shape: AdaptiveChain, world: World) -> tuple[DraftTree, Tensor]:
    """The trees of all ways to draw, as a batch, and the probability of each."""
    every_BK = torch.tensor([*itertools.product(range(len(world.ids_D)), repeat=DEPTH)])
    target_BK = world.ids_D[every_BK]

    def law(level: int) -> Tensor:
        return torch.stack([world.q[level][tuple(row[:level].tolist())] for row in target_BK])

    def expand(ids_BK: Tensor, h_BKH: Tensor, seen: Tensor, depth: Tensor) -> Frontier:
        level = seen.shape[-1]
        return Frontier(h_BKH, law(level).log()[:, None])

    root_B = torch.zeros(len(every_BK), dtype=torch.int64)
    start = Frontier(torch.zeros(len(every_BK), 1, 1), law(0).log()[:, None])
    vocab = DraftVocab(world.ids_D, world.p[0].shape[-1])
    tree = shape.grow(root_B, start, expand, vocab, Forced(every_BK))  # type: ignore[arg-type]
    probability_B = torch.stack(
        [law(level).gather(1, every_BK[:, level, None])[:, 0] for level in range(DEPTH)]
    ).prod(0)
    return tree, probability_B


def law_out(rule: Rule, world: World, shape: AdaptiveChain) -> tuple[Tensor, set[int]]:
    """The law of the first tokens that come out, continued by the target; and how many drafts there were."""
    tree, probability_B = grown(shape, world)
    assert tree.q_BND is not None
    N = tree.tokens_BN.shape[1]
    drafts_B = (tree.parents_BN != torch.arange(N)).sum(1)
    total = torch.zeros((4,) * (DEPTH + 1), dtype=torch.float64)
    for drafts in drafts_B.unique().tolist():
        rows = drafts_B == drafts
        nodes = drafts + 1
        tokens_TN = tree.tokens_BN[rows, :nodes]
        p_TNV = torch.stack(
            [
                torch.stack([world.p[n][tuple(row[1 : n + 1].tolist())] for n in range(nodes)])
                for row in tokens_TN
            ]
        )
        cut = DraftTree(
            tokens_TN, tree.parents_BN[rows, :nodes], tree.q_BND[rows, :nodes], world.ids_D
        )
        parents = [0, *range(drafts)]
        out = law_of(rule, world, Trees(cut, p_TNV, probability_B[rows], parents))
        for level in range(nodes, DEPTH + 1):
            out = out[..., None] * world.p[level]
        total += out
        assert_unused_nodes_are_nothing(rule, tree, rows, p_TNV)
    return total, set(drafts_B.tolist())


def assert_unused_nodes_are_nothing(
    rule: Rule, tree: DraftTree, rows: Tensor, p_TNV: Tensor
) -> None:
    """Rows of a batch earn what they earn without the nodes that they leave unused, whatever the target says there."""
    assert tree.q_BND is not None
    T, nodes, V = p_TNV.shape
    N = tree.tokens_BN.shape[1]
    generator = torch.Generator().manual_seed(0)
    times = 40
    noise = AcceptanceNoise(
        torch.rand(times * T, N, generator=generator, dtype=torch.float64),
        torch.empty(times * T, N, V, dtype=torch.float64).exponential_(generator=generator),
    )
    p_BNV = torch.full((times * T, N, V), 1 / V, dtype=torch.float64)
    p_BNV[:, :nodes] = p_TNV.repeat(times, 1, 1)
    columns = [x[rows].repeat(times, *[1] * (x.dim() - 1)) for x in tree[:3]]  # type: ignore[union-attr]
    whole = rule.accept(DraftTree(*columns, tree.ids_D), p_BNV, noise)
    cut = DraftTree(*(x[:, :nodes] for x in columns), tree.ids_D)
    alone = rule.accept(
        cut, p_BNV[:, :nodes], noise._replace(uniform_BN=noise.uniform_BN[:, :nodes])
    )
    assert torch.equal(whole.path_BN[:, :nodes], alone.path_BN)
    assert not whole.path_BN[:, nodes:].any()
    assert torch.equal(whole.next_B, alone.next_B)


THRESHOLDS = [AdaptiveChain(DEPTH, 0.55), AdaptiveChain(DEPTH, 0.0, 0.55)]


@pytest.mark.parametrize("shape", THRESHOLDS, ids=lambda shape: shape.name)
@pytest.mark.parametrize("rule", [WithoutReplacement(), Block()], ids=ids)
def test_what_comes_out_has_the_law_of_the_target(rule: Rule, shape: AdaptiveChain) -> None:
    lengths = set[int]()
    for seed in range(4):
        world = random_world(seed)
        out, drafts = law_out(rule, world, shape)
        assert float((out - chain_law(world.p)).abs().max()) < 1e-12
        lengths |= drafts
    assert lengths == ({1, 2} if shape.min_product else {0, 1, 2})


@pytest.mark.parametrize("rule", [WithoutReplacement(), Block()], ids=ids)
def test_to_leave_out_a_draft_that_was_drawn_is_found_to_be_biased(rule: Rule) -> None:
    world = random_world(0)
    out, _ = law_out(rule, world, DrawnFirst(DEPTH, 0.0))
    assert float((out - chain_law(world.p)).abs().max()) > 1e-3


PROMPTS = [[3, 4, 5], [9], [7, 50, 2, 31, 19]]


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0)], ids=["greedy", "drawn"]
)
@pytest.mark.parametrize(
    "shape", [AdaptiveChain(6, 0.4), AdaptiveChain(6, 0.0, 0.6)], ids=lambda shape: shape.name
)
def test_a_batch_says_what_the_target_says_and_counts_what_was_drafted(
    shape: AdaptiveChain, sampling: Sampling
) -> None:
    """Token for token, with as many drafts in every pass as each sequence has alone."""
    target = markov_target("llama", 0.45)
    spec = replace(presets()["eagle3_1"], draft_vocab_size=50)
    drafter = disturb(perfect_drafter(target, spec, sharpness=1.5), 0.45)
    requests = [Request(prompt, 20, seed) for seed, prompt in enumerate(PROMPTS)]
    plain = dict(PlainDecoder(target, sampling).generate_all(requests, ()))
    alone = dict(SpeculativeDecoder(target, drafter, shape, sampling).generate_all(requests, ()))
    decoder = SpeculativeDecoder(target, drafter, shape, sampling, batch=3)
    together = dict(decoder.generate_all(requests, ()))
    drafted = set[int]()
    for number in range(len(PROMPTS)):
        answer = together[number]
        assert answer.ids == alone[number].ids == plain[number].ids
        assert answer.drafted == alone[number].drafted
        assert answer.accepted == alone[number].accepted
        assert all(a <= d for a, d in zip(answer.accepted, answer.drafted, strict=True))
        drafted |= {*answer.drafted}
    assert len(drafted) > 2
