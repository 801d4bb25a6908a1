"""Random forests of drafted nodes."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor


@dataclass
class Tree:
    """Parents precede their children; None hangs on the committed prefix."""

    parents: list[int | None]

    def ancestors(self, node: int) -> list[int]:
        """The node and all above it."""
        found = [node]
        while (parent := self.parents[found[-1]]) is not None:
            found.append(parent)
        return found

    @property
    def depths(self) -> list[int]:
        """0 for nodes that hang on the prefix."""
        return [len(self.ancestors(node)) - 1 for node in range(len(self.parents))]


@st.composite
def trees(draw: st.DrawFn, most: int = 8, least: int = 1) -> Tree:
    """Forests of ``least`` to ``most`` nodes."""
    size = draw(st.integers(least, most))
    return Tree(
        [draw(st.none() | st.integers(0, node - 1)) if node else None for node in range(size)]
    )


def seen_by(tree: Tree) -> Tensor:
    """Which nodes each node sees."""
    out = torch.zeros(len(tree.parents), len(tree.parents), dtype=torch.bool)
    for node in range(len(tree.parents)):
        out[node, tree.ancestors(node)] = True
    return out
