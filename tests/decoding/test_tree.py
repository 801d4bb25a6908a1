"""Ancestors are the transitive closure of parents, and padding changes nothing."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.decoding.accept import ancestors
from tests.decoding.trees import parent_lists, path_to


def assert_closure(parents: list[list[int]]) -> None:
    seen_BNN, N = ancestors(torch.tensor(parents)), len(parents[0])
    assert seen_BNN.dtype == torch.bool and seen_BNN.shape == (len(parents), N, N)
    for own, seen_NN in zip(parents, seen_BNN, strict=True):
        for node in range(N):
            assert seen_NN[node].nonzero().flatten().tolist() == path_to(node, own)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(parent_lists(), min_size=1, max_size=3))
def test_ancestors_are_the_transitive_closure_of_any_trees(parents: list[list[int]]) -> None:
    """The smaller ones of a batch are padded."""
    most = max(map(len, parents))
    assert_closure([own + list(range(len(own), most)) for own in parents])
