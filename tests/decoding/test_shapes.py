"""Chains and dynamic trees, grown over any law, against slow references.

Legend: D draft vocabulary.
"""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.decoding import (
    AdaptiveChain,
    Chain,
    ChildSampling,
    DraftShape,
    DynamicTree,
    StaticTree,
)
from specdec.decoding.accept import Greedy, Rule, WithoutReplacement
from tests.decoding.oracle import (
    ROOT,
    Law,
    Path,
    draft_vocab,
    grow,
    grow_batch,
    paths_of,
    random_law,
    seeded,
)
from tests.tiny import vocabulary

STATIC = StaticTree(((0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (1, 1, 0)))


def quantised_law(seed: int, size: int) -> Law:
    """Whole numbers, zero among them: a child often ties with its parent and with other branches."""
    return lambda path: -torch.randint(0, 3, (size,), generator=seeded(seed, path)).double()


class Shape(NamedTuple):
    """A dynamic tree, the draft vocabulary it grows over and a seed."""

    growth: DynamicTree
    vocab_size: int
    seed: int


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    depth, top_k = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    most = top_k + (depth - 1) * top_k**2
    nodes = draw(st.one_of(st.just(1), st.just(most), st.integers(1, most)))
    # a frontier as wide as the draft vocabulary is legal
    size = draw(st.integers(top_k, top_k + 3))
    return Shape(
        DynamicTree(depth=depth, top_k=top_k, nodes=nodes), size, draw(st.integers(0, 10**6))
    )


def eagle2(growth: DynamicTree, law: Law, target_ids: list[int]) -> set[Path]:
    """Expansion and rerank of https://arxiv.org/abs/2406.16858, one node at a time."""

    def children(path: Path, value: float) -> list[tuple[Path, float]]:
        row = law(path).tolist()
        best = sorted(range(len(row)), key=lambda token: -row[token])[: growth.top_k]
        return [((*path, target_ids[token]), value + row[token]) for token in best]

    frontier = children((), 0.0)
    candidates = list(frontier)
    for _ in range(growth.depth - 1):
        level = [child for path, value in frontier for child in children(path, value)]
        candidates += level
        frontier = sorted(level, key=lambda candidate: -candidate[1])[: growth.top_k]
    return {
        path for path, _ in sorted(candidates, key=lambda candidate: -candidate[1])[: growth.nodes]
    }


@settings(max_examples=60, deadline=None, derandomize=True)
@given(shapes())
def test_a_dynamic_tree_holds_the_nodes_of_the_slow_reference(shape: Shape) -> None:
    law, vocab = random_law(shape.seed, shape.vocab_size), draft_vocab(shape.vocab_size)
    tree, _ = grow(shape.growth, law, vocab)
    assert set(paths_of(tree)) == eagle2(shape.growth, law, vocab.target_ids_D.tolist())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(shapes())
def test_exact_ties_leave_a_tree_of_the_best_values_shallow_ones_first(shape: Shape) -> None:
    """Which of equal tokens is expanded is free; everything after that is not."""
    growth, law, vocab = (
        shape.growth,
        quantised_law(shape.seed, shape.vocab_size),
        draft_vocab(shape.vocab_size),
    )
    tree, oracle = grow(growth, law, vocab)

    def value(path: Path) -> float:
        steps = zip(range(len(path)), path, strict=True)
        return sum(float(law(path[:i])[vocab.to_draft(torch.tensor(token))]) for i, token in steps)

    def offered(parents: list[Path]) -> list[float]:
        return sorted(
            (value(p) + x for p in parents for x in law(p).topk(growth.top_k).values.tolist()),
            reverse=True,
        )

    candidates = [(-v, 1) for v in offered([()])]
    for number, level in enumerate(oracle.levels):
        above = offered(oracle.levels[number - 1] if number else [()])
        assert sorted(map(value, level), reverse=True) == above[: growth.top_k]
        candidates += [(-v, number + 2) for v in offered(level)]
    paths = paths_of(tree)
    assert {path[:-1] for path in paths} <= {
        (),
        *(path for level in oracle.levels for path in level),
    }
    assert sorted((-value(path), len(path)) for path in paths) == sorted(candidates)[: growth.nodes]


@pytest.mark.parametrize("depth", [1, 2, 3, 6])
def test_a_chain_is_the_greedy_rollout(depth: int) -> None:
    for seed in range(20):
        law, vocab = random_law(seed, 5), draft_vocab(5)
        tree, oracle = grow(Chain(depth), law, vocab)
        path: Path = ()
        for _ in range(depth):
            path = (*path, int(vocab.target_ids_D[law(path).argmax()]))
        assert tree.tokens_BN.tolist() == [[ROOT, *path]]
        assert tree.parents_BN.tolist() == [[0, *range(depth)]]
        assert len(oracle.levels) == depth - 1  # the last token is not expanded


def test_a_tree_of_one_branch_is_the_chain() -> None:
    law, vocab = random_law(3, 6), draft_vocab(6)
    tree, _ = grow(DynamicTree(depth=4, top_k=1, nodes=4), law, vocab)
    chain, _ = grow(Chain(4), law, vocab)
    assert torch.equal(tree.tokens_BN, chain.tokens_BN) and torch.equal(
        tree.parents_BN, chain.parents_BN
    )


@settings(max_examples=50, deadline=None, derandomize=True)
@given(shapes())
def test_what_a_growth_announces_is_what_it_takes(shape: Shape) -> None:
    for growth in (shape.growth, Chain(shape.growth.depth)):
        tree, oracle = grow(
            growth, random_law(shape.seed, shape.vocab_size), draft_vocab(shape.vocab_size)
        )
        assert tree.tokens_BN.shape == (1, growth.nodes_drafted + 1)
        assert sum(map(len, oracle.levels)) == growth.slots
        assert max(map(len, paths_of(tree))) <= growth.depth


def rules_for(growth: DraftShape) -> list[Rule]:
    """One that takes likely children, and those that draw them, where the growth lets them and siblings differ."""
    if isinstance(growth, DynamicTree):
        return [Greedy()]
    return [Greedy(), WithoutReplacement()]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(shapes(), st.integers(1, 4), st.sampled_from(["chain", "adaptive", "static", "dynamic"]))
def test_each_sequence_of_a_batch_grows_what_it_grows_alone(
    shape: Shape, batch: int, kind: str
) -> None:
    """Drawn children too: the noise is the sequence's own, wherever in the batch it stands."""
    depth = shape.growth.depth
    others = {"chain": Chain(depth), "adaptive": AdaptiveChain(depth), "static": STATIC}
    growth: DraftShape = others.get(kind, shape.growth)
    size = max(shape.vocab_size, 3)
    laws, vocab = [random_law(shape.seed + b, size) for b in range(batch)], draft_vocab(size)
    seed_B, place_B = torch.arange(batch) * 3 + shape.seed, torch.arange(batch) * 11 + 2
    for rule in rules_for(growth):
        tree, _ = grow_batch(growth, laws, vocab, ChildSampling(rule, 0.9, seed_B, place_B))
        for b, law in enumerate(laws):
            own = ChildSampling(rule, 0.9, seed_B[b : b + 1], place_B[b : b + 1])
            alone, _ = grow_batch(growth, [law], vocab, own, ROOT + b)
            nodes = alone.tokens_BN.shape[1]
            padding = tree.parents_BN[b, nodes:]
            assert torch.equal(tree.tokens_BN[b, :nodes], alone.tokens_BN[0])
            assert torch.equal(tree.parents_BN[b, :nodes], alone.parents_BN[0])
            assert torch.equal(padding, nodes + torch.arange(len(padding)))
            if alone.q_BND is None or tree.q_BND is None:
                assert tree.q_BND is alone.q_BND is None and not rule.sampled
            else:
                torch.testing.assert_close(
                    tree.q_BND[b, :nodes], alone.q_BND[0], rtol=0, atol=1e-15
                )
                assert not tree.q_BND[b, nodes:].any()


@pytest.mark.parametrize("depth", [0, -1])
@pytest.mark.parametrize("growth", [Chain, DynamicTree])
def test_a_proposal_has_a_level(growth: type[DraftShape], depth: int) -> None:
    with pytest.raises(ValueError, match=f"depth must be at least 1, not {depth}"):
        growth(depth)


def test_a_tree_has_at_least_one_and_at_most_all_candidates() -> None:
    assert DynamicTree(depth=2, top_k=3, nodes=12).nodes_drafted == 12
    assert DynamicTree(depth=1, top_k=3, nodes=3).slots == 0
    with pytest.raises(ValueError, match="depth 2 and top_k 3 make 1 to 12 candidates, not 13"):
        DynamicTree(depth=2, top_k=3, nodes=13)
    with pytest.raises(ValueError, match="shape: nodes must be at least 1, not 0"):
        DynamicTree(depth=2, top_k=3, nodes=0)
    with pytest.raises(ValueError, match="shape: top_k must be at least 1, not 0"):
        DynamicTree(depth=2, top_k=0, nodes=1)


def test_a_frontier_fits_the_draft_vocabulary() -> None:
    DynamicTree(depth=2, top_k=3, nodes=5).check(vocabulary(3))
    with pytest.raises(ValueError, match="top_k 3 is more than the draft vocabulary of 2"):
        DynamicTree(depth=2, top_k=3, nodes=5).check(vocabulary(2))
    Chain(9).check(vocabulary(1))
