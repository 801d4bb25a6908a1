"""EAGLE-1's static tree, and the draft shapes by their names on a command line.

Legend: B sequences, K frontier nodes, Q drafted nodes so far, L nodes of a level, R child ranks, N tree nodes with the
root, D draft vocabulary.
"""

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.decoding.accept import DraftTree
from specdec.decoding.shapes import ChildSampling, DraftShape
from specdec.drafter import DrafterConfig, DraftVocab
from specdec.drafting.mode import Expand, Frontier

Ranks = tuple[int, ...]
"""A static tree's node, by the rank of every child on the way from the root: 0 is its parent's most likely."""

# https://arxiv.org/abs/2401.15077, as its authors' code has it under the name mc_sim_7b_63
_EAGLE1 = (
    "0 1 2 3  00 01 02 10 11 20 21 30  000 001 002 010 011 020 021 100  0000 0001 0002  00000 00001"
)
EAGLE1: tuple[Ranks, ...] = tuple(tuple(map(int, path)) for path in _EAGLE1.split())
"""EAGLE-1's own tree: 25 nodes, with the root 26 tokens to verify."""


class _StaticLevel(NamedTuple):
    """A static tree's nodes of one depth, in the order of the tree."""

    row_L: Tensor  # int64, which of the nodes expanded just before is the parent
    rank_L: Tensor  # int64
    ranks: int  # one more than the highest
    expanded_K: Tensor  # int64, the tree's nodes whose children these are
    inner_K: Tensor  # int64, which of the L are expanded; none of the last level
    seen_KQ: Tensor  # for View.append, as is the next
    depth_Q: Tensor


@dataclass(frozen=True)
class StaticTree(DraftShape):
    """The same nodes in every round (https://arxiv.org/abs/2401.15077), level by level; inner nodes are expanded.

    Args:
        paths: every node but the root as a sequence of child ranks, in any order; parents and the siblings of lower
            ranks are among them.

    Raises:
        ValueError: there is no path, one is no sequence of ranks, or a parent or sibling is lacking.
    """

    depth: int = field(init=False)
    paths: tuple[Ranks, ...] = EAGLE1
    # parents and levels by device, which no round changes
    _plans: dict[torch.device, tuple[Tensor, list[_StaticLevel]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        known = {tuple(path) for path in self.paths}
        if not known or () in known or min(map(min, known)) < 0:
            raise ValueError(
                "shape: a static tree is a list of paths of child ranks from 0 up, as [[0], [1], [0, 0]]"
            )
        for path in sorted(known):
            parent = path[:-1]
            required = (*parent, path[-1] - 1) if path[-1] else parent
            if required and required not in known:
                raise ValueError(
                    f"shape: a static tree with the path {list(path)} has {list(required)} too: add it"
                )
        # level by level: so parents come first, and trees of the same nodes are equal
        paths = tuple(sorted(known, key=lambda path: (len(path), path)))
        object.__setattr__(self, "paths", paths)
        object.__setattr__(self, "depth", len(paths[-1]))

    @property
    def nodes_drafted(self) -> int:
        return len(self.paths)

    @property
    def slots(self) -> int:
        return len({path[:-1] for path in self.paths} - {()})

    @property
    def name(self) -> str:
        return f"static tree of {len(self.paths)} (depth {self.depth})"

    def check(self, config: DrafterConfig) -> None:
        super().check(config)
        if (most := max(map(max, self.paths))) >= config.draft_vocab_size:
            raise ValueError(
                f"shape: the child rank {most} is beyond the draft vocabulary of {config.draft_vocab_size}"
            )

    def prepare(self, device: torch.device) -> None:
        if device not in self._plans:
            with torch.inference_mode(False):  # it is kept, and not only for inference
                self._plans[device] = _levels(self.paths, device)

    def grow(
        self,
        root_B: Tensor,
        start: Frontier,
        expand: Expand,
        vocab: DraftVocab,
        children: ChildSampling,
    ) -> DraftTree:
        parents_N, levels = self._plans[root_B.device]
        parents_BN = parents_N.expand(len(root_B), -1)
        tokens = [root_B[:, None]]
        frontier = start
        q_BND = None
        for depth, level in enumerate(levels):
            best_BKR, q_BKD = children.find(frontier.logits_BKD, level.ranks, depth)
            if q_BKD is not None:
                q_BND = (
                    q_BKD.new_zeros(*parents_BN.shape, q_BKD.shape[-1]) if q_BND is None else q_BND
                )
                q_BND[:, level.expanded_K] = q_BKD
            tokens.append(vocab.to_target(best_BKR[:, level.row_L, level.rank_L]))
            if len(level.inner_K):
                h_BKH = frontier.h_BKH[:, level.row_L[level.inner_K]]
                frontier = expand(tokens[-1][:, level.inner_K], h_BKH, level.seen_KQ, level.depth_Q)
        return DraftTree(
            torch.cat(tokens, 1), parents_BN, q_BND, None if q_BND is None else vocab.target_ids_D
        )


def _levels(paths: tuple[Ranks, ...], device: torch.device) -> tuple[Tensor, list[_StaticLevel]]:
    """The parents of all nodes, (N,), and the levels."""
    index = functools.partial(torch.tensor, dtype=torch.int64, device=device)
    number = {path: node for node, path in enumerate(((), *paths))}
    parents = {path[:-1] for path in paths}
    above: list[Ranks] = [()]
    drafted: list[Ranks] = []
    levels = []
    for depth in range(1, len(paths[-1]) + 1):
        nodes = [path for path in paths if len(path) == depth]
        inner = [path for path in nodes if path in parents]
        drafted += inner
        seen = [[path[: len(other)] == other for other in drafted] for path in inner]
        level = _StaticLevel(
            row_L=index([above.index(path[:-1]) for path in nodes]),
            rank_L=index([path[-1] for path in nodes]),
            ranks=1 + max(path[-1] for path in nodes),
            expanded_K=index([number[path] for path in above]),
            inner_K=index([nodes.index(path) for path in inner]),
            seen_KQ=torch.tensor(seen, dtype=torch.bool, device=device),
            depth_Q=index([len(path) - 1 for path in drafted]),
        )
        levels.append(level)
        above = inner
    return index([0, *(number[path[:-1]] for path in paths)]), levels
