"""Alignment of the unroll: which token, feature, position and mask every step gets, and which slots are left out.

Legend: U a user's token, A an assistant's, the last A of a turn its end-of-turn token; B batch, T tokens, K
unroll steps.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.drafter import Drafter, DrafterSpec, Step
from specdec.drafting.slots import KeptSlots, reachable, shift, supervised
from specdec.nn.blocked import Blocked
from specdec.nn.merged import Merged
from specdec.nn.unroll import Dense, UnrollCache, UnrollKernel
from specdec.nn.view import View
from tests.plain_attention import plain_block
from tests.tiny import HIDDEN, VOCAB, presets, tiny_drafter, variants

#        0 1 2 3 4 5 6 7 8 9
TURNS = "UUAAAUUAAA"


def answers(turns: str) -> Tensor:
    return torch.tensor([[letter == "A" for letter in turns]])


def one(turns: str) -> Tensor:
    return torch.zeros(1, len(turns), dtype=torch.int64)


def slots(mask: Tensor) -> list[int]:
    return mask[0].nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("k", "trained", "reached"),
    [
        # the slot before each answer drafts its second token; none beyond its end
        (0, [1, 2, 6, 7], [1, 2, 6, 7]),
        (1, [0, 1, 5, 6], [1, 6]),
        (2, [0, 4, 5], []),
        (3, [3, 4], []),
        (5, [1, 2], []),  # the second answer only: x[7], x[8] and x[8], x[9]
        (7, [0], []),
        (8, [], []),
        (30, [], []),
    ],
)
def test_masks_of_a_two_turn_sample(k: int, trained: list[int], reached: list[int]) -> None:
    assert slots(supervised(answers(TURNS), one(TURNS), k)) == trained
    assert slots(reachable(answers(TURNS), one(TURNS), k)) == reached


def sample(
    documents: list[list[int]], spec: DrafterSpec, seed: int = 0
) -> tuple[Any, Tensor, Tensor, Tensor]:
    drafter, generator = tiny_drafter(spec), torch.Generator().manual_seed(seed)
    B, T = len(documents), len(documents[0])
    aux = torch.randn(
        B, T, len(drafter.config.aux_layers), HIDDEN, dtype=torch.float64, generator=generator
    )
    ids = torch.randint(1, VOCAB, (B, T), generator=generator)
    return drafter, ids, aux, torch.tensor(documents)


@pytest.mark.parametrize("name", presets())
def test_every_step_gets_the_next_token_the_last_feature_and_the_next_position(name: str) -> None:
    drafter, _, aux, documents = sample([[0, 0, 0, 0, 0, 0]], presets()[name])
    ids = torch.tensor([[3, 1, 4, 15, 9, 26]])
    seen: list[tuple[Tensor, Tensor, View]] = []
    advance = drafter.advance

    def record(read: Tensor, h_BTH: Tensor, view: View) -> Any:
        seen.append((read, h_BTH, view))
        return advance(read, h_BTH, view)

    drafter.advance = record
    made = list(drafter.unroll(ids, aux, documents, 4))
    assert len(made) == len(seen) == 4
    for k, (read, h, view) in enumerate(seen):
        wanted = drafter.read(ids[:, 1 + k :], h.dtype)  # teacher-forced
        assert read.shape == (1, 6, wanted.shape[-1])
        torch.testing.assert_close(read[:, : 5 - k], wanted, rtol=0, atol=1e-13)
        # same anchor, not shifted
        assert torch.equal(h, drafter.fuse(aux) if k == 0 else made[k - 1].h_BTH)
        assert view.positions_BT[0].tolist() == [t + k for t in range(6)]
        assert (
            torch.equal(view.visibility.mask_B1TS, seen[0][2].visibility.mask_B1TS)
            and view.cache is seen[0][2].cache
        )


@pytest.mark.parametrize("name", presets())
def test_packed_documents_are_as_alone(name: str) -> None:
    """Whatever a slot is trained on depends on its own document and nothing else, at every step."""
    spec, K = presets()[name], 3
    lengths = (5, 7)
    drafter, ids, aux, documents = sample([[0] * 5 + [1] * 7 + [-1] * 2], spec)
    packed = list(drafter.unroll(ids, aux, documents, K))
    every = torch.ones_like(documents, dtype=torch.bool)
    start = 0
    for length in lengths:
        here = slice(start, start + length)
        alone = list(
            drafter.unroll(ids[:, here], aux[:, here], torch.zeros(1, length, dtype=torch.int64), K)
        )
        for k in range(K):
            used = supervised(every, documents, k)[0, here]
            assert int(used.sum()) == length - 2 - k
            torch.testing.assert_close(
                packed[k].normed_BTH[0, here][used],
                alone[k].normed_BTH[0][used],
                rtol=0,
                atol=1e-11,
            )
        start += length


@pytest.mark.parametrize("name", presets())
def test_a_slot_hears_nothing_of_what_comes_after_its_prediction(name: str) -> None:
    """Changing x[t+2+k], or any feature after t, leaves slot t at step k alone: no answer leaks."""
    K, T = 3, 8
    drafter, ids, aux, documents = sample([[0] * T], presets()[name])
    before = [step.normed_BTH.clone() for step in drafter.unroll(ids, aux, documents, K)]
    for at in range(T):
        other_ids, other_aux = ids.clone(), aux.clone()
        other_ids[0, at] = 1 + (ids[0, at] % (VOCAB - 1))
        other_aux[0, at] += 1
        by_ids = [step.normed_BTH for step in drafter.unroll(other_ids, aux, documents, K)]
        by_aux = [step.normed_BTH for step in drafter.unroll(ids, other_aux, documents, K)]
        for k in range(K):
            changed_ids = (
                ((by_ids[k] - before[k]).abs().amax(-1)[0] > 1e-9).nonzero()[:, 0].tolist()
            )
            changed_aux = (
                ((by_aux[k] - before[k]).abs().amax(-1)[0] > 1e-9).nonzero()[:, 0].tolist()
            )
            # slot t reads x[t+1+k] and all before it, but for the first token, which nobody reads
            assert changed_ids == (list(range(max(0, at - 1 - k), T)) if at else [])
            assert changed_aux == list(range(at, T))


def test_gradients_flow_through_the_recurrence() -> None:
    """The last step alone reaches the fused feature: nothing is detached between steps."""
    drafter, ids, aux, documents = sample([[0] * 6], presets()["eagle3"])
    drafter.fusion.fc.weight.requires_grad_()
    *_, last = drafter.unroll(ids, aux, documents, 3)
    (through,) = torch.autograd.grad(last.normed_BTH.square().sum(), drafter.fusion.fc.weight)
    assert float(through.abs().max()) > 0
    aux.requires_grad_()
    steps = list(drafter.unroll(ids, aux, documents, 3))
    (by_slot,) = torch.autograd.grad(steps[2].normed_BTH[0, 2].sum(), aux)
    assert (by_slot[0].abs().amax((-1, -2)) > 0).tolist() == [True] * 3 + [False] * 3


def one_by_one(drafter: Drafter, ids: Tensor, aux: Tensor, documents: Tensor, K: int) -> list[Step]:
    """The unroll with ordinary steps, each of which reads its own tokens."""
    view, h = View.packed(documents)._replace(cache=UnrollCache(Dense())), drafter.fuse(aux)
    out = []
    for k in range(K):
        step = drafter.step(shift(ids, 1 + k), h, view._replace(positions_BT=view.positions_BT + k))
        out.append(step)
        h = step.h_BTH
    return out


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", [*presets(), "qwen3", "two_layer", "narrow_fusion"])
def test_it_is_steps_that_each_read_their_tokens(name: str, recompute: bool) -> None:
    """Also in the gradient of everything, a trained embedding among it: a token's is the sum over all steps."""
    K, spec = 4, (presets() | variants())[name]
    drafter, ids, aux, documents = sample([[0] * 9, [0, 0, 0, 0, 1, 1, 1, 1, -1]], spec)
    drafter.requires_grad_()
    found: list[tuple[list[Tensor], dict[str, Tensor]]] = []
    for made in (
        list(drafter.unroll(ids, aux, documents, K, recompute=recompute)),
        one_by_one(drafter, ids, aux, documents, K),
    ):
        generator, loss = torch.Generator().manual_seed(3), torch.zeros((), dtype=torch.float64)
        for k, step in enumerate(made):
            used = supervised(torch.ones_like(ids, dtype=torch.bool), documents, k)
            assert bool(used.any())
            states = step.normed_BTH[used]
            loss = (
                loss
                + (
                    states * torch.randn(states.shape, generator=generator, dtype=torch.float64)
                ).sum()
            )
        drafter.zero_grad(set_to_none=True)
        loss.backward()
        grads = {
            part: p.grad.clone() for part, p in drafter.named_parameters() if p.grad is not None
        }
        found.append(([step.normed_BTH.detach() for step in made], grads))
    (ours, by_ours), (theirs, by_theirs) = found
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert (
        set(by_ours)
        == set(by_theirs)
        == {part for part, _ in drafter.named_parameters()} - {"lm_head.weight"}
    )
    for part, gradient in by_theirs.items():
        assert gradient.abs().max() > 1e-6, part
        torch.testing.assert_close(by_ours[part], gradient, rtol=1e-9, atol=1e-9, msg=part)


ROWS, TOKENS, STEPS = 3, 40, 4


KERNELS: dict[str, UnrollKernel] = {
    "dense": Dense(),
    "blocked": Blocked(7),
    "merged": Merged(plain_block),
}


def three_documents() -> Tensor:
    """One document; two; one and padding."""
    return torch.tensor(
        [[0] * TOKENS, [0] * 15 + [1] * (TOKENS - 15), [0] * 22 + [-1] * (TOKENS - 22)]
    )


def late_answers() -> Tensor:
    """A late answer; two; an early one: rows that keep differently many slots."""
    mask_BT = torch.zeros(ROWS, TOKENS, dtype=torch.bool)
    mask_BT[0, 20:] = mask_BT[1, 5:12] = mask_BT[1, 25:31] = mask_BT[2, 8:14] = True
    return mask_BT


def trained() -> Tensor:
    return torch.stack([supervised(late_answers(), three_documents(), k) for k in range(STEPS)])


def unrolled(
    drafter: Drafter, kernel: UnrollKernel, recompute: bool, kept: KeptSlots | None
) -> list[Step]:
    generator = torch.Generator().manual_seed(3)
    aux = torch.randn(
        ROWS,
        TOKENS,
        len(drafter.config.aux_layers),
        HIDDEN,
        dtype=torch.float64,
        generator=generator,
    )
    ids = torch.randint(0, VOCAB, (ROWS, TOKENS), generator=generator)
    return list(
        drafter.unroll(ids, aux, three_documents(), STEPS, kernel, recompute, [kept] * STEPS)
    )


def rows(steps: list[Step], kept: KeptSlots | None) -> list[Tensor]:
    """What the head reads, and the next feature, of the trained slots."""
    slots = [trained_BT.flatten().nonzero()[:, 0] for trained_BT in trained()]
    return [
        x_BTH.flatten(0, 1)[slots[k] if kept is None else kept.place_S[slots[k]]]
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


def check_kept(spec: DrafterSpec, kernel: UnrollKernel, recompute: bool) -> None:
    drafter = tiny_drafter(spec).requires_grad_()
    kept = KeptSlots.of(trained())
    assert kept is not None
    whole, fewer = (
        unrolled(drafter, Dense(), False, None),
        unrolled(drafter, kernel, recompute, kept),
    )
    assert all(
        step.h_BTH.shape[1] == step.normed_BTH.shape[1] == kept.slots_BM.shape[1] < TOKENS
        for step in fewer
    )
    same(rows(fewer, kept), rows(whole, None))
    want, got = gradients(drafter, rows(whole, None)), gradients(drafter, rows(fewer, kept))
    assert want.keys() == got.keys()
    same(list(got.values()), list(want.values()))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_trained_rows_and_all_gradients_stay(kernel: str, recompute: bool) -> None:
    check_kept(presets()["eagle3_1"], KERNELS[kernel], recompute)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_slot_that_a_step_trains_is_kept_once(data: st.DataObject) -> None:
    bits = st.lists(st.booleans(), min_size=2 * TOKENS, max_size=2 * TOKENS)
    trained_KBT = torch.tensor([data.draw(bits) for _ in range(3)]).view(3, 2, TOKENS)
    trained_KBT &= torch.arange(TOKENS) < data.draw(st.integers(0, 30))
    kept = KeptSlots.of(trained_KBT)
    if kept is None:
        assert trained_KBT.any(0).sum(1).max() > 0.8 * TOKENS
        return
    M = kept.slots_BM.shape[1]
    assert M <= 0.9 * TOKENS and M % 2 == 0  # forty tokens are rounded up by twos
    for b in range(2):
        want = trained_KBT[:, b].any(0).nonzero()[:, 0].tolist()
        assert kept.slots_BM[b].tolist() == want + [0] * (M - len(want))
        assert [int(kept.place_S[b * TOKENS + t]) for t in want] == [
            b * M + i for i in range(len(want))
        ]


STEPS, LONG = 4, 20
