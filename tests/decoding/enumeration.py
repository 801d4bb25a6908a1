"""The exact law of what a rule emits, measured by bisection on the rule itself, and toy worlds to measure it in.

The rule is a black box that turns noise into a verdict. With all other noise fixed, whether a node is taken is a step
function of its coin: the step is found by bisection in float64, and it is the probability. Which of two tokens wins a
race is a step function of the ratio of their times, and the step is the ratio of their probabilities. From these follow
the probabilities of all outcomes; summed over all drafts, and continued by the target, they must be the target's law.

Legend: T trees, N nodes with the root, L levels with the root's, V vocabulary, D draft vocabulary, M measurements.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.decoding.accept import Accepted, DraftTree, OneHot, Rule
from specdec.decoding.sampling import AcceptanceNoise
from tests.decoding.trees import path_to

CHAIN = [0, 0, 1]
PAIRS = [0, 0, 0, 1, 1]  # two children, two children of the first
MIXED = [0, 0, 1, 0, 3]  # siblings do not stand side by side
THREE = [0, 0, 0, 0, 2]
SHAPES = [CHAIN, PAIRS, MIXED, THREE]
BISECTIONS = 46  # to 1e-14
HIGH = 1 - 2**-53  # the greatest coin
NEVER = float("inf")  # a time of arrival


class World(NamedTuple):
    """The laws after every context: ``p[d]`` has d + 1 dimensions, the context's tokens and the next one."""

    p: list[Tensor]
    q: list[Tensor]  # contexts of target ids, the last dimension over the draft vocabulary
    ids_D: Tensor


class Trees(NamedTuple):
    """All trees that drafting can yield, of one shape."""

    drafts: DraftTree
    p_TNV: Tensor
    probability_T: Tensor
    parents: list[int]


def _sum_one(law: Tensor) -> Tensor:
    return law / law.sum(-1, keepdim=True)


def random_law(
    shape: tuple[int, ...], generator: torch.Generator, temperature: float = 0.7
) -> Tensor:
    return (torch.randn(shape, generator=generator, dtype=torch.float64) / temperature).softmax(-1)


def random_world(seed: int, levels: int = 3, V: int = 4, ids: tuple[int, ...] = (0, 1, 3)) -> World:
    generator = torch.Generator().manual_seed(seed)
    p = [random_law((V,) * d + (V,), generator) for d in range(levels)]
    q = [random_law((V,) * d + (len(ids),), generator) for d in range(levels)]
    return World(p, q, torch.tensor(ids))


def chain_law(p: list[Tensor]) -> Tensor:
    """The law of as many tokens as there are levels, drawn from the target alone."""
    law = torch.ones((), dtype=torch.float64)
    for p_next in p:
        law = law[..., None] * _sum_one(p_next)
    return law


def depths(parents: list[int]) -> list[int]:
    return [len(path_to(node, parents)) - 1 for node in range(len(parents))]


def _probability(world: World, parents: list[int], draft_ids: tuple[int, ...], drawn: str) -> float:
    """Of drawing these drafts, node by node."""
    tokens = [-1, *(int(world.ids_D[i]) for i in draft_ids)]
    probability = 1.0
    for node in range(1, len(parents)):
        parent = parents[node]
        context = tuple(tokens[above] for above in path_to(parent, parents)[1:])
        law = world.q[len(context)][context].clone()
        earlier = [draft_ids[other - 1] for other in range(1, node) if parents[other] == parent]
        if drawn == "distinct":
            law[earlier] = 0
        if drawn == "most likely":
            ranked = law.argsort(descending=True).tolist()
            law = torch.zeros_like(law)
            law[ranked[len(earlier) : len(earlier) + 1]] = 1
        total = float(law.sum())
        # a filler after the support: any token of no probability will do, so let it be token 0 of the draft vocabulary
        probability *= (
            float(law[draft_ids[node - 1]]) / total
            if total > 0
            else float(draft_ids[node - 1] == 0)
        )
    return probability


def all_trees(world: World, parents: list[int], drawn: str) -> Trees:
    """``drawn``: "repeatedly", "distinct" or "most likely"."""
    found = [
        (draft_ids, probability)
        for draft_ids in itertools.product(range(len(world.ids_D)), repeat=len(parents) - 1)
        if (probability := _probability(world, parents, draft_ids, drawn)) > 0
    ]
    tokens, p, q = [], [], []
    for draft_ids, _ in found:
        row = [0, *(int(world.ids_D[i]) for i in draft_ids)]
        contexts = [
            tuple(row[above] for above in path_to(node, parents)[1:])
            for node in range(len(parents))
        ]
        tokens.append(row)
        p.append(torch.stack([world.p[len(context)][context] for context in contexts]))
        q.append(torch.stack([world.q[len(context)][context] for context in contexts]))
    probability_T = torch.tensor([probability for _, probability in found], dtype=torch.float64)
    torch.testing.assert_close(
        probability_T.sum(), torch.ones((), dtype=torch.float64), rtol=0, atol=1e-13
    )
    parents_TN = torch.tensor(parents).expand(len(found), -1)
    drafts = DraftTree(torch.tensor(tokens), parents_TN, torch.stack(q), world.ids_D)
    return Trees(drafts, torch.stack(p), probability_T, parents)


def pick(trees: Trees, index_M: Tensor) -> tuple[DraftTree, Tensor]:
    tokens_TN, parents_TN, q_TND, ids_D = trees.drafts
    assert q_TND is not None
    return DraftTree(tokens_TN[index_M], parents_TN[index_M], q_TND[index_M], ids_D), trees.p_TNV[
        index_M
    ]


def _step(below: Callable[[Tensor], Tensor], size: int) -> Tensor:
    """Where each of ``size`` step functions on [0, 1] falls from True to False."""
    low, high = torch.zeros(size, dtype=torch.float64), torch.ones(size, dtype=torch.float64)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        yes = below(middle)
        low, high = torch.where(yes, middle, low), torch.where(yes, high, middle)
    return low


def _grid(*sizes: int) -> list[Tensor]:
    return list(torch.cartesian_prod(*(torch.arange(size) for size in sizes)).T)


def _odds(outcome: Callable[[Tensor], Tensor], contestant_M: Tensor, V: int) -> Tensor:
    """How likely each contestant is to win, the most likely token being one; ``outcome`` makes races (M, V) tokens."""
    M, rows = len(contestant_M), torch.arange(len(contestant_M))
    best_M = outcome(torch.ones(M, V, dtype=torch.float64))

    def below(time_M: Tensor) -> Tensor:
        race_MV = torch.full((M, V), NEVER, dtype=torch.float64)
        race_MV[rows, best_M] = 1.0
        race_MV[rows, contestant_M] = time_M
        return outcome(race_MV) == contestant_M

    return torch.where(best_M == contestant_M, 1.0, _step(below, M))


def _law_by_coins(rule: Rule, world: World, trees: Trees) -> Tensor:
    """For rules that read coins, and one race at the end."""
    (T, N, V), parents, depth = trees.p_TNV.shape, trees.parents, depths(trees.parents)
    L = max(depth) + 1
    above_NN = torch.tensor([[j in path_to(i, parents) for j in range(N)] for i in range(N)])
    # row i: the walk goes to node i, and stops there
    coin_NN = torch.where(above_NN, 0.0, HIGH).to(torch.float64)

    tree_M, node_M = _grid(T, N)
    drafts, p_MNV = pick(trees, tree_M)
    rows, race_MLV = torch.arange(T * N), torch.ones(T * N, L, V, dtype=torch.float64)

    def taken(coin_M: Tensor) -> Tensor:
        coin_MN = coin_NN[node_M].index_put((rows, node_M), coin_M)
        return rule.accept(drafts, p_MNV, AcceptanceNoise(coin_MN, race_MLV)).path_BN[rows, node_M]

    chance_TN = _step(taken, T * N).view(T, N)

    tree_M, stop_M, token_M = _grid(T, N, V)
    drafts_at_stop, p_at_stop_MNV = pick(trees, tree_M)

    def drawn(race_MV: Tensor) -> Tensor:
        noise = AcceptanceNoise(coin_NN[stop_M], race_MV[:, None].expand(-1, L, -1))
        return rule.accept(drafts_at_stop, p_at_stop_MNV, noise).next_B

    law_TNV = _odds(drawn, token_M, V).view(T, N, V)
    law_TNV = law_TNV / law_TNV.sum(-1, keepdim=True)

    children = [[child for child in range(1, N) if parents[child] == node] for node in range(N)]
    reach = [trees.probability_T]
    for node in range(1, N):
        if rule.needs_chain:  # a coin for each, and the deepest that is taken counts
            reach.append(trees.probability_T * chance_TN[:, node])
            continue
        elder = [child for child in children[parents[node]] if child < node]
        reach.append(reach[parents[node]] * (1 - chance_TN[:, elder]).prod(1) * chance_TN[:, node])

    out = torch.zeros((V,) * L, dtype=torch.float64)
    for node in range(N):
        deeper = list(range(node + 1, N)) if rule.needs_chain else children[node]
        stop_T = reach[node] * (1 - chance_TN[:, deeper]).prod(1)
        for tree, row in enumerate(trees.drafts.tokens_BN.tolist()):
            context = tuple(row[above] for above in path_to(node, parents)[1:])
            emitted = stop_T[tree] * law_TNV[tree, node]
            for level in range(depth[node] + 1, L):
                emitted = emitted[..., None] * _sum_one(world.p[level][context])
            out[context] += emitted
    return out


def _law_by_races(rule: Rule, world: World, trees: Trees) -> Tensor:
    """For rules that read one race a level."""
    T, _, V = trees.p_TNV.shape
    law = trees.probability_T
    for level in range(max(depths(trees.parents)) + 1):
        tree_M, *before, token_M = _grid(T, *(V,) * level, V)
        emitted = _after(rule, trees, tree_M, before)
        stopped_M = emitted(torch.ones(len(tree_M), V, dtype=torch.float64)) < 0
        odds_M = _odds(lambda race_MV, emitted=emitted: emitted(race_MV).clamp_min(0), token_M, V)
        next_M = torch.where(stopped_M, world.p[level][(*before, token_M)], odds_M)
        law = law[..., None] * _sum_one(next_M.view(T, *(V,) * (level + 1)))
    return law.sum(0)


def _after(
    rule: Rule, trees: Trees, tree_M: Tensor, before: list[Tensor]
) -> Callable[[Tensor], Tensor]:
    """From the race of a level to the token that comes out there, or -1; races of levels before it are won by given
    tokens.
    """
    drafts, p_MNV = pick(trees, tree_M)
    (M, N, V), depth = p_MNV.shape, depths(trees.parents)
    coin_MN = torch.zeros(M, N, dtype=torch.float64)
    race_MLV = torch.ones(M, max(depth) + 1, V, dtype=torch.float64)
    for level, forced_M in enumerate(before):
        race_MLV[:, level] = torch.full((M, V), NEVER, dtype=torch.float64).scatter(
            1, forced_M[:, None], 1.0
        )

    def emitted(race_MV: Tensor) -> Tensor:
        race_MLV[:, len(before)] = race_MV
        return emission(
            rule.accept(drafts, p_MNV, AcceptanceNoise(coin_MN, race_MLV)), drafts.tokens_BN, depth
        )[:, len(before)]

    return emitted


def emission(verdict: Accepted, tokens_BN: Tensor, depth: list[int]) -> Tensor:
    """(B, L) the accepted tokens and the next one, -1 after it."""
    out_BL = torch.full((len(tokens_BN), max(depth) + 1), -1)
    for node in range(1, len(depth)):
        here_BL = torch.arange(out_BL.shape[1]) == depth[node] - 1
        out_BL = torch.where(
            verdict.path_BN[:, node, None] & here_BL, tokens_BN[:, node, None], out_BL
        )
    return out_BL.scatter(1, verdict.path_BN.sum(1, keepdim=True) - 1, verdict.next_B[:, None])


def error(rule: Rule, world: World, parents: list[int], drawn: str) -> float:
    """The greatest difference between the law of what comes out, continued by the target, and the target's own."""
    out = law_of(rule, world, all_trees(world, parents, drawn))
    return float((out - chain_law(world.p[: out.dim()])).abs().max())


def law_of(rule: Rule, world: World, trees: Trees) -> Tensor:
    """The law of what comes out of these trees, (V, ...) with a dimension for each level."""
    return (_law_by_races if isinstance(rule, OneHot) else _law_by_coins)(rule, world, trees)


def errors(rule: Rule, parents: list[int], drawn: str) -> tuple[float, ...]:
    """In random worlds; remembered, as every wrong rule is shown beside a right one."""
    return _errors(rule, tuple(parents), drawn)


@functools.cache
def _errors(rule: Rule, parents: tuple[int, ...], drawn: str) -> tuple[float, ...]:
    return tuple(error(rule, random_world(seed), list(parents), drawn) for seed in range(2))


def lossless(rule: Rule, parents: list[int], drawn: str) -> bool:
    """The check that right rules pass and wrong ones do not."""
    return max(errors(rule, parents, drawn)) < 1e-12


def ids(value: object) -> str | None:
    return type(value).__name__ if isinstance(value, Rule) else None
