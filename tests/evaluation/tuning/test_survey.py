"""Candidates and their ranks against the trees that decoding grows.

Legend: B sequences, K frontier nodes, D draft vocabulary.
"""

import pytest
import torch
from torch import Tensor

from specdec.decoding import DraftTree
from specdec.decoding.children import LIKELIEST
from specdec.decoding.growth import Frontier
from specdec.drafter import DraftVocab
from specdec.evaluation.tuning.profile import AHEAD, ahead
from specdec.evaluation.tuning.shape import Shape, deepest, shapes
from specdec.evaluation.tuning.survey import Survey

D = 9
VOCAB = DraftVocab(torch.arange(D) * 2, 2 * D)
ROOT_B = torch.tensor([4, 10])


def law(ids_BK: Tensor) -> Frontier:
    """A drafter that looks at the last token alone, with many equal probabilities."""
    table = torch.randint(3, (2 * D, D), generator=torch.Generator().manual_seed(0)).float().log_softmax(-1)
    return Frontier(torch.zeros(*ids_BK.shape, 1), table[ids_BK])


def expand(ids_BK: Tensor, h_BKH: Tensor, seen_BKQ: Tensor, depth_BQ: Tensor) -> Frontier:
    return law(ids_BK)


def paths(tree: DraftTree, b: int) -> list[tuple[int, ...]]:
    """Every drafted node as the tokens on the way to it."""
    out: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens_BN[b, 1:].tolist(), tree.parents_BN[b, 1:].tolist(), strict=True):
        out.append((*out[parent], token))
    return out[1:]


def whole(top_k: int) -> tuple[Survey, list[list[tuple[int, ...]]]]:
    """A survey of one round, and every candidate of each sequence."""
    survey = Survey(widths=(top_k,))
    tree = survey.grow(ROOT_B, law(ROOT_B[:, None]), expand, VOCAB, LIKELIEST)
    assert tree.tokens_BN.tolist() == [[4], [10]] and tree.parents_BN.tolist() == [[0], [0]]
    ((tokens_BC, parents_BC, _),) = survey.seen[top_k]
    root_B1 = ROOT_B[:, None]
    full = DraftTree(torch.cat([root_B1, tokens_BC], 1), torch.cat([root_B1 * 0, parents_BC + 1], 1))
    return survey, [paths(full, b) for b in range(2)]


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_ranks_say_which_trees_hold_a_node(top_k: int) -> None:
    survey, candidates = whole(top_k)
    found = [
        {path: ahead(top_k, survey, b, [int(ROOT_B[b]), *path], 1)[0, len(path) - 1].tolist() for path in every}
        for b, every in enumerate(candidates)
    ]
    shapes_ = [*shapes((top_k,), 48), *(Shape(top_k, 3, n) for n in range(1, top_k + 1) if top_k > 1)]
    assert len(shapes_) == {1: 7, 2: 27, 4: 60}[top_k]
    for shape in shapes_:
        grown = shape.growth.grow(ROOT_B, law(ROOT_B[:, None]), expand, VOCAB, LIKELIEST)
        for b in range(2):
            kept = {path for path, ranks in found[b].items() if ranks[shape.depth - 1] < shape.nodes}
            assert kept == set(paths(grown, b)), shape


def test_values_are_tied_so_that_order_matters() -> None:
    survey, _ = whole(4)
    values = survey.seen[4][0].values_BC[0]
    assert len(values.unique()) < len(values) / 2


def test_an_answer_that_leaves_the_tree_stays_outside() -> None:
    survey, candidates = whole(2)
    path = next(path for path in candidates[0] if len(path) == 3)
    ids = [4, *path[:2], 1, *path[3:]]  # 1 is no token of the draft vocabulary
    ranks = ahead(2, survey, 0, ids, 1)[0]
    assert (ranks[1, 1:] < AHEAD).all() and (ranks[2:] == AHEAD).all()
    assert (ranks[1, :1] == AHEAD).all() and ranks.shape == (deepest(2),) * 2
