"""Greedy acceptance against a plain walk down the tree."""

from typing import NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.decoding.acceptance import accept_greedy
from specdec.decoding.tree import DraftTree
from tests.decoding.trees import parent_lists, path_to

VOCAB = 4


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
            if case.parents[child] in frontier and case.tokens[child] == greedy(case.logits[case.parents[child]])
        ]
        reached = frontier or reached
    return path_to(reached[0], case.parents), greedy(case.logits[reached[0]])


def accept(case: Case, dtype: torch.dtype = torch.float64) -> tuple[list[int], int]:
    tree = DraftTree(torch.tensor(case.tokens), torch.tensor(case.parents))
    taken = accept_greedy(tree, tree.ancestors_NN(), torch.tensor(case.logits, dtype=dtype))
    assert taken.path_N.dtype == torch.bool and taken.path_N.shape == (len(case.tokens),)
    assert taken.next_1.dtype == torch.int64 and taken.next_1.shape == (1,)
    return taken.path_N.nonzero().flatten().tolist(), int(taken.next_1)


@settings(max_examples=600, deadline=None, derandomize=True)
@given(cases())
def test_it_is_the_longest_agreeing_path(case: Case) -> None:
    assert accept(case) == walk(case)


def test_random_big_trees_of_a_target_that_agrees_often() -> None:
    """Drafts follow the target three times out of four, so that long paths and competing branches occur."""
    generator = torch.Generator().manual_seed(0)
    lengths = []
    for _ in range(200):
        size = int(torch.randint(2, 60, (), generator=generator))
        parents = [0, *(int(torch.randint(max(0, i - 4), i, (), generator=generator)) for i in range(1, size))]
        logits = torch.randint(0, 9, (size, VOCAB), generator=generator).tolist()
        tokens = torch.randint(0, VOCAB, (size,), generator=generator).tolist()
        for node in range(1, size):
            if torch.rand((), generator=generator) < 0.75:
                tokens[node] = greedy(logits[parents[node]])
        case = Case(tokens, parents, logits)
        assert accept(case, torch.float32) == walk(case)
        lengths.append(len(walk(case)[0]))
    assert min(lengths) < 3 and max(lengths) > 8


def test_the_root_alone_is_accepted_whatever_it_says() -> None:
    assert accept(Case([3], [0], [[0, 5, 0, 0]])) == ([0], 1)
    assert accept(Case([3, 2, 0], [0, 0, 0], [[0, 5, 0, 0]] * 3)) == ([0], 1)


def test_of_equal_siblings_the_deeper_line_counts_and_else_the_first() -> None:
    to_one = [0, 1, 0, 0]
    assert accept(Case([0, 1, 1], [0, 0, 0], [to_one, to_one, [0, 0, 1, 0]])) == ([0, 1], 1)
    assert accept(Case([0, 1, 1, 2], [0, 0, 0, 2], [to_one, to_one, [0, 0, 1, 0], to_one])) == ([0, 2, 3], 1)


def test_a_right_token_behind_a_wrong_one_does_not_count() -> None:
    always_one = [[0, 1, 0, 0]] * 4
    assert accept(Case([1, 1, 2, 1], [0, 0, 1, 2], always_one)) == ([0, 1], 1)


def test_ties_go_to_the_lowest_token_as_in_plain_decoding() -> None:
    assert accept(Case([0, 2, 3], [0, 0, 0], [[0, 0, 7, 7]] * 3)) == ([0, 1], 2)
