"""Greedy acceptance against a plain walk down the tree; in batches it is that of each sequence.

Legend: B sequences, N nodes with the root, V vocabulary.
"""

from typing import NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.decoding.accept import DraftTree, Greedy
from specdec.decoding.sampling import AcceptanceNoise
from tests.decoding.trees import parent_lists, path_to

VOCAB = 4
NO_NOISE = AcceptanceNoise(torch.empty(0), torch.empty(0))


class Case(NamedTuple):
    """Integer logits and few tokens: ties and equal siblings are the rule."""

    tokens: list[int]
    parents: list[int]
    logits: list[list[int]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    parents = draw(parent_lists(most=16))
    size = len(parents)
    tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=size, max_size=size))
    row = st.lists(st.integers(-1, 1), min_size=VOCAB, max_size=VOCAB)
    return Case(tokens, parents, draw(st.lists(row, min_size=size, max_size=size)))


def greedy(row: list[int]) -> int:
    return row.index(max(row))  # the first of equals, as plain decoding takes it


def walk(case: Case) -> tuple[list[int], int]:
    """Longest accepted path, the first of equally long ones, and the token after it."""
    reached, frontier = [0], [0]
    while frontier:
        frontier = [
            child
            for child in range(1, len(case.parents))
            if case.parents[child] in frontier
            and case.tokens[child] == greedy(case.logits[case.parents[child]])
        ]
        reached = frontier or reached
    return path_to(reached[0], case.parents), greedy(case.logits[reached[0]])


def accept(case: Case, dtype: torch.dtype = torch.float64) -> tuple[list[int], int]:
    drafts = DraftTree(torch.tensor([case.tokens]), torch.tensor([case.parents]))
    path_1N, next_1 = Greedy().accept(drafts, torch.tensor([case.logits], dtype=dtype), NO_NOISE)
    assert path_1N.dtype == torch.bool and path_1N.shape == (1, len(case.tokens))
    assert next_1.dtype == torch.int64 and next_1.shape == (1,)
    return path_1N[0].nonzero().flatten().tolist(), int(next_1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases())
def test_it_is_the_longest_agreeing_path(case: Case) -> None:
    assert accept(case) == walk(case)


def test_random_big_trees_of_a_target_that_agrees_often() -> None:
    """DraftTree follow the target three times out of four, so that long paths and competing branches occur."""
    generator = torch.Generator().manual_seed(0)
    lengths = []
    for _ in range(200):
        size = int(torch.randint(2, 60, (), generator=generator))
        parents = [
            0,
            *(
                int(torch.randint(max(0, i - 4), i, (), generator=generator))
                for i in range(1, size)
            ),
        ]
        logits = torch.randint(0, 9, (size, VOCAB), generator=generator).tolist()
        tokens = torch.randint(0, VOCAB, (size,), generator=generator).tolist()
        for node in range(1, size):
            if torch.rand((), generator=generator) < 0.75:
                tokens[node] = greedy(logits[parents[node]])
        case = Case(tokens, parents, logits)
        assert accept(case, torch.float32) == walk(case)
        lengths.append(len(walk(case)[0]))
    assert min(lengths) < 3 and max(lengths) > 8


def test_of_equal_siblings_the_deeper_line_counts_and_else_the_first() -> None:
    to_one = [0, 1, 0, 0]
    assert accept(Case([0, 1, 1], [0, 0, 0], [to_one, to_one, [0, 0, 1, 0]])) == ([0, 1], 1)
    assert accept(Case([0, 1, 1, 2], [0, 0, 0, 2], [to_one, to_one, [0, 0, 1, 0], to_one])) == (
        [0, 2, 3],
        1,
    )
