"""Ancestors are the transitive closure of parents."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.decoding.tree import DraftTree
from tests.decoding.trees import parent_lists, path_to


def ancestors(parents: list[int]) -> torch.Tensor:
    return DraftTree(torch.zeros(len(parents), dtype=torch.int64), torch.tensor(parents)).ancestors_NN()


def assert_closure(parents: list[int]) -> None:
    seen_NN = ancestors(parents)
    assert seen_NN.dtype == torch.bool and seen_NN.shape == (len(parents), len(parents))
    for node in range(len(parents)):
        assert seen_NN[node].nonzero().flatten().tolist() == path_to(node, parents)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(parent_lists())
def test_ancestors_are_the_transitive_closure_of_any_tree(parents: list[int]) -> None:
    assert_closure(parents)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 70))
def test_a_chain_sees_everything_before(length: int) -> None:
    assert torch.equal(ancestors([max(0, i - 1) for i in range(length)]), torch.ones(length, length).tril().bool())


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65])
def test_rounds_suffice_around_powers_of_two(length: int) -> None:
    assert ancestors([max(0, i - 1) for i in range(length)]).sum() == length * (length + 1) // 2


def test_branches_do_not_see_each_other() -> None:
    seen_NN = ancestors([0, 0, 0, 1, 2, 3])
    expected = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 1, 3, 5]]
    assert [row.nonzero().flatten().tolist() for row in seen_NN] == expected
    assert (seen_NN.sum(-1) - 1).tolist() == [0, 1, 1, 2, 2, 3]  # what decoding takes as depth
