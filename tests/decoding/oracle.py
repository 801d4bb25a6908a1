"""Growing over any law, without a drafter: what a growth asks for is checked, and its tree is read as paths.

Legend: B sequences, K frontier nodes, Q drafted nodes, D draft vocabulary, H width.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.decoding import ChildSampling, DraftShape, DraftTree
from specdec.drafter import DraftVocab
from specdec.drafting.mode import Frontier
from tests.decoding.trees import LIKELIEST, path_to

Path = tuple[int, ...]  # target ids after the root
Law = Callable[[Path], Tensor]
ROOT = 7  # of the first sequence; one more for each of the next


class LogProbs(Tensor):
    """Logarithms that need not be those of a law."""

    def log_softmax(self, dim: int) -> Tensor:  # type: ignore[override]
        return self.as_subclass(Tensor)


class Oracle:
    """A drafter whose log-probabilities are any function of the path, one for each sequence.

    Its feature is the number of a path. It checks what growing tells the drafter: which nodes each new node sees, and
    how deep all of them are.
    """

    def __init__(self, laws: Sequence[Law]) -> None:
        self.laws = laws
        self.paths: list[Path] = []
        self.all_levels: list[list[list[Path]]] = [[] for _ in laws]

    @property
    def levels(self) -> list[list[Path]]:
        """What was expanded for the only sequence, level by level."""
        (levels,) = self.all_levels
        return levels

    def frontier(self, paths: list[list[Path]]) -> Frontier:
        """What is said at the nodes of every sequence."""
        first = len(self.paths)
        self.paths += [path for own in paths for path in own]
        numbers = torch.arange(first, len(self.paths), dtype=torch.float64).view(len(paths), -1, 1)
        said = [
            torch.stack([law(path) for path in own])
            for law, own in zip(self.laws, paths, strict=True)
        ]
        return Frontier(numbers, torch.stack(said).as_subclass(LogProbs))

    def __call__(
        self, ids_BK: Tensor, h_BKH: Tensor, seen_BKQ: Tensor, depth_BQ: Tensor
    ) -> Frontier:
        B, (K, Q) = len(self.laws), seen_BKQ.shape[-2:]
        assert ids_BK.shape == (B, K) and h_BKH.shape == (B, K, 1)
        seen_BKQ, depth_BQ = seen_BKQ.expand(B, K, Q), depth_BQ.expand(B, Q)
        new_B = []
        for b, levels in enumerate(self.all_levels):
            new = [
                (*self.paths[int(h)], int(token))
                for token, h in zip(ids_BK[b], h_BKH[b, :, 0], strict=True)
            ]
            levels.append(new)
            drafted = [path for level in levels for path in level]
            assert depth_BQ[b].tolist() == [len(path) - 1 for path in drafted]
            assert seen_BKQ[b].tolist() == [
                [path == mine[: len(path)] for path in drafted] for mine in new
            ]
            new_B.append(new)
        return self.frontier(new_B)


def grow_batch(
    growth: DraftShape,
    laws: Sequence[Law],
    vocab: DraftVocab,
    children: ChildSampling = LIKELIEST,
    first: int = ROOT,
) -> tuple[DraftTree, Oracle]:
    """Trees of as many sequences as there are laws, after the roots ``first``, ``first + 1`` ..."""
    oracle = Oracle(laws)
    start = oracle.frontier([[()]] * len(laws))
    growth.prepare(torch.device("cpu"))
    root_B = torch.arange(first, first + len(laws))
    return growth.grow(root_B, start, oracle, vocab, children), oracle


def grow(growth: DraftShape, law: Law, vocab: DraftVocab) -> tuple[DraftTree, Oracle]:
    """The tree of a single sequence."""
    return grow_batch(growth, [law], vocab)


def paths_of(tree: DraftTree, b: int = 0, padding: int = 0) -> list[Path]:
    """The path of every node but the root, after checking that the tree is one, in level order.

    Args:
        b: which sequence.
        padding: nodes at the end that are none.
    """
    assert tree.tokens_BN.dtype == tree.parents_BN.dtype == torch.int64
    assert tree.tokens_BN.shape == tree.parents_BN.shape
    tokens, parents = tree.tokens_BN[b].tolist(), tree.parents_BN[b].tolist()
    assert tokens[0] == ROOT + b and parents[0] == 0
    nodes = len(tokens) - padding
    assert parents[nodes:] == list(range(nodes, len(parents)))
    assert all(parents[node] < node for node in range(1, nodes))
    paths = [tuple(tokens[i] for i in path_to(node, parents)[1:]) for node in range(1, nodes)]
    assert len(set(paths)) == len(paths), "a node twice"
    assert [len(path) for path in paths] == sorted(len(path) for path in paths)
    return paths


def seeded(seed: int, path: Path) -> torch.Generator:
    return torch.Generator().manual_seed(hash((seed, path)) % 2**63)


def random_law(seed: int, size: int) -> Law:
    return lambda path: (
        torch.randn(size, generator=seeded(seed, path), dtype=torch.float64).mul(2).log_softmax(-1)
    )


def draft_vocab(size: int) -> DraftVocab:
    return DraftVocab(torch.arange(size) * 3 + 1, 3 * size + 1)
