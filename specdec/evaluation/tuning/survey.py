"""Draft at every place of a text, and remember what every shape would have drafted there.

Legend: B sequences, K nodes expanded a level, C candidates of all levels.
"""

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from specdec.decoding import Children, DraftTree, DynamicTree, Growth
from specdec.decoding.growth import Expand, Frontier
from specdec.drafter import DraftVocab
from specdec.evaluation.tuning.shape import candidates, deepest


class Candidates(NamedTuple):
    """All nodes that drafting with one width has looked at, in level order, on the host."""

    tokens_BC: Tensor  # int64
    parents_BC: Tensor  # int64, -1: the root
    values_BC: Tensor  # logarithm of the path's probability, by the drafter


@dataclass(frozen=True)
class Survey(Growth):
    """Grows the whole tree of every width, keeps it for the record, and proposes nothing but the root.

    So each pass commits one token, and drafting happens at every place of the text.
    """

    fixed: ClassVar[bool] = False
    in_order: ClassVar[bool] = True

    depth: int = 1
    widths: tuple[int, ...] = (1,)
    seen: dict[int, list[Candidates]] = field(default_factory=dict)
    """By width: an entry for each round."""

    @property
    def nodes_drafted(self) -> int:
        return 1

    @property
    def slots(self) -> int:
        return max(tree.slots for tree in self._trees())

    @property
    def name(self) -> str:
        return "survey"

    def _trees(self) -> list[DynamicTree]:
        return [DynamicTree(deepest(k), top_k=k, nodes=candidates(k)) for k in self.widths]

    def grow(self, root_B: Tensor, start: Frontier, expand: Expand, vocab: DraftVocab, children: Children) -> DraftTree:
        for tree in self._trees():
            self.seen.setdefault(tree.top_k, []).append(_whole(tree, root_B, start, expand, vocab, children))
        return DraftTree.of_roots(root_B)


def _whole(
    tree: DynamicTree, root_B: Tensor, start: Frontier, expand: Expand, vocab: DraftVocab, children: Children
) -> Candidates:
    laws = [start.log_probs_BKD]

    def watched(ids_BK: Tensor, h_BKH: Tensor, seen_BKQ: Tensor, depth_BQ: Tensor) -> Frontier:
        frontier = expand(ids_BK, h_BKH, seen_BKQ, depth_BQ)
        laws.append(frontier.log_probs_BKD)
        return frontier

    grown = tree.grow(root_B, start, watched, vocab, children)
    parents_BC = grown.parents_BN[:, 1:] - 1
    values_BC = laws[0][:, 0].topk(tree.top_k).values
    for law_BKD in laws[1:]:  # a candidate's value, as the tree itself adds it up
        own_BL = law_BKD.topk(tree.top_k).values.flatten(1)
        at = values_BC.shape[1]
        above_BL = values_BC.gather(1, parents_BC[:, at : at + own_BL.shape[1]])
        values_BC = torch.cat([values_BC, own_BL + above_BL], 1)
    return Candidates(grown.tokens_BN[:, 1:].cpu(), parents_BC.cpu(), values_BC.cpu())
