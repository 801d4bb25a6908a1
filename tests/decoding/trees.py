"""Random draft trees, and the plain loops they are checked against."""

import torch
from hypothesis import strategies as st

from specdec.decoding import ChildSampling
from specdec.decoding.accept import Greedy

LIKELIEST = ChildSampling(
    Greedy(), 1.0, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
)


@st.composite
def parent_lists(draw: st.DrawFn, most: int = 24) -> list[int]:
    """Parents of a tree in which every parent precedes its children; the root is its own parent."""
    size = draw(st.integers(1, most))
    return [0, *(draw(st.integers(0, node - 1)) for node in range(1, size))]


def path_to(node: int, parents: list[int]) -> list[int]:
    """Nodes from the root to ``node``, both included; of padding, which is its own parent, itself."""
    path = [node]
    while parents[path[-1]] != path[-1]:
        path.append(parents[path[-1]])
    return path[::-1]
