"""Which slots are trained in which piece.

Legend: B rows, T tokens, K steps, S = B T slots.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.training import rows
from specdec.training.rows import Index, pieces
from specdec.training.ttt import supervised


def trained(seed: int, B: int, T: int, K: int, share: float) -> Tensor:
    """Random slots that have a teacher: slot t of step k needs a position t + 1 + k."""
    mask = torch.rand(K, B, T, generator=torch.Generator().manual_seed(seed)) < share
    for k in range(K):
        mask[k, :, max(0, T - 1 - k) :] = False
    return mask


def listed(index: Index, length: int) -> list[int]:
    return torch.arange(length)[index].tolist()


def taught(mask_KBT: Tensor, size: int) -> list[tuple[int, int, int]]:
    """(step, slot, teacher's position) of every row, in order; checks the pieces on the way."""
    S, found, seen = mask_KBT[0].numel(), [], []
    for piece in pieces(mask_KBT, size):
        positions = piece.positions_C.tolist()
        assert 0 < len(positions) <= size and piece.groups
        seen += positions
        steps = [group.step for group in piece.groups]
        assert steps == sorted(set(steps))
        for group in piece.groups:
            slots, at = listed(group.slots, S), listed(group.positions, len(positions))
            assert len(slots) == len(at) == group.rows > 0
            found += [(group.step, slot, positions[i]) for slot, i in zip(slots, at, strict=True)]
    assert seen == sorted(set(seen))  # the target's law is worked out once for each position
    assert set(seen) == {position for _, _, position in found}  # and for none that teaches nobody
    return found


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 999),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 6),
    st.integers(1, 30),
    st.sampled_from([0.0, 0.2, 0.8, 1.0]),
)
def test_every_trained_slot_once_with_its_teacher(seed: int, B: int, T: int, K: int, size: int, share: float) -> None:
    mask = trained(seed, B, T, K, share)
    wanted = [(k, b * T + t, b * T + t + 1 + k) for k, b, t in mask.nonzero().tolist()]
    assert sorted(taught(mask, size)) == wanted


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 999), st.integers(1, 20), st.floats(0, 1))
def test_slices_and_indices_name_the_same_rows(seed: int, size: int, share: float) -> None:
    mask = trained(seed, 2, 8, 3, share)
    with pytest.MonkeyPatch.context() as patch:
        plain = taught(mask, size)
        patch.setattr(rows, "_run", lambda index: index)
        assert taught(mask, size) == plain


def test_a_run_is_a_slice_and_a_gap_is_not() -> None:
    whole = torch.ones(1, 1, 6, dtype=torch.bool)
    whole[..., -1] = False
    (piece,) = pieces(whole, 8)
    assert piece.groups[0].slots == slice(0, 5) and piece.groups[0].positions == slice(0, 5)
    gap = whole.clone()
    gap[0, 0, 2] = False
    (piece,) = pieces(gap, 8)
    (group,) = piece.groups
    assert isinstance(group.slots, Tensor) and group.slots.tolist() == [0, 1, 3, 4]
    assert group.positions == slice(0, 4) and piece.positions_C.tolist() == [1, 2, 4, 5]


def test_nothing_trained_is_no_piece() -> None:
    assert list(pieces(torch.zeros(4, 2, 5, dtype=torch.bool), 3)) == []
    assert list(pieces(torch.zeros(7, 1, 2, dtype=torch.bool), 3)) == []  # more steps than slots


@pytest.mark.parametrize("size", [1, 5, 64])
def test_the_masks_of_training_always_have_a_teacher(size: int) -> None:
    """Packed documents, padding, more steps than a document has tokens."""
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, -1], [0, 0, 1, 1, 1, 1, 1, 1], [-1] * 8])
    answer = torch.ones(3, 8, dtype=torch.bool)
    mask = torch.stack([supervised(answer, documents, k) for k in range(10)])
    found = taught(mask, size)
    assert len(found) == int(mask.sum()) > 0
    flat = documents.flatten().tolist()
    assert all(flat[slot] == flat[position] >= 0 and slot // 8 == position // 8 for _, slot, position in found)
