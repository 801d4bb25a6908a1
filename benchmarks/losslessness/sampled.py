"""A million texts of two tokens each, drawn by the rounds of decoding, and counted against the target's law.

Everything but the two models is decoding's own: growths, the drawing of drafts, rules, and noise by seed and place. In
place of the models stand random laws of the token after a token.

Legend: B texts at once, N nodes with the root, V vocabulary, D draft vocabulary, K frontier nodes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.decoding import Chain, DynamicTree, Growth, Sampling, StaticTree
from specdec.decoding.growth import Frontier
from specdec.decoding.rules import ancestors
from specdec.decoding.sampling import Chance
from specdec.drafter import DraftVocab

V, D, B = 64, 48, 4_000
PLACE = 7  # of the root
SUSPECT = 1e-6  # a p-value below it fails
SMALLEST = 10.0  # draws that a cell of the chi-square expects; rarer pairs are counted together
TREE = StaticTree(((0,), (1,), (0, 0)))

CASES: tuple[tuple[str, Growth], ...] = (
    ("one_hot", Chain(2)),
    ("one_hot", DynamicTree(depth=2, top_k=2, nodes=4)),
    ("without_replacement", Chain(2)),
    ("without_replacement", TREE),
    ("with_replacement", TREE),
)


class Count(NamedTuple):
    """The draws of one rule, growth and seed."""

    rule: str
    growth: str
    seed: int
    draws: int
    p_pairs: float  # of the counts of all pairs
    p_first: float  # of the counts of first tokens: fewer cells, and so a sharper test of them
    accepted: float  # drafts per pass

    @property
    def holds(self) -> bool:
        """Whether the draws could be the target's."""
        return min(self.p_pairs, self.p_first) > SUSPECT

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return self._asdict()


class World(NamedTuple):
    """Laws of the token after a token; row V is the root's."""

    log_p_VV: Tensor
    log_q_VD: Tensor
    vocab: DraftVocab

    @classmethod
    def random(cls, seed: int) -> "World":
        """A drafter that resembles its target and does not know all of its tokens."""
        generator = torch.Generator().manual_seed(seed)
        log_p_VV = (torch.randn(V + 1, V, generator=generator, dtype=torch.float64) / 0.4).log_softmax(-1)
        ids_D = torch.randperm(V, generator=generator)[:D].sort().values
        noise_VD = torch.randn(V + 1, D, generator=generator, dtype=torch.float64)
        return cls(log_p_VV, (log_p_VV[:, ids_D] + noise_VD).log_softmax(-1), DraftVocab(ids_D, V))


def count(rule: str, growth: Growth, seed: int, draws: int, told: Callable[[int], None]) -> Count:
    """Draw ``draws`` texts, each from a seed of its own, which no other rule, growth or seed has."""
    world, sampling = World.random(seed), Sampling(temperature=1.0, rule=rule)  # type: ignore[arg-type]
    growth.prepare(torch.device("cpu"))
    growth.check_rule(sampling.acceptance)
    pairs, accepted, passes = torch.zeros(V * V, dtype=torch.float64), 0, 0
    first_seed = (len(CASES) * seed + CASES.index((rule, growth))) * draws
    for start in range(0, draws, B):
        seed_B = first_seed + torch.arange(start, min(draws, start + B))
        first_B, second_B, taken = _round(world, sampling, growth, seed_B, torch.full_like(seed_B, V), PLACE)
        short = second_B < 0
        second_B[short], _, more = _round(world, sampling, growth, seed_B[short], first_B[short], PLACE + 1)
        accepted, passes = accepted + taken + more, passes + len(seed_B) + int(short.sum())
        pairs += torch.bincount(first_B * V + second_B, minlength=V * V)
        told(len(seed_B))
    law_VV = world.log_p_VV.exp()
    expected = draws * (law_VV[-1, :, None] * law_VV[:-1]).flatten()
    first = [x.view(V, V).sum(1) for x in (pairs, expected)]
    return Count(rule, growth.name, seed, draws, p_value(pairs, expected), p_value(*first), accepted / passes)


def _round(
    world: World, sampling: Sampling, growth: Growth, seed_B: Tensor, root_B: Tensor, place: int
) -> tuple[Tensor, Tensor, int]:
    """The first token that a round commits, the second or -1, and the drafts taken in all."""
    log_p_VV, log_q_VD = world.log_p_VV.float(), world.log_q_VD.float()

    def frontier(ids_BK: Tensor) -> Frontier:
        return Frontier(torch.zeros(*ids_BK.shape, 1), log_q_VD[ids_BK])

    place_B = torch.full_like(seed_B, place)
    children = sampling.children(seed_B, place_B)
    tree = growth.grow(root_B, frontier(root_B[:, None]), lambda ids_BK, *_: frontier(ids_BK), world.vocab, children)
    ancestors_BNN = ancestors(tree.parents_BN)
    chance = Chance(sampling, seed_B, torch.zeros(len(seed_B), 0, dtype=torch.bool))
    verdict = chance.judge(tree.drafts(world.vocab), ancestors_BNN, growth.depth + 1, log_p_VV[tree.tokens_BN], place_B)
    depth_BN, taken_B = ancestors_BNN.sum(-1) - 1, verdict.path_BN.sum(-1) - 1

    def committed(level: int) -> Tensor:
        draft_B = (tree.tokens_BN * (verdict.path_BN & (depth_BN == level))).sum(-1)
        bonus_B = torch.where(taken_B == level - 1, verdict.next_B, -1)
        return torch.where(taken_B >= level, draft_B, bonus_B)

    return committed(1), committed(2), int(taken_B.sum())


def p_value(counts: Tensor, expected: Tensor) -> float:
    """Of Pearson's chi-square; what is expected less than ``SMALLEST`` times is one cell."""
    rare = expected < SMALLEST
    if rare.any():
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    statistic = ((counts - expected) ** 2 / expected.clamp_min(1e-9)).sum()
    freedom = torch.tensor(len(counts) - 1.0, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))
