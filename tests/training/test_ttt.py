"""Alignment of the unroll: which token, feature, position and mask every step gets.

Legend: U a user's token, A an assistant's, the last A of a turn its end-of-turn token.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.drafter import Drafter, DrafterSpec, Step
from specdec.nn.cache import UnrollCache
from specdec.nn.unroll import Dense
from specdec.nn.view import View
from specdec.training.ttt import reachable, shift, supervised, ttt_unroll
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
        (0, [1, 2, 6, 7], [1, 2, 6, 7]),  # the slot before each answer drafts its second token; none beyond its end
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


def test_masks_by_definition() -> None:
    """Against the words of the definition, over random masks and packings."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        mask = torch.rand(2, 12, generator=generator) < 0.7
        documents = torch.randint(0, 3, (2, 12), generator=generator).sort(dim=1).values
        documents[:, 10:] = torch.where(torch.rand(2, 1, generator=generator) < 0.5, -1, documents[:, 10:])
        for k in range(5):
            trained, reached = supervised(mask, documents, k), reachable(mask, documents, k)
            for b in range(2):
                for t in range(12):
                    last = t + 2 + k
                    inside = last < 12 and int(documents[b, t]) == int(documents[b, last]) and int(documents[b, t]) >= 0
                    assert bool(trained[b, t]) == (inside and bool(mask[b, last - 1 : last + 1].all()))
                    assert bool(reached[b, t]) == (inside and bool(mask[b, t + 1 : last + 1].all()))
            assert not bool((reached & ~trained).any())


def test_masks_stop_at_document_borders_and_padding() -> None:
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, -1, -1, -1]])
    every = torch.ones(1, 10, dtype=torch.bool)
    assert slots(supervised(every, documents, 0)) == [0, 1, 4]
    assert slots(supervised(every, documents, 1)) == [0]
    assert slots(supervised(every, documents, 2)) == []


def test_shift() -> None:
    x = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert shift(x, 0).tolist() == x.tolist()
    assert shift(x, 1).tolist() == [[2, 3, 0], [5, 6, 0]]
    assert shift(x, 3).tolist() == shift(x, 9).tolist() == [[0, 0, 0], [0, 0, 0]]
    assert shift(x > 2, 1).tolist() == [[False, True, False], [True, True, False]]
    assert shift(x[..., None], 2)[..., 0].tolist() == [[3, 0, 0], [6, 0, 0]]


def sample(documents: list[list[int]], spec: DrafterSpec, seed: int = 0) -> tuple[Any, Tensor, Tensor, Tensor]:
    drafter, generator = tiny_drafter(spec), torch.Generator().manual_seed(seed)
    B, T = len(documents), len(documents[0])
    aux = torch.randn(B, T, len(drafter.config.aux_layers), HIDDEN, dtype=torch.float64, generator=generator)
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
    made = list(ttt_unroll(drafter, ids, aux, documents, 4))
    assert len(made) == len(seen) == 4
    for k, (read, h, view) in enumerate(seen):
        wanted = drafter.read(ids[:, 1 + k :], h.dtype)  # teacher-forced
        assert read.shape == (1, 6, wanted.shape[-1])
        torch.testing.assert_close(read[:, : 5 - k], wanted, rtol=0, atol=1e-13)
        assert torch.equal(h, drafter.fuse(aux) if k == 0 else made[k - 1].h_BTH)  # same anchor, not shifted
        assert view.positions_BT[0].tolist() == [t + k for t in range(6)]
        assert torch.equal(view.mask_B1TS, seen[0][2].mask_B1TS) and view.cache is seen[0][2].cache


@pytest.mark.parametrize("name", presets())
def test_step_0_is_the_ordinary_causal_forward(name: str) -> None:
    drafter, ids, aux, documents = sample([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, -1, -1]], presets()[name])
    first = next(iter(ttt_unroll(drafter, ids, aux, documents, 3)))
    tokens = torch.cat([ids[:, 1:], torch.zeros(2, 1, dtype=torch.int64)], dim=1)
    plain = drafter.step(tokens, drafter.fuse(aux), View.packed(documents))
    for got, want in zip(first, plain, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", presets())
def test_packed_documents_are_as_alone(name: str) -> None:
    """Whatever a slot is trained on depends on its own document and nothing else, at every step."""
    spec, K = presets()[name], 3
    lengths = (5, 7)
    drafter, ids, aux, documents = sample([[0] * 5 + [1] * 7 + [-1] * 2], spec)
    packed = list(ttt_unroll(drafter, ids, aux, documents, K))
    every = torch.ones_like(documents, dtype=torch.bool)
    start = 0
    for length in lengths:
        here = slice(start, start + length)
        alone = list(ttt_unroll(drafter, ids[:, here], aux[:, here], torch.zeros(1, length, dtype=torch.int64), K))
        for k in range(K):
            used = supervised(every, documents, k)[0, here]
            assert int(used.sum()) == length - 2 - k
            torch.testing.assert_close(
                packed[k].normed_BTH[0, here][used], alone[k].normed_BTH[0][used], rtol=0, atol=1e-11
            )
        start += length


@pytest.mark.parametrize("name", presets())
def test_a_slot_hears_nothing_of_what_comes_after_its_prediction(name: str) -> None:
    """Changing x[t+2+k], or any feature after t, leaves slot t at step k alone: no answer leaks."""
    K, T = 3, 8
    drafter, ids, aux, documents = sample([[0] * T], presets()[name])
    before = [step.normed_BTH.clone() for step in ttt_unroll(drafter, ids, aux, documents, K)]
    for at in range(T):
        other_ids, other_aux = ids.clone(), aux.clone()
        other_ids[0, at] = 1 + (ids[0, at] % (VOCAB - 1))
        other_aux[0, at] += 1
        by_ids = [step.normed_BTH for step in ttt_unroll(drafter, other_ids, aux, documents, K)]
        by_aux = [step.normed_BTH for step in ttt_unroll(drafter, ids, other_aux, documents, K)]
        for k in range(K):
            changed_ids = ((by_ids[k] - before[k]).abs().amax(-1)[0] > 1e-9).nonzero()[:, 0].tolist()
            changed_aux = ((by_aux[k] - before[k]).abs().amax(-1)[0] > 1e-9).nonzero()[:, 0].tolist()
            # slot t reads x[t+1+k] and all before it, but for the first token, which nobody reads
            assert changed_ids == (list(range(max(0, at - 1 - k), T)) if at else [])
            assert changed_aux == list(range(at, T))


def test_gradients_flow_through_the_recurrence() -> None:
    """The last step alone reaches the fused feature: nothing is detached between steps."""
    drafter, ids, aux, documents = sample([[0] * 6], presets()["eagle3"])
    drafter.fusion.fc.weight.requires_grad_()
    *_, last = ttt_unroll(drafter, ids, aux, documents, 3)
    (through,) = torch.autograd.grad(last.normed_BTH.square().sum(), drafter.fusion.fc.weight)
    assert float(through.abs().max()) > 0
    aux.requires_grad_()
    steps = list(ttt_unroll(drafter, ids, aux, documents, 3))
    (by_slot,) = torch.autograd.grad(steps[2].normed_BTH[0, 2].sum(), aux)
    assert (by_slot[0].abs().amax((-1, -2)) > 0).tolist() == [True] * 3 + [False] * 3


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", presets())
def test_each_token_is_read_once_for_all_steps(name: str, recompute: bool) -> None:
    """The first token apart, whose reading nobody uses, and what stands past the end, which is padding."""
    drafter, ids, aux, documents = sample([[0] * 6, [0, 0, 1, 1, -1, -1]], presets()[name])
    drafter.requires_grad_()
    embedded: list[Tensor] = []
    read: list[Tensor] = []
    whole = drafter.entry.read

    def record(e_BTH: Tensor) -> Tensor:
        read.append(e_BTH)
        return whole(e_BTH)

    drafter.entry.read = record
    drafter.embed_tokens.register_forward_pre_hook(lambda module, args: embedded.append(args[0]))
    K = 4
    last = list(ttt_unroll(drafter, ids, aux, documents, K, recompute=recompute))[-1]
    last.normed_BTH.square().sum().backward()  # where steps are run again, reading is not
    assert len(embedded) == len(read) == 1 and read[0].shape == (2, 6 + K, HIDDEN)
    assert embedded[0].tolist() == [row + [0] * K for row in ids.tolist()]


def one_by_one(drafter: Drafter, ids: Tensor, aux: Tensor, documents: Tensor, K: int) -> list[Step]:
    """The unroll with ordinary steps, each of which reads its own tokens."""
    view, h = View.packed(documents, UnrollCache(Dense())), drafter.fuse(aux)
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
        list(ttt_unroll(drafter, ids, aux, documents, K, recompute=recompute)),
        one_by_one(drafter, ids, aux, documents, K),
    ):
        generator, loss = torch.Generator().manual_seed(3), torch.zeros((), dtype=torch.float64)
        for k, step in enumerate(made):
            used = supervised(torch.ones_like(ids, dtype=torch.bool), documents, k)
            assert bool(used.any())
            states = step.normed_BTH[used]
            loss = loss + (states * torch.randn(states.shape, generator=generator, dtype=torch.float64)).sum()
        drafter.zero_grad(set_to_none=True)
        loss.backward()
        grads = {part: p.grad.clone() for part, p in drafter.named_parameters() if p.grad is not None}
        found.append(([step.normed_BTH.detach() for step in made], grads))
    (ours, by_ours), (theirs, by_theirs) = found
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert set(by_ours) == set(by_theirs) == {part for part, _ in drafter.named_parameters()} - {"lm_head.weight"}
    for part, gradient in by_theirs.items():
        assert gradient.abs().max() > 1e-6, part
        torch.testing.assert_close(by_ours[part], gradient, rtol=1e-9, atol=1e-9, msg=part)
    rows = by_ours["embed_tokens.weight"].abs().amax(-1) > 0
    assert set(rows.nonzero()[:, 0].tolist()) == {int(x) for row in ids[:, 1:] for x in row} - dropped(ids, documents)


def dropped(ids: Tensor, documents: Tensor) -> set[int]:
    """Tokens that no supervised slot reads: a document's first and last, and padding, unless they stand elsewhere."""
    B, T = ids.shape
    inside = {
        int(ids[b, t])
        for b in range(B)
        for t in range(1, T - 1)
        if int(documents[b, t - 1]) == int(documents[b, t]) == int(documents[b, t + 1]) >= 0
    }
    return {int(x) for x in ids.flatten()} - inside


def test_one_token_rows_can_be_trained() -> None:
    """A single slot, whose values are laid out in memory like the projection that they come from."""
    drafter, ids, aux, documents = sample([[0]], presets()["eagle3"])
    drafter.requires_grad_()
    steps = list(ttt_unroll(drafter, ids, aux, documents, 3))
    steps[-1].normed_BTH.square().sum().backward()
    assert all(bool(step.normed_BTH.isfinite().all()) for step in steps)
    assert drafter.entry.token_qkv_proj.weight.grad is not None
