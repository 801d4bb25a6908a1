"""The shapes that a proposal may have, as far as tuning tells them apart."""

from collections.abc import Iterator
from typing import NamedTuple

from specdec.decoding import Chain, DynamicTree, Growth


class Shape(NamedTuple):
    """A dynamic tree; of ``top_k`` 1 it is a chain, whose nodes are its depth."""

    top_k: int
    depth: int
    nodes: int  # drafted ones, without the root

    @property
    def text(self) -> str:
        """As ``--growth`` takes it."""
        if self.top_k == 1:
            return f"chain:depth={self.depth}"
        return f"tree:depth={self.depth},top_k={self.top_k},nodes={self.nodes}"

    @property
    def growth(self) -> Growth:
        """What decodes so."""
        if self.top_k == 1:
            return Chain(self.depth)
        return DynamicTree(self.depth, top_k=self.top_k, nodes=self.nodes)


CHAIN_DEPTH = 7
TREE_DEPTH = 6
WIDTHS = (1, 2, 3, 4, 8)
_NODES = (4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48)


def deepest(top_k: int) -> int:
    """Depth of the deepest candidate of such a width."""
    return CHAIN_DEPTH if top_k == 1 else TREE_DEPTH


def candidates(top_k: int) -> int:
    """How many nodes drafting to that depth looks at."""
    return top_k + (deepest(top_k) - 1) * top_k**2


def shapes(widths: tuple[int, ...], most: int) -> Iterator[Shape]:
    """Every candidate of these widths with at most so many nodes."""
    for top_k in widths:
        if top_k == 1:
            yield from (Shape(1, depth, depth) for depth in range(1, min(CHAIN_DEPTH, most) + 1))
            continue
        for depth in range(2, TREE_DEPTH + 1):
            there = min(most, top_k + (depth - 1) * top_k**2)
            yield from (Shape(top_k, depth, nodes) for nodes in _NODES if depth <= nodes <= there)
