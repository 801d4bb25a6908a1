"""What is known of sequences side by side: all of it changes in place, and each by itself."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from specdec.decoding import Sampling
from specdec.decoding.sequences import Sequences
from specdec.nn.view import View
from tests.tiny import HIDDEN, VOCAB, tiny_target

TARGET = tiny_target()
B, P, N = 3, 4, 2
PENALISED = Sampling(repetition_penalty=1.2)


def empty(sampling: Sampling = PENALISED) -> Sequences:
    return Sequences.empty(TARGET, sampling, 20, B, P, N)


def tensors(sequences: Sequences) -> Iterator[Tensor]:
    yield from (x for x in sequences if isinstance(x, Tensor))
    yield from (x for x in sequences.chance if isinstance(x, Tensor))


def states(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def begun() -> Sequences:
    """The first and the last are live."""
    sequences = empty()
    sequences.begin(0, 5, torch.tensor([31]), states(1, N, HIDDEN, seed=1))
    sequences.begin(2, 9, torch.tensor([32]), states(1, N, HIDDEN, seed=2))
    return sequences


def advance(sequences: Sequences, count_B: list[int], seed: int = 7) -> tuple[Tensor, Tensor]:
    """By paths of a tree of six nodes; returns the nodes' states and the committed tokens."""
    nodes_BP = torch.tensor([[0, 2, 5, 3], [0, 1, 2, 3], [0, 1, 4, 3]])
    aux_BTNH = states(B, 6, N, HIDDEN, seed=seed)
    fresh_BP = torch.tensor([[40, 41, 42, 42], [50, 50, 50, 50], [60, 7, 8, 8]])
    sequences.advance(nodes_BP, torch.tensor(count_B), fresh_BP, aux_BTNH)
    return aux_BTNH, fresh_BP


def test_at_first_there_is_nothing() -> None:
    sequences = empty()
    assert (sequences.cache.capacity, sequences.cache.batch) == (20, B)
    assert sequences.aux_BPNH.shape == (B, P, N, HIDDEN) and sequences.aux_BPNH.dtype == TARGET.dtype
    assert sequences.fresh_BP.shape == (B, P) and sequences.live_B.dtype == torch.bool
    assert sequences.chance.seen_BV.shape == (B, VOCAB) and empty(Sampling()).chance.seen_BV.shape == (B, 0)
    for each in tensors(sequences):
        assert len(each) == B and not each.any()
    assert len({each.data_ptr() for each in tensors(sequences)}) == len(list(tensors(sequences)))


def test_it_begins_where_its_prompt_ends() -> None:
    sequences = begun()
    assert sequences.live_B.tolist() == [True, False, True]
    assert sequences.length_B.tolist() == [5, 0, 9] and sequences.count_B.tolist() == [1, 0, 1]
    assert sequences.root_B.tolist() == sequences.fresh_BP[:, 0].tolist() == [31, 0, 32]
    assert torch.equal(sequences.aux_BPNH[2, 0], states(1, N, HIDDEN, seed=2)[0])
    assert not sequences.aux_BPNH[1].any()


def test_each_advances_by_a_count_of_its_own() -> None:
    sequences = begun()
    aux_BTNH, fresh_BP = advance(sequences, [3, 0, 2])
    assert sequences.length_B.tolist() == [8, 0, 11] and sequences.count_B.tolist() == [3, 0, 2]
    assert sequences.root_B[[0, 2]].tolist() == [42, 7]
    assert torch.equal(sequences.fresh_BP, fresh_BP)
    assert torch.equal(sequences.aux_BPNH[0, :3], aux_BTNH[0, [0, 2, 5]])
    assert torch.equal(sequences.aux_BPNH[2, :2], aux_BTNH[2, [0, 1]])
    assert sequences.chance.seen_BV[0].nonzero()[:, 0].tolist() == [40, 41, 42]
    advance(sequences, [1, 0, 3], seed=8)
    assert sequences.length_B.tolist() == [9, 0, 14] and sequences.root_B[[0, 2]].tolist() == [40, 8]


def test_tidied_keys_stand_in_order_behind_the_prefix() -> None:
    sequences = begun()
    view = View.chain(torch.zeros(B, dtype=torch.int64), 20, 20, sequences.cache)
    sequences.cache.place(view)
    order_S = torch.arange(20.0, dtype=torch.float64).view(1, 1, 20, 1).expand(B, 1, 20, 2)
    keys_BgSd, values_BgSd = sequences.cache.update(order_S, -order_S, 0)
    advance(sequences, [3, 0, 2])  # from lengths of 5, 0 and 9
    sequences.tidy()
    assert keys_BgSd[0, 0, :8, 0].tolist() == [0, 1, 2, 3, 4, 5, 7, 10]
    assert keys_BgSd[2, 0, :11, 0].tolist() == list(range(11))
    assert torch.equal(values_BgSd, -keys_BgSd)


def test_one_that_is_not_live_does_not_grow() -> None:
    sequences = begun()
    sequences.end(2)
    for _ in range(9):
        advance(sequences, [1, 0, 0])
    assert sequences.live_B.tolist() == [True, False, False]
    assert sequences.length_B.tolist() == [14, 0, 0] and sequences.count_B.tolist() == [1, 0, 0]
    assert int(sequences.root_B.min()) >= 0 and int(sequences.root_B.max()) < VOCAB  # still tokens, for the arithmetic


def test_slots_are_free_again_after_an_end() -> None:
    sequences = begun()
    sequences.end(0)
    assert sequences.live_B.tolist() == [False, False, True] and sequences.length_B.tolist() == [0, 0, 9]
    sequences.begin(0, 2, torch.tensor([33]), states(1, N, HIDDEN, seed=3))
    assert sequences.live_B.tolist() == [True, False, True]
    assert sequences.length_B.tolist() == [2, 0, 9] and sequences.root_B.tolist() == [33, 0, 32]


@pytest.mark.parametrize("sampling", [Sampling(), PENALISED], ids=["greedy", "penalised"])
def test_everything_changes_in_place(sampling: Sampling) -> None:
    """So that graphs which know the memory stay right."""
    sequences = empty(sampling)
    before = [each.data_ptr() for each in tensors(sequences)]
    sequences.begin(1, 4, torch.tensor([3]), states(1, N, HIDDEN))
    advance(sequences, [0, 3, 0])
    sequences.end(1)
    assert [each.data_ptr() for each in tensors(sequences)] == before
