"""The head and its losses piece by piece, against all logits at once.

Legend: B rows, T tokens, S = B T slots, H hidden, D draft vocabulary, V vocabulary, K steps.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.drafter import DraftVocab
from specdec.training.head_loss import Job, Sums, Term, head_loss
from specdec.training.law import Law, TargetLaw
from specdec.training.losses import HardCrossEntropy, LawLoss, LKLambda, Rows, SoftCrossEntropy, TotalVariation
from specdec.training.rows import pieces

B, T, K, H, D, V = 3, 9, 3, 6, 17, 29
S = B * T
TERMS = [Term(1.0, SoftCrossEntropy()), Term(0.3, LKLambda()), Term(0.0, HardCrossEntropy())]


class Echo:
    """A target whose states are its logits already."""

    vocab_size = V

    def logits(self, final_BTV: Tensor, rows: Tensor | slice | None = None) -> Tensor:
        return final_BTV if rows is None else final_BTV[..., rows]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Case(NamedTuple):
    trained_KBT: Tensor
    final_SV: Tensor
    weight_DH: Tensor
    normed: list[Tensor]
    law: TargetLaw


def case(share: float = 0.7, dtype: torch.dtype = torch.float64) -> Case:
    trained = torch.rand(K, B, T, generator=torch.Generator().manual_seed(0)) < share
    for k in range(K):
        trained[k, :, T - 1 - k :] = False
    vocab = DraftVocab(torch.randperm(V, generator=torch.Generator().manual_seed(1))[:D].sort().values, V)
    law = TargetLaw(Echo(), vocab, {"log_p_RD", "log_mass_R", "token_R"}, known=True)  # type: ignore[arg-type]
    normed = [random(S, H, seed=10 + k).to(dtype).requires_grad_() for k in range(K)]
    return Case(trained, random(S, V, seed=2), random(D, H, seed=3).to(dtype).requires_grad_(), normed, law)


def run(of: Case, size: int, terms: Sequence[Term] = TERMS, in_vocab: bool = True, watch: Any = None) -> Any:
    cut = list(pieces(of.trained_KBT, size))
    job = Job(cut, lambda at_C: of.law(of.final_SV[at_C]), terms, 0.8, in_vocab, watch)
    return head_loss(job, of.weight_DH, of.normed)


def naive(of: Case, terms: Sequence[Term] = TERMS, in_vocab: bool = True) -> tuple[Tensor, Sums]:
    """All logits of all slots, then the rows that count, and autograd."""
    loss, counts, sums = torch.zeros((), dtype=torch.float64), [], []
    for k in range(K):
        logits_SD = of.normed[k] @ of.weight_DH.T
        at = of.trained_KBT[k].flatten().nonzero()[:, 0]
        law = of.law(of.final_SV[at + 1 + k])
        kept = law.known_C if in_vocab else torch.ones_like(law.known_C)
        rows = Rows(logits_SD[at][kept], *(x[kept] for x in law[:4]))
        losses = [term.loss(rows).sum() for term in terms]
        loss = loss + 0.8**k * sum(term.weight * one for term, one in zip(terms, losses, strict=True))
        counts.append(kept.sum().double())
        sums.append(torch.stack(losses))
    total = sum(0.8**k * count for k, count in enumerate(counts))
    return loss / total, Sums(torch.stack(counts), torch.stack(sums))


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
    known = of.law(of.final_SV).known_C
    assert bool(known.any()) and not bool(known.all())


def test_the_gradient_is_scaled_by_what_comes_from_above() -> None:
    """Loss scaling and accumulation multiply the loss; and each backward pass has its own."""
    of = case()
    one = gradients(run(of, 4)[0], of)
    for mine, theirs in zip(gradients(-3 * run(of, 4)[0], of), one, strict=True):
        torch.testing.assert_close(mine, -3 * theirs, rtol=1e-12, atol=0)
    run(of, 4)[0].backward()
    run(of, 4)[0].backward()
    torch.testing.assert_close(of.weight_DH.grad, 2 * one[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_no_row_is_a_loss_of_zero_and_gradients_of_zero(dtype: torch.dtype) -> None:
    for trained, in_vocab in ((False, False), (True, True)):  # nothing trained; or nothing that the vocabulary knows
        of = case(dtype=dtype)
        of.trained_KBT.logical_and_(torch.tensor(trained))
        outside = next(v for v in range(V) if v not in of.law.vocab.target_ids_D.tolist())
        of.final_SV[:, outside] = 50
        loss, sums = run(of, 4, in_vocab=in_vocab)
        assert float(loss.detach()) == 0 and float(sums.count_K.sum()) == 0
        for scale in (1.0, 2.0**16):  # as a gradient scaler multiplies it
            found = torch.autograd.grad(run(of, 4, in_vocab=in_vocab)[0] * scale, [of.weight_DH, *of.normed])
            assert all(bool((x == 0).all()) for x in found)


def test_no_term_of_the_law_is_connected_too() -> None:
    """A loss of the state alone: the head's part is zero, and no parameter is without a gradient."""
    of = case()
    loss, sums = run(of, 4, terms=[])
    assert float(loss.detach()) == 0 and sums.loss_KN.shape == (K, 0) and float(sums.count_K.sum()) > 0
    assert all(bool((x == 0).all()) for x in gradients(loss, of))


def test_a_frozen_head_has_no_gradient_and_passes_one_on() -> None:
    of = case()
    whole = gradients(run(of, 4)[0], of)
    of.weight_DH.requires_grad_(False)
    for mine, theirs in zip(gradients(run(of, 4)[0], of), whole[1:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    for normed in of.normed:
        normed.requires_grad_(False)
    assert not run(of, 4)[0].requires_grad


def test_what_is_not_trained_may_hold_anything() -> None:
    """States of other slots, and of positions that teach nobody: NaN there changes nothing."""
    clean, of = case(0.4), case(0.4)
    taught = torch.zeros(S, dtype=torch.bool)
    for k in range(K):
        at = of.trained_KBT[k].flatten().nonzero()[:, 0]
        taught[at + 1 + k] = True
        with torch.no_grad():
            of.normed[k][~of.trained_KBT[k].flatten()] = float("nan")
    of.final_SV[~taught] = float("nan")
    assert 0 < int(taught.sum()) < S
    (loss, _), (want, _) = run(of, 4), run(clean, 4)
    assert torch.equal(loss, want)
    for mine, theirs in zip(gradients(loss, of), gradients(want, clean), strict=True):
        assert torch.equal(mine, theirs)


def test_without_gradients_none_is_worked_out() -> None:
    """Validation: one product with the head, not three."""
    of, products = case(), []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            products.append(func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_))
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Count():
        loss, _ = run(of, S)
    assert sum(products) == 1 and not loss.requires_grad
    with Count():
        assert torch.equal(run(of, S)[0], loss)
    assert sum(products) == 4


def test_the_watch_sees_every_trained_row_once() -> None:
    of, seen = case(), []

    def watch(k: int, slots: Any, logits_RD: Tensor, law: Law) -> None:
        at = torch.arange(S)[slots]
        torch.testing.assert_close(logits_RD, (of.normed[k] @ of.weight_DH.T)[at].detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(law.p_CD, of.law(of.final_SV[at + 1 + k]).p_CD, rtol=1e-12, atol=0)
        seen.extend((k, slot) for slot in at.tolist())

    run(of, 4, watch=watch)
    assert sorted(seen) == [(k, b * T + t) for k, b, t in of.trained_KBT.nonzero().tolist()]


class Wide(TorchDispatchMode):
    """Counts the rows of all living tensors that are as wide as the draft vocabulary, memory they share once."""

    def __init__(self) -> None:
        super().__init__()
        self.living: dict[int, list[int]] = {}  # address of the memory: its rows, tensors in it
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor) and x.ndim == 2 and x.shape[1] == D and x.is_floating_point():
                memory = x.untyped_storage()
                entry = self.living.setdefault(memory.data_ptr(), [memory.nbytes() // (D * x.element_size()), 0])
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
def test_no_more_logits_live_than_those_of_a_piece(loss: LawLoss) -> None:
    """Logits, law and the loss's own: a few times a piece, and far from all slots of all steps."""
    most = {}
    for size in (1, 4, S):
        of, wide = case(1.0), Wide()
        with wide:
            total, _ = run(of, size, [Term(1.0, loss)])
            gradients(total, of)
        most[size] = wide.most
        assert wide.most <= 9 * K * size
    assert most[1] < most[4] < most[S] / 3 and most[S] > K * S / 2


def test_autocast_multiplies_low_and_compares_wide() -> None:
    """Logits in bfloat16, losses and sums in float32, gradients in the parameters' dtypes."""
    of, seen = case(dtype=torch.float32), []
    of = of._replace(final_SV=of.final_SV.float())
    with torch.autocast("cpu", torch.bfloat16):
        loss, sums = run(of, 4, watch=lambda k, slots, logits_RD, law: seen.append((logits_RD.dtype, law.p_CD.dtype)))
    assert set(seen) == {(torch.bfloat16, torch.float32)}
    assert loss.dtype == sums.loss_KN.dtype == torch.float32
    found, (exact, _) = gradients(loss, of), run(case(), 4)
    assert all(x.dtype == torch.float32 for x in found)
    assert abs(float((loss - exact).detach())) < 0.01
