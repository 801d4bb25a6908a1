"""Weights by a slot's steps before, against loops over single slots in plain Python floats.

Legend: K unroll steps, S slots, B rows of the batch, T tokens, N loss terms, H hidden, V vocabulary, D draft
vocabulary.
"""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.data import Batch
from specdec.drafter import Drafter
from specdec.drafting.slots import supervised
from specdec.nn.blocked import Blocked
from specdec.training.divergences import HardCrossEntropy, TotalVariation
from specdec.training.losses import Loss, SmoothL1, SoftCrossEntropy, Term, WeightedSum, terms
from specdec.training.metrics import StepCounts, UnrollMetrics
from specdec.training.step import ObjectiveConfig, TargetOutputs, TrainStep, target_outputs
from specdec.training.step_weights import (
    DPACE,
    AcceptedLength,
    AcceptUntilFail,
    Decay,
    PrefixWeights,
    StepWeights,
)
from specdec.training.target_head import TargetHead
from tests.tiny import HIDDEN, VOCAB, presets, tiny_target, variants
from tests.training.test_step import K, T, learner, make_batch, make_teacher
from tests.training.test_target_head import Matrix

PARTS = [
    AcceptUntilFail(), AcceptUntilFail(1.0), AcceptedLength(), DPACE(), DPACE(0.0), DPACE(1.0),
]  # fmt: skip
EAGLE1 = WeightedSum([Term(SmoothL1()), Term(SoftCrossEntropy(), 0.1)])


def naive(part: PrefixWeights, seen: list[float], trained: list[bool]) -> list[float]:
    """The definition for one slot, its factors aside."""
    n = trained.index(False) if False in trained else len(trained)
    out = [0.0] * len(trained)
    for j in range(n):
        if isinstance(part, AcceptUntilFail):
            out[j] = float(all(seen[:j]))
        elif isinstance(part, AcceptedLength):  # the derivative of sum_k prod_{i<=k} a_i by a_j
            out[j] = math.fsum(
                math.prod(seen[:j]) * math.prod(seen[j + 1 : m + 1]) for m in range(j, n)
            )
        else:
            s = [(1 - part.alpha) * a + part.alpha for a in seen[:n]]
            out[j] = math.fsum(math.prod(s[: m + 1]) for m in range(j, n))
    return out


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(PARTS), st.data())
def test_weights_are_their_definition(part: PrefixWeights, data: st.DataObject) -> None:
    steps = data.draw(st.integers(1, 7))
    one = st.sampled_from([0.0, 1.0]) if isinstance(part, AcceptUntilFail) else st.floats(0, 1)
    seen = [data.draw(st.lists(one, min_size=steps, max_size=steps)) for _ in range(4)]
    trained = [data.draw(st.lists(st.booleans(), min_size=steps, max_size=steps)) for _ in range(4)]
    chained_KS = torch.tensor(trained).T.cumprod(0)
    got_KS = part.weights(torch.tensor(seen, dtype=torch.float64).T, chained_KS.bool()) * chained_KS
    for mine, *slot in zip(got_KS.T.tolist(), seen, trained, strict=True):
        assert mine == pytest.approx(naive(part, *slot), rel=1e-12, abs=1e-300)


class Lesson(NamedTuple):
    drafter: Drafter
    batch: Batch
    teacher: TargetOutputs
    head_VH: Tensor


def lesson(name: str) -> Lesson:
    """A target of whose greedy tokens many are what one of the unroll's steps drafts there."""
    drafter, batch = learner((presets() | variants())[name]), make_batch()
    generator = torch.Generator().manual_seed(2)
    head_VH = torch.nn.functional.normalize(
        torch.randn(VOCAB, HIDDEN, dtype=torch.float64, generator=generator)
    )
    aux_BTNH = make_teacher(drafter, batch).aux_BTNH
    token_BT = torch.randint(0, VOCAB, (3, T), generator=generator)
    by_BT = torch.randint(0, 5, (3, T), generator=generator)  # mostly the first step
    for k, step in enumerate(drafter.unroll(batch.ids_BT, aux_BTNH, batch.documents_BT, K)):
        drafted_BT = drafter.vocab.target_ids_D[drafter.logits(step.normed_BTH).argmax(-1)].roll(
            1 + k, 1
        )
        token_BT = torch.where((by_BT - 1).clamp(min=0) == k, drafted_BT, token_BT)
    final_BTH = 3 * head_VH[token_BT] + 0.1 * torch.randn(
        3, T, HIDDEN, dtype=torch.float64, generator=generator
    )
    reads = {"token_R", "log_mass_R"}
    probs = TargetHead(Matrix(head_VH), drafter.vocab, reads, needs_covered=True)  # type: ignore[arg-type]
    return Lesson(drafter, batch, TargetOutputs(aux_BTNH, final_BTH, probs), head_VH)


class Row(NamedTuple):
    loss_N: Tensor
    weight: float


def rows_of(of: Lesson, part: PrefixWeights, loss: Loss, in_vocab: bool) -> list[list[Row]]:
    """Every row that counts, by step, slot by slot."""
    drafter, batch, ids = of.drafter, of.batch, of.drafter.vocab.target_ids_D
    unroll = list(drafter.unroll(batch.ids_BT, of.teacher.aux_BTNH, batch.documents_BT, K))
    trained_KBT = torch.stack(
        [supervised(batch.loss_mask_BT, batch.documents_BT, k) for k in range(K)]
    )
    out: list[list[Row]] = [[] for _ in range(K)]
    for b, t in itertools.product(range(3), range(T)):
        trained, seen, found = trained_KBT[:, b, t].tolist(), [0.0] * K, []
        for k in (k for k in range(K) if trained[k]):
            state_H = of.teacher.final_BTH[b, t + 1 + k]
            full_V, q_D = (
                of.head_VH @ state_H,
                drafter.logits(unroll[k].normed_BTH)[b, t].softmax(-1),
            )
            best = int(full_V.argmax())
            if isinstance(part, AcceptUntilFail):
                seen[k] = float(int(ids[q_D.argmax()]) == best)
            elif isinstance(part, AcceptedLength):
                seen[k] = float(torch.minimum(full_V.softmax(-1)[ids], q_D.detach()).sum())
            else:
                seen[k] = float(q_D.detach()[ids == best].sum())
            if best in ids.tolist() or not in_vocab:
                draft = -(full_V[ids].softmax(-1) * q_D.log()).sum()
                state = torch.nn.functional.smooth_l1_loss(unroll[k].h_BTH[b, t], state_H)
                both = [state if isinstance(term.loss, SmoothL1) else draft for term in terms(loss)]
                found.append((k, torch.stack(both)))
        weights = naive(part, seen, trained)
        for k, loss_N in found:
            out[k].append(Row(loss_N, weights[k]))
    return out


@pytest.mark.parametrize("name", ["eagle3_1", "peagle_3_1"])
def test_total_variation_by_the_accepted_length_has_the_gradient_of_that_length(name: str) -> None:
    """Of the average number of accepted drafts, taken by autograd through all steps of every slot."""
    of = lesson(name)
    recipe = ObjectiveConfig(TotalVariation(), K, AcceptedLength(), in_vocab=False)
    output = TrainStep(of.drafter, recipe)(of.batch, of.teacher)
    (output.loss * output.weight.detach()).backward()
    found = {n: p.grad.clone() for n, p in of.drafter.named_parameters() if p.grad is not None}
    of.drafter.zero_grad()
    ids_D = of.drafter.vocab.target_ids_D
    batch = of.batch
    unroll = list(of.drafter.unroll(batch.ids_BT, of.teacher.aux_BTNH, batch.documents_BT, K))
    length = torch.zeros((), dtype=torch.float64)
    for b, t in itertools.product(range(3), range(T)):
        so_far = torch.ones((), dtype=torch.float64)
        for k in range(K):
            if not supervised(batch.loss_mask_BT, batch.documents_BT, k)[b, t]:
                break
            p_V = (of.head_VH @ of.teacher.final_BTH[b, t + 1 + k]).softmax(-1)
            q_D = of.drafter.logits(unroll[k].normed_BTH)[b, t].softmax(-1)
            so_far = so_far * torch.minimum(p_V[ids_D], q_D).sum()
            length = length + so_far
    (-length).backward()
    wanted = {n: p.grad for n, p in of.drafter.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys() and float(length.detach()) > 1
    for n, gradient in wanted.items():
        largest = float(gradient.abs().max())
        assert largest > 0
        torch.testing.assert_close(found[n], gradient, rtol=0, atol=1e-10 * largest)


@pytest.mark.parametrize("in_vocab", [True, False])
@pytest.mark.parametrize(
    "part", [AcceptUntilFail(), AcceptedLength(), DPACE()], ids=["auf", "length", "dpace"]
)
@pytest.mark.parametrize("name", ["eagle1", "eagle3_1", "peagle_3_1"])
def test_a_training_step_is_its_definition_in_any_pieces(
    name: str, part: PrefixWeights, in_vocab: bool
) -> None:
    """Loss, figures and gradients; with EAGLE-1 of two losses, one of them of the state."""
    of, loss = lesson(name), EAGLE1 if name == "eagle1" else SoftCrossEntropy()
    rows, factors, named = rows_of(of, part, loss, in_vocab), part.factors(K), terms(loss)
    sums_KN = torch.stack(
        [torch.stack([row.loss_N * row.weight for row in step]).sum(0) for step in rows]
    )
    count_K = [math.fsum(row.weight for row in step) for step in rows]
    assert count_K[2] > 0 and count_K[0] > count_K[2]  # some chains go on, some have failed
    total = math.fsum(map(math.prod, zip(factors, count_K, strict=True)))
    want = (
        sum(
            f * term.weight * sums_KN[k, n]
            for k, f in enumerate(factors)
            for n, term in enumerate(named)
        )
        / total
    )
    learned = [p for p in of.drafter.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(want, learned)
    for size in (1, 2**20):
        recipe = ObjectiveConfig(loss, K, part, in_vocab, Blocked(5), piece_bytes=size)
        got = TrainStep(of.drafter, recipe)(of.batch, of.teacher)
        torch.testing.assert_close(got.loss, want, rtol=1e-12, atol=0)
        for mine, theirs in zip(torch.autograd.grad(got.loss, learned), wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11 * float(theirs.abs().max()))
        assert got.counts.rows_K.tolist() == pytest.approx(count_K, rel=1e-12)
        assert float(got.weight) == pytest.approx(total, rel=1e-12)
        metrics = UnrollMetrics(named, factors)
        metrics.update(got.counts)
        figures = metrics.compute()
        assert float(figures["loss"]) == pytest.approx(float(want.detach()), rel=1e-6)
        per_step = (sums_KN.detach() * torch.tensor([term.weight for term in named])).sum(
            1
        ) / torch.tensor(count_K)
        assert [float(figures[f"loss_{k}"]) for k in range(K)] == pytest.approx(
            per_step.tolist(), rel=1e-6
        )


def test_a_step_whose_rows_weigh_less_than_one_has_its_mean() -> None:
    metrics = UnrollMetrics(terms(SoftCrossEntropy()), [1.0])
    blank = {name: torch.zeros(1, dtype=torch.float64) for name in StepCounts._fields}
    metrics.update(
        StepCounts(
            **{**blank, "rows_K": blank["rows_K"] + 0.25, "loss_KN": torch.full((1, 1), 0.5)}
        )
    )
    assert float(metrics.compute()["loss_0"]) == 2


def test_dpace_with_the_hard_loss_climbs_the_accepted_length() -> None:
    """By autograd of the surrogate itself, whose confidences are nobody's constants."""
    of = lesson("eagle3_1")
    got = TrainStep(of.drafter, ObjectiveConfig(HardCrossEntropy(), K, DPACE(0.0), piece_bytes=1))(
        of.batch, of.teacher
    )
    alive_S, length = torch.ones(3 * T, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    ids = of.drafter.vocab.target_ids_D
    unroll = of.drafter.unroll(of.batch.ids_BT, of.teacher.aux_BTNH, of.batch.documents_BT, K)
    best_BT = (of.teacher.final_BTH @ of.head_VH.T).argmax(-1)
    for k, step in enumerate(unroll):
        q_BTD, token_BT1 = (
            of.drafter.logits(step.normed_BTH).softmax(-1),
            best_BT.roll(-1 - k, 1)[..., None],
        )
        sure_BT = (q_BTD * (ids == token_BT1)).sum(-1) * supervised(
            of.batch.loss_mask_BT, of.batch.documents_BT, k
        )
        alive_S = alive_S * sure_BT.flatten()
        length = length + alive_S.sum()
    learned = [p for p in of.drafter.parameters() if p.requires_grad]
    ours = torch.autograd.grad(got.loss * got.weight.detach(), learned)
    for mine, theirs in zip(ours, torch.autograd.grad(-length, learned), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11 * float(theirs.abs().max()))


@pytest.mark.parametrize("part", [AcceptUntilFail(), DPACE()])
def test_no_supervised_row_is_zero_and_reaches_every_parameter(part: PrefixWeights) -> None:
    of = lesson("eagle3_1")
    blank = of.batch._replace(loss_mask_BT=torch.zeros_like(of.batch.loss_mask_BT))
    got = TrainStep(of.drafter, ObjectiveConfig(steps=K, weights=part))(blank, of.teacher)
    assert float(got.loss.detach()) == 0 == float(got.weight)
    learned = [p for p in of.drafter.parameters() if p.requires_grad]
    assert not any(bool(gradient.any()) for gradient in torch.autograd.grad(got.loss, learned))


@pytest.mark.parametrize(("part", "passes"), [(Decay(), 1), (AcceptUntilFail(), 2), (DPACE(), 2)])
def test_only_weights_that_look_ask_twice(part: StepWeights, passes: int) -> None:
    """And they ask for what they look at, whatever the loss reads."""
    of, asked = lesson("eagle3_1"), []
    heard = of.teacher._replace(
        probs=lambda final_CH: asked.append(len(final_CH)) or of.teacher.probs(final_CH)
    )
    once = ObjectiveConfig(SoftCrossEntropy(), K, part, False)
    TrainStep(of.drafter, once)(of.batch, heard, measure=False)
    assert len(asked) == passes and len(set(asked)) == 1
    probs = target_outputs(tiny_target(), of.drafter, of.batch, once, measure=False).probs
    assert isinstance(probs, TargetHead)
    assert probs.needs_covered is (passes == 2) and ("token_R" in probs.reads) is (passes == 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Decay(0.0), r"^Decay\.base must be above 0, not 0\.0"),
        (lambda: Decay(1.1), r"^Decay\.base must be at most 1, not 1\.1"),
        (lambda: AcceptUntilFail(-1.0), r"^AcceptUntilFail\.base must be above 0"),
        (lambda: DPACE(1.5), r"^DPACE\.alpha must be at most 1"),
    ],
)
def test_weights_without_meaning(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
