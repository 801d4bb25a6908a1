"""The draft vocabulary: which ids it holds, and the maps between both numberings."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.drafter import DraftVocab, most_frequent_ids

counted = st.lists(st.integers(0, 4), min_size=1, max_size=30)  # few values, so that ties abound


@settings(max_examples=150, deadline=None)
@given(counted, st.data())
def test_choose_takes_the_forced_then_the_most_frequent(
    counts: list[int], data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, len(counts)))
    ids = st.integers(0, len(counts) - 1)
    forced = data.draw(st.lists(ids, max_size=size))  # repeats are no harm
    chosen = most_frequent_ids(torch.tensor(counts), size, forced)
    assert chosen.dtype == torch.int64
    rest = sorted(set(range(len(counts))) - set(forced), key=lambda i: (-counts[i], i))
    assert chosen.tolist() == sorted(set(forced) | set(rest[: size - len(set(forced))]))


def test_ties_and_padding_go_to_the_lower_ids() -> None:
    assert most_frequent_ids(torch.tensor([0, 5, 0, 5, 5, 0]), 2).tolist() == [1, 3]
    assert most_frequent_ids(torch.tensor([0, 0, 0, 0, 7, 0]), 3).tolist() == [0, 1, 4]
    assert most_frequent_ids(torch.tensor([9, 8, 7, 0]), 2, always=(3,)).tolist() == [0, 3]


@pytest.mark.parametrize(
    ("size", "always", "message"),
    [
        (1, (0, 2), "a draft vocabulary of 1 must hold 2 control tokens and at most 4"),
        (5, (), "at most 4"),
        (2, (4,), r"do not all lie in 0\.\.3"),
        (2, (-1,), r"do not all lie in 0\.\.3"),
    ],
)
def test_what_does_not_fit_is_refused(size: int, always: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        most_frequent_ids(torch.tensor([1, 2, 3, 4]), size, always)


@settings(max_examples=100, deadline=None)
@given(st.sets(st.integers(0, 40), min_size=1))
def test_the_maps_are_inverse(members: set[int]) -> None:
    ids = torch.tensor(sorted(members))
    vocab = DraftVocab(ids, 41)
    draft, target = torch.arange(len(ids)), torch.arange(41)
    assert torch.equal(vocab.to_draft(vocab.to_target(draft)), draft)
    back = vocab.to_draft(target)
    assert torch.equal(back >= 0, torch.isin(target, ids)) and bool((back >= -1).all())
    assert torch.equal(vocab.to_target(back[ids]), ids)
    # the exported pair: t2d marks membership, d2t holds offsets, and the two agree
    d2t, t2d = vocab.target_ids_D - draft, vocab.draft_ids_V >= 0
    assert torch.equal(t2d.nonzero()[:, 0], d2t + draft)
    assert vocab.complete == (len(members) == 41)
    assert vocab.to_target(draft[None, :, None]).shape == (1, len(ids), 1)


@pytest.mark.parametrize("ids", [[], [1, 1], [2, 1], [-1, 2], [0, 5]])
def test_ids_that_are_no_vocabulary(ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"increase strictly inside 0\.\.4"):
        DraftVocab(torch.tensor(ids, dtype=torch.int64), 5)


def test_only_the_ids_are_saved_and_refresh_checks_what_was_loaded() -> None:
    vocab = DraftVocab(torch.tensor([0, 1]), 5)
    assert set(vocab.state_dict()) == {"target_ids_D"}
    vocab.load_state_dict({"target_ids_D": torch.tensor([2, 4])})
    vocab.refresh()
    assert vocab.draft_ids_V.tolist() == [-1, -1, 0, -1, 1]
    vocab.load_state_dict({"target_ids_D": torch.tensor([4, 2])})
    with pytest.raises(ValueError, match="increase strictly"):
        vocab.refresh()
