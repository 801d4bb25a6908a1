"""Growing over any law, without a drafter: what a growth asks for is checked, and its tree is read as paths.

Legend: K frontier nodes, Q drafted nodes, D draft vocabulary, H width.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.decoding import DraftTree, Growth
from specdec.decoding.children import LIKELIEST
from specdec.decoding.growth import Frontier
from specdec.drafter import DraftVocab
from tests.decoding.trees import path_to

Path = tuple[int, ...]  # target ids after the root
Law = Callable[[Path], Tensor]
ROOT = 7


class Oracle:
    """A drafter whose log-probabilities are any function of the path; its feature is the number of a path.

    It checks what growing tells the drafter: which nodes each new node sees, and how deep all of them are.
    """

    def __init__(self, law: Law) -> None:
        self.law = law
        self.paths: list[Path] = []
        self.levels: list[list[Path]] = []

    def frontier(self, paths: list[Path]) -> Frontier:
        first = len(self.paths)
        self.paths += paths
        numbers = torch.arange(first, first + len(paths), dtype=torch.float64)
        return Frontier(numbers[:, None], torch.stack([self.law(path) for path in paths]))

    def __call__(self, ids_K: Tensor, h_KH: Tensor, seen_KQ: Tensor, depth_Q: Tensor) -> Frontier:
        new = [(*self.paths[int(h)], int(token)) for token, h in zip(ids_K, h_KH[:, 0], strict=True)]
        self.levels.append(new)
        drafted = [path for level in self.levels for path in level]
        assert depth_Q.tolist() == [len(path) - 1 for path in drafted]
        assert seen_KQ.tolist() == [[path == mine[: len(path)] for path in drafted] for mine in new]
        return self.frontier(new)


def grow(growth: Growth, law: Law, vocab: DraftVocab) -> tuple[DraftTree, Oracle]:
    oracle = Oracle(law)
    start = oracle.frontier([()])
    return growth.grow(torch.tensor([ROOT]), start, oracle, vocab, LIKELIEST), oracle


def paths_of(tree: DraftTree) -> list[Path]:
    """The path of every node but the root, after checking that the tree is one, in level order."""
    tokens, parents = tree.tokens_N.tolist(), tree.parents_N.tolist()
    assert tree.tokens_N.dtype == tree.parents_N.dtype == torch.int64
    assert tokens[0] == ROOT and parents[0] == 0
    assert all(parent < node for node, parent in enumerate(parents) if node)
    paths = [tuple(tokens[i] for i in path_to(node, parents)[1:]) for node in range(1, len(tokens))]
    assert len(set(paths)) == len(paths), "a node twice"
    assert [len(path) for path in paths] == sorted(len(path) for path in paths)
    return paths


def seeded(seed: int, path: Path) -> torch.Generator:
    return torch.Generator().manual_seed(hash((seed, path)) % 2**63)


def random_law(seed: int, size: int) -> Law:
    return lambda path: torch.randn(size, generator=seeded(seed, path), dtype=torch.float64).mul(2).log_softmax(-1)


def draft_vocab(size: int) -> DraftVocab:
    return DraftVocab(torch.arange(size) * 3 + 1, 3 * size + 1)
