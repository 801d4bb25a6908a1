"""The head and its losses piece by piece against all logits at once.

Legend: B rows, T tokens, S = B T slots, H hidden, C positions, D draft vocabulary, V vocabulary, K steps.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.drafter import DraftVocab
from specdec.training import target_head as module
from specdec.training.divergences import HardCrossEntropy, LKLambda, TotalVariation
from specdec.training.head_loss import HeadTask, Index, head_loss, pieces
from specdec.training.losses import DistributionLoss, LossRows, SoftCrossEntropy
from specdec.training.target_head import TargetHead

B, T, K, H, D, V = 3, 9, 3, 6, 17, 29
S = B * T
TERMS = [(1.0, SoftCrossEntropy()), (0.3, LKLambda()), (0.0, HardCrossEntropy())]


class Echo:
    """A target whose states are its logits already."""

    vocab_size = V

    def logits(self, final_BTV: Tensor, rows: Tensor | slice | None = None) -> Tensor:
        return final_BTV if rows is None else final_BTV[..., rows]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class HeadSums(NamedTuple):
    count_K: Tensor
    loss_KN: Tensor


class Case(NamedTuple):
    trained_KBT: Tensor
    final_SV: Tensor
    weight_DH: Tensor
    normed: list[Tensor]
    probs: TargetHead


def case(share: float = 0.7, dtype: torch.dtype = torch.float64) -> Case:
    trained = torch.rand(K, B, T, generator=torch.Generator().manual_seed(0)) < share
    for k in range(K):
        trained[k, :, T - 1 - k :] = False
    vocab = DraftVocab(
        torch.randperm(V, generator=torch.Generator().manual_seed(1))[:D].sort().values, V
    )
    probs = TargetHead(Echo(), vocab, {"log_p_RD", "log_mass_R", "token_R"}, needs_covered=True)  # type: ignore[arg-type]
    normed = [random(S, H, seed=10 + k).to(dtype).requires_grad_() for k in range(K)]
    return Case(
        trained,
        random(S, V, seed=2),
        random(D, H, seed=3).to(dtype).requires_grad_(),
        normed,
        probs,
    )


def run(
    of: Case,
    size: int,
    terms: Sequence[tuple[float, DistributionLoss]] = TERMS,
    in_vocab: bool = True,
    observers: Any = (),
) -> Any:
    cut = list(pieces(of.trained_KBT, size))
    job = HeadTask(
        cut,
        lambda at_C: of.probs(of.final_SV[at_C]),
        terms,
        [0.8**k for k in range(K)],
        in_vocab,
        observers,
    )
    loss, *sums = head_loss(job, [of.weight_DH], of.normed)
    return loss, HeadSums(*sums)


def naive(
    of: Case, terms: Sequence[tuple[float, DistributionLoss]] = TERMS, in_vocab: bool = True
) -> tuple[Tensor, HeadSums]:
    """All logits of all slots, then the rows that count, and autograd."""
    loss, counts, sums = torch.zeros((), dtype=torch.float64), [], []
    for k in range(K):
        logits_SD = of.normed[k] @ of.weight_DH.T
        at = of.trained_KBT[k].flatten().nonzero()[:, 0]
        probs = of.probs(of.final_SV[at + 1 + k])
        kept = probs.covered_C if in_vocab else torch.ones_like(probs.covered_C)
        rows = LossRows(logits_SD[at][kept], *(x[kept] for x in probs[:4]))
        losses = [loss_of(rows).sum() for _, loss_of in terms]
        loss = loss + 0.8**k * sum(
            weight * one for (weight, _), one in zip(terms, losses, strict=True)
        )
        counts.append(kept.sum().double())
        sums.append(torch.stack(losses))
    total = sum(0.8**k * count for k, count in enumerate(counts))
    return loss / total, HeadSums(torch.stack(counts), torch.stack(sums))


def gradients(loss: Tensor, of: Case) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, [x for x in (of.weight_DH, *of.normed) if x.requires_grad])


@pytest.mark.parametrize("in_vocab", [True, False])
@pytest.mark.parametrize("size", [1, 2, 5, S, 10 * S])
def test_any_piece_gives_the_same(size: int, in_vocab: bool) -> None:
    of = case()
    (loss, sums), (want, wanted) = run(of, size, in_vocab=in_vocab), naive(of, in_vocab=in_vocab)
    torch.testing.assert_close(loss, want, rtol=1e-13, atol=0)
    torch.testing.assert_close(sums.count_K, wanted.count_K, rtol=0, atol=0)
    torch.testing.assert_close(sums.loss_KN, wanted.loss_KN.detach(), rtol=1e-13, atol=0)
    for mine, theirs in zip(gradients(loss, of), gradients(want, of), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-14)
    known = of.probs(of.final_SV).covered_C
    assert bool(known.any()) and not bool(known.all())


@pytest.mark.parametrize("numbers", [1, 3 * D, 10 * D])
def test_any_tile_of_rows_gives_the_same(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    of = case()
    (want, wanted) = run(of, 10 * S)
    monkeypatch.setattr(module, "TILE_NUMBERS", numbers)
    (loss, sums) = run(of, 10 * S)
    torch.testing.assert_close(loss, want, rtol=1e-13, atol=0)
    torch.testing.assert_close(sums.loss_KN, wanted.loss_KN, rtol=1e-13, atol=0)
    for mine, theirs in zip(gradients(loss, of), gradients(want, of), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_no_row_is_a_loss_of_zero_and_gradients_of_zero(dtype: torch.dtype) -> None:
    # nothing trained; or nothing that the vocabulary knows
    for trained, in_vocab in ((False, False), (True, True)):
        of = case(dtype=dtype)
        of.trained_KBT.logical_and_(torch.tensor(trained))
        outside = next(v for v in range(V) if v not in of.probs.vocab.target_ids_D.tolist())
        of.final_SV[:, outside] = 50
        loss, sums = run(of, 4, in_vocab=in_vocab)
        assert float(loss.detach()) == 0 and float(sums.count_K.sum()) == 0
        for scale in (1.0, 2.0**16):  # as a gradient scaler multiplies it
            found = torch.autograd.grad(
                run(of, 4, in_vocab=in_vocab)[0] * scale, [of.weight_DH, *of.normed]
            )
            assert all(bool((x == 0).all()) for x in found)


class Wide(TorchDispatchMode):
    """StepCounts the rows of all living tensors that are as wide as the draft vocabulary, memory they share once."""

    def __init__(self) -> None:
        super().__init__()
        self.living: dict[int, list[int]] = {}  # address of the memory: its rows, tensors in it
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor) and x.ndim == 2 and x.shape[1] == D and x.is_floating_point():
                memory = x.untyped_storage()
                entry = self.living.setdefault(
                    memory.data_ptr(), [memory.nbytes() // (D * x.element_size()), 0]
                )
                entry[1] += 1
                weakref.finalize(x, self.forget, memory.data_ptr())
        self.most = max(self.most, sum(rows for rows, _ in self.living.values()))
        return out

    def forget(self, address: int) -> None:
        entry = self.living[address]
        entry[1] -= 1
        if not entry[1]:
            del self.living[address]


@pytest.mark.parametrize("loss", [SoftCrossEntropy(), TotalVariation()])
def test_no_more_logits_live_than_those_of_a_piece(loss: DistributionLoss) -> None:
    """Logits, probs and the loss's own: a few times a piece, and far from all slots of all steps."""
    most = {}
    for size in (1, 4, S):
        of, wide = case(1.0), Wide()
        with wide:
            total, _ = run(of, size, [(1.0, loss)])
            gradients(total, of)
        most[size] = wide.most
        assert wide.most <= 9 * K * size
    assert most[1] < most[4] < most[S] / 3 and most[S] > K * S / 2


def test_autocast_multiplies_low_and_compares_wide() -> None:
    """Logits in bfloat16, losses and sums in float32, gradients in the parameters' dtypes."""
    of, seen = case(dtype=torch.float32), []
    of = of._replace(final_SV=of.final_SV.float())
    with torch.autocast("cpu", torch.bfloat16):
        loss, sums = run(
            of,
            4,
            observers=[
                lambda k, slots, logits_RD, probs: seen.append((logits_RD.dtype, probs.p_CD.dtype))
            ],
        )
    assert set(seen) == {(torch.bfloat16, torch.float32)}
    assert loss.dtype == sums.loss_KN.dtype == torch.float32
    found, (exact, _) = gradients(loss, of), run(case(), 4)
    assert all(x.dtype == torch.float32 for x in found)
    assert abs(float((loss - exact).detach())) < 0.01


def trained_slots(seed: int, B: int, T: int, K: int, share: float) -> Tensor:
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
def test_every_trained_slot_once_with_its_teacher(
    seed: int, B: int, T: int, K: int, size: int, share: float
) -> None:
    mask = trained_slots(seed, B, T, K, share)
    wanted = [(k, b * T + t, b * T + t + 1 + k) for k, b, t in mask.nonzero().tolist()]
    assert sorted(taught(mask, size)) == wanted
