"""Slots that no step trains are left out of the unroll, and nothing else changes.

Legend: B batch, T tokens, K unroll steps, S = B T slots, M kept slots of a row.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.drafter import Drafter, DrafterSpec, Step
from specdec.nn.flex import Merged
from specdec.nn.unroll import Blocked, Dense, UnrollKernel
from specdec.training.kept import Kept, states
from specdec.training.ttt import supervised, ttt_unroll
from tests.plain_attention import plain_block
from tests.tiny import HIDDEN, VOCAB, presets, tiny_drafter, variants

B, T, K = 3, 40, 4
SPECS = presets() | variants()


KERNELS: dict[str, UnrollKernel] = {"dense": Dense(), "blocked": Blocked(7), "merged": Merged(plain_block)}


def documents() -> Tensor:
    """One document; two; one and padding."""
    return torch.tensor([[0] * T, [0] * 15 + [1] * (T - 15), [0] * 22 + [-1] * (T - 22)])


def answers() -> Tensor:
    """A late answer; two; an early one: rows that keep differently many slots."""
    mask_BT = torch.zeros(B, T, dtype=torch.bool)
    mask_BT[0, 20:] = mask_BT[1, 5:12] = mask_BT[1, 25:31] = mask_BT[2, 8:14] = True
    return mask_BT


def trained() -> Tensor:
    return torch.stack([supervised(answers(), documents(), k) for k in range(K)])


def unrolled(drafter: Drafter, kernel: UnrollKernel, recompute: bool, kept: Kept | None) -> list[Step]:
    generator = torch.Generator().manual_seed(3)
    aux = torch.randn(B, T, len(drafter.config.aux_layers), HIDDEN, dtype=torch.float64, generator=generator)
    ids = torch.randint(0, VOCAB, (B, T), generator=generator)
    return list(ttt_unroll(drafter, ids, aux, documents(), K, kernel, recompute, kept))


def rows(steps: list[Step], kept: Kept | None) -> list[Tensor]:
    """What the head reads, and the next feature, of the trained slots."""
    slots = [trained_BT.flatten().nonzero()[:, 0] for trained_BT in trained()]
    return [
        x_BTH.flatten(0, 1)[states(kept, slots[k])]
        for k, step in enumerate(steps)
        for x_BTH in (step.normed_BTH, step.h_BTH)
    ]


def gradients(drafter: Drafter, out: list[Tensor]) -> dict[str, Tensor]:
    drafter.zero_grad()
    sum((x * torch.arange(1, x.numel() + 1).view_as(x).sin()).sum() for x in out).backward()
    return {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}


def same(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def check(spec: DrafterSpec, kernel: UnrollKernel, recompute: bool) -> None:
    drafter = tiny_drafter(spec).requires_grad_()
    kept = Kept.of(trained())
    assert kept is not None
    whole, fewer = unrolled(drafter, Dense(), False, None), unrolled(drafter, kernel, recompute, kept)
    assert all(step.h_BTH.shape[1] == step.normed_BTH.shape[1] == kept.slots_BM.shape[1] < T for step in fewer)
    same(rows(fewer, kept), rows(whole, None))
    want, got = gradients(drafter, rows(whole, None)), gradients(drafter, rows(fewer, kept))
    assert want.keys() == got.keys()
    same(list(got.values()), list(want.values()))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_trained_rows_and_all_gradients_stay(kernel: str, recompute: bool) -> None:
    check(presets()["eagle3_1"], KERNELS[kernel], recompute)


@pytest.mark.parametrize("name", SPECS)
def test_so_they_do_in_every_design(name: str) -> None:
    check(SPECS[name], Blocked(16), False)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_slot_that_a_step_trains_is_kept_once(data: st.DataObject) -> None:
    bits = st.lists(st.booleans(), min_size=2 * T, max_size=2 * T)
    trained_KBT = torch.tensor([data.draw(bits) for _ in range(3)]).view(3, 2, T)
    trained_KBT &= torch.arange(T) < data.draw(st.integers(0, 30))
    kept = Kept.of(trained_KBT)
    if kept is None:
        assert trained_KBT.any(0).sum(1).max() > 0.8 * T
        return
    M = kept.slots_BM.shape[1]
    assert M <= 0.9 * T and M % 2 == 0  # forty tokens are rounded up by twos
    for b in range(2):
        want = trained_KBT[:, b].any(0).nonzero()[:, 0].tolist()
        assert kept.slots_BM[b].tolist() == want + [0] * (M - len(want))
        assert [int(kept.place_S[b * T + t]) for t in want] == [b * M + i for i in range(len(want))]


def test_an_entry_may_read_more_than_one_row_for_a_token() -> None:
    kept = Kept.of(trained())
    assert kept is not None
    x = torch.randn(B, T + 2, 2, 5)
    torch.testing.assert_close(kept.take(x, 1)[..., 1, :], kept.take(x[:, :, 1], 1), rtol=0, atol=0)


def test_a_batch_with_nothing_to_train_keeps_the_least() -> None:
    kept = Kept.of(torch.zeros(K, 2, T, dtype=torch.bool))
    assert kept is not None and kept.slots_BM.shape == (2, 2)


def test_states_ahead_are_those_of_the_kept_slots() -> None:
    kept = Kept.of(trained())
    assert kept is not None
    x = torch.arange(B * (T + 3)).view(B, T + 3, 1)
    want = [[b * (T + 3) + t + 3 for t in row] for b, row in enumerate(kept.slots_BM.tolist())]
    assert kept.take(x, 3).squeeze(-1).tolist() == want
