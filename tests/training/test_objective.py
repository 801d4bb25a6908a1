"""The objective against a slow reading of its definition, one slot at a time, in plain Python floats."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from specdec.data import Batch
from specdec.drafter import Drafter, DrafterSpec
from specdec.nn.view import View
from specdec.training.law import Law, TargetLaw
from specdec.training.losses import (
    HardCrossEntropy,
    LKLambda,
    Loss,
    SmoothL1,
    SoftCrossEntropy,
    Term,
    TotalVariation,
    WeightedSum,
)
from specdec.training.objective import Counts, Objective, Recipe, Teacher, teach
from specdec.training.objective import objective as run
from specdec.training.ttt import ttt_unroll
from tests.tiny import HIDDEN, LAYERS, VOCAB, presets, tiny_drafter, tiny_target

K, T = 4, 14
SOFT = SoftCrossEntropy()


class Heads:
    """The law of a target whose head is the drafter's, as EAGLE-1's is."""

    vocab_size = VOCAB

    def __init__(self, drafter: Drafter) -> None:
        self.head_VH = drafter.lm_head.weight.detach()
        self.law = TargetLaw(self, drafter.vocab, {"log_p_RD", "log_mass_R", "token_R"}, known=True)

    def logits(self, final_BTH: Tensor, rows: Tensor | slice | None = None) -> Tensor:
        return final_BTH @ self.head_VH.T if rows is None else final_BTH @ self.head_VH[rows].T

    def __call__(self, final_CH: Tensor) -> Law:
        return self.law(final_CH)


class Echo:
    """A target whose states are its logits already."""

    vocab_size = VOCAB

    def logits(self, final_BTV: Tensor, rows: Tensor | slice | None = None) -> Tensor:
        return final_BTV if rows is None else final_BTV[..., rows]


def objective(
    drafter: Drafter,
    batch: Batch,
    teacher: Teacher,
    steps: int,
    decay: float,
    in_vocab: bool = True,
    measure: bool = True,
    loss: Loss = SOFT,
    **more: Any,
) -> Objective:
    return run(drafter, batch, teacher, Recipe(loss, steps, decay, in_vocab, **more), measure)


def learner(spec: DrafterSpec, dtype: torch.dtype = torch.float64) -> Drafter:
    """A drafter in training: all but the embedding has gradients."""
    drafter = tiny_drafter(spec, dtype=dtype).requires_grad_()
    drafter.embed_tokens.requires_grad_(False)
    return drafter


def make_batch(seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        torch.randint(0, VOCAB, (3, T), generator=generator),
        torch.rand(3, T, generator=generator) < 0.8,
        torch.tensor([[0] * T, [0] * 6 + [1] * 8, [0] * 5 + [1] * 6 + [-1] * 3]),
    )


def make_teacher(drafter: Drafter, batch: Batch, seed: int = 1) -> Teacher:
    generator = torch.Generator().manual_seed(seed)
    n = len(drafter.config.aux_layers)
    aux = torch.randn(*batch.ids_BT.shape, n, HIDDEN, dtype=torch.float64, generator=generator)
    logits = 2 * torch.randn(*batch.ids_BT.shape, VOCAB, dtype=torch.float64, generator=generator)
    return Teacher(aux, logits, TargetLaw(Echo(), drafter.vocab, {"log_p_RD", "log_mass_R", "token_R"}, known=True))


def softmax(values: list[float]) -> list[float]:
    top = max(values)
    raw = [math.exp(value - top) for value in values]
    return [value / math.fsum(raw) for value in raw]


class Slow(NamedTuple):
    loss: float
    counts: dict[str, list[float]]


@torch.no_grad()
def slow(drafter: Drafter, batch: Batch, teacher: Teacher, decay: float, in_vocab: bool) -> Slow:
    """The definition, slot by slot."""
    ids = drafter.vocab.target_ids_D.tolist()
    logits_K = [
        drafter.logits(step.normed_BTH)
        for step in ttt_unroll(drafter, batch.ids_BT, teacher.aux_BTNH, batch.documents_BT, K)
    ]
    counts = {name: [0.0] * K for name in (*Counts._fields, "loss_K") if name != "loss_KN"}
    right = dict.fromkeys(((b, t) for b in range(3) for t in range(T)), True)
    for k in range(K):
        for b in range(3):
            m, documents = batch.loss_mask_BT[b].tolist(), batch.documents_BT[b].tolist()
            for t in range(T - 2 - k):
                predicted = t + 2 + k
                if documents[t] < 0 or documents[predicted] != documents[t]:
                    continue
                if not (m[predicted - 1] and m[predicted]):
                    continue
                target = teacher.final_BTH[b, predicted - 1].tolist()
                full = softmax(target)
                best = max(range(VOCAB), key=lambda v: target[v])
                P, Q = softmax([target[v] for v in ids]), softmax(logits_K[k][b, t].tolist())
                counts["supervised_K"][k] += 1
                counts["covered_K"][k] += best in ids
                if best in ids or not in_vocab:
                    counts["rows_K"][k] += 1
                    counts["loss_K"][k] -= math.fsum(p * math.log(q) for p, q in zip(P, Q, strict=True))
                if all(m[t + 1 : predicted + 1]):
                    hit = ids[max(range(len(ids)), key=lambda j: Q[j])] == best
                    right[b, t] &= hit
                    counts["reached_K"][k] += 1
                    counts["hits_K"][k] += hit
                    counts["prefix_hits_K"][k] += right[b, t]
                    counts["overlap_K"][k] += math.fsum(min(full[v], Q[j]) for j, v in enumerate(ids))
    total = math.fsum(decay**k * rows for k, rows in enumerate(counts["rows_K"]))
    return Slow(math.fsum(decay**k * loss for k, loss in enumerate(counts["loss_K"])) / max(total, 1e-30), counts)


@pytest.mark.parametrize("in_vocab", [True, False])
@pytest.mark.parametrize("decay", [0.8, 1.0])
@pytest.mark.parametrize("name", presets())
def test_loss_and_counts_are_their_definition(name: str, decay: float, in_vocab: bool) -> None:
    drafter, batch = learner(presets()[name]), make_batch()
    teacher = make_teacher(drafter, batch)
    got, want = (
        objective(drafter, batch, teacher, K, decay, in_vocab),
        slow(drafter, batch, teacher, decay, in_vocab),
    )
    assert math.isclose(float(got.loss.detach()), want.loss, rel_tol=1e-12)
    for field, values in (got.counts._replace(loss_KN=got.counts.loss_KN[:, 0]))._asdict().items():
        assert values.dtype == torch.float64
        field = "loss_K" if field == "loss_KN" else field
        assert values.tolist() == pytest.approx(want.counts[field], rel=1e-12, abs=1e-12), field
    covered, all_rows = sum(want.counts["covered_K"]), sum(want.counts["supervised_K"])
    assert (covered < all_rows) == (name != "eagle1") and min(want.counts["reached_K"]) > 0


@torch.no_grad()
def set_logits(drafter: Drafter, batch: Batch, teacher: Teacher, k: int) -> Teacher:
    """A teacher whose greedy token is what the drafter proposes at step k."""
    step = list(ttt_unroll(drafter, batch.ids_BT, teacher.aux_BTNH, batch.documents_BT, K))[k]
    best = drafter.vocab.to_target(drafter.logits(step.normed_BTH).argmax(-1))
    logits = teacher.final_BTH.clone()
    for t in range(T - 1 - k):
        logits[:, t + 1 + k].scatter_(-1, best[:, t, None], 30.0)
    return teacher._replace(final_BTH=logits)


@pytest.mark.parametrize("k", range(3))
def test_a_drafter_that_is_always_right_at_one_depth(k: int) -> None:
    drafter, batch = learner(presets()["eagle3_1"]), make_batch()
    teacher = set_logits(drafter, batch, make_teacher(drafter, batch), k)
    counts = objective(drafter, batch, teacher, K, 1.0).counts
    assert float(counts.hits_K[k]) == float(counts.reached_K[k]) > 0
    others = [j for j in range(K) if j != k]
    assert all(float(counts.hits_K[j]) < float(counts.reached_K[j]) for j in others)
    if k == 0:
        assert float(counts.prefix_hits_K[0]) == float(counts.reached_K[0])


def test_the_teacher_is_renormalised_for_the_loss_and_not_for_the_overlap() -> None:
    """Mass that the target puts outside the draft vocabulary: no change of loss, all the change of acceptance."""
    drafter, batch = learner(presets()["eagle3"]), make_batch()
    teacher = make_teacher(drafter, batch)
    outside = next(v for v in range(VOCAB) if v not in drafter.vocab.target_ids_D.tolist())
    heavier = teacher.final_BTH.clone()
    heavier[..., outside] = 40.0
    before, after = (
        objective(drafter, batch, teacher._replace(final_BTH=logits), K, 0.8, in_vocab=False)
        for logits in (teacher.final_BTH, heavier)
    )
    torch.testing.assert_close(after.loss, before.loss, rtol=1e-13, atol=0)
    assert float(before.counts.overlap_K.min()) > 1e-3 and float(after.counts.overlap_K.max()) < 1e-9
    with_mask = objective(drafter, batch, teacher._replace(final_BTH=heavier), K, 0.8, in_vocab=True)
    assert float(with_mask.counts.rows_K.sum()) == 0 and float(with_mask.loss.detach()) == 0
    assert torch.equal(with_mask.counts.supervised_K, before.counts.supervised_K)


def test_a_twin_of_the_target_accepts_all() -> None:
    """Overlap is one where both laws are equal: the drafter's own logits, scattered, as the teacher."""
    drafter, batch = learner(presets()["eagle1"]), make_batch()
    teacher = make_teacher(drafter, batch)
    step = next(iter(ttt_unroll(drafter, batch.ids_BT, teacher.aux_BTNH, batch.documents_BT, 1)))
    logits = torch.roll(drafter.logits(step.normed_BTH).detach(), 1, dims=1)  # the teacher of slot t stands at t + 1
    counts = objective(drafter, batch, teacher._replace(final_BTH=logits), 1, 1.0).counts
    torch.testing.assert_close(counts.overlap_K, counts.reached_K, rtol=1e-12, atol=0)
    assert torch.equal(counts.hits_K, counts.reached_K)


def test_the_gradient_is_that_of_the_slow_loss() -> None:
    """By differences of the slow loss, in a random direction of the weights."""
    drafter, batch = learner(presets()["eagle3_1"]), make_batch()
    teacher = make_teacher(drafter, batch)
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(objective(drafter, batch, teacher, K, 0.8).loss, parameters)
    generator = torch.Generator().manual_seed(9)
    away = [torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in parameters]
    slope = float(sum((g * d).sum() for g, d in zip(gradients, away, strict=True)))
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            for p, d in zip(parameters, away, strict=True):
                p.add_(d, alpha=sign * 1e-6)
            values.append(slow(drafter, batch, teacher, 0.8, True).loss)
            for p, d in zip(parameters, away, strict=True):
                p.sub_(d, alpha=sign * 1e-6)
    assert abs(slope) > 1e-3
    assert math.isclose((values[0] - values[1]) / 2e-6, slope, rel_tol=1e-5)


@pytest.mark.parametrize("name", presets())
def test_no_supervised_row_gives_zero_loss_and_zero_gradients_everywhere(name: str) -> None:
    drafter, batch = learner(presets()[name]), make_batch()
    teacher = make_teacher(drafter, batch)
    empty = batch._replace(loss_mask_BT=torch.zeros_like(batch.loss_mask_BT))
    got = objective(drafter, empty, teacher, K, 0.8)
    assert float(got.loss.detach()) == 0 and all(float(values.sum()) == 0 for values in got.counts)
    got.loss.backward()
    for key, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, key
            assert bool((parameter.grad == 0).all()), key
        else:
            assert parameter.grad is None


def test_every_trainable_parameter_learns() -> None:
    for name, spec in presets().items():
        drafter, batch = learner(spec), make_batch()
        teacher = make_teacher(drafter, batch)
        drafter.embed_tokens.requires_grad_()
        objective(drafter, batch, teacher, 2, 0.8).loss.backward()
        for key, parameter in drafter.named_parameters():
            assert parameter.grad is not None and float(parameter.grad.abs().max()) > 0, (name, key)


def test_unsupervised_text_changes_nothing() -> None:
    """Padding and what stands in it: no weight in loss or counts."""
    drafter, batch = learner(presets()["eagle3_1"]), make_batch()
    teacher = make_teacher(drafter, batch)
    pad = batch.documents_BT < 0
    other_ids = batch.ids_BT.masked_fill(pad, 7)
    other = teacher._replace(final_BTH=teacher.final_BTH.masked_fill(pad[..., None], 3.0))
    before = objective(drafter, batch, teacher, K, 0.8)
    after = objective(drafter, batch._replace(ids_BT=other_ids), other, K, 0.8)
    assert torch.equal(before.loss, after.loss) and torch.equal(before.counts.overlap_K, after.counts.overlap_K)


def test_bfloat16_teachers_are_compared_in_float32() -> None:
    drafter, batch = learner(presets()["eagle3"], dtype=torch.float32), make_batch()
    teacher = make_teacher(drafter, batch)
    low = teacher._replace(aux_BTNH=teacher.aux_BTNH.float(), final_BTH=teacher.final_BTH.bfloat16())
    got = objective(drafter, batch, low, K, 0.8)
    high = objective(drafter, batch, low._replace(final_BTH=low.final_BTH.float()), K, 0.8)
    assert got.loss.dtype == torch.float32
    torch.testing.assert_close(got.loss, high.loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", presets())
def test_the_teacher_is_the_targets_own_word(name: str) -> None:
    target, drafter, batch = tiny_target(), learner(presets()[name]), make_batch()
    teacher = teach(target, drafter, batch, Recipe())
    assert not teacher.aux_BTNH.requires_grad and not teacher.final_BTH.requires_grad
    own = target.model(batch.ids_BT[:1], output_hidden_states=True)  # the first row is one whole document
    law = teacher.law(teacher.final_BTH[0])
    want = own.logits[0][:, drafter.vocab.target_ids_D].softmax(-1)
    torch.testing.assert_close(law.p_CD, want, rtol=1e-5, atol=1e-7)
    for n, boundary in enumerate(drafter.config.aux_layers):  # EAGLE-1's last one after the final norm, as theirs
        torch.testing.assert_close(teacher.aux_BTNH[0, :, n], own.hidden_states[boundary][0], rtol=1e-5, atol=1e-5)
    assert (name == "eagle1") == (drafter.config.aux_layers == (LAYERS,))
    second = target(batch.ids_BT[1:2, 6:], View.packed(torch.zeros(1, 8, dtype=torch.int64)), [2])
    torch.testing.assert_close(teacher.final_BTH[1, 6:], second.final_BTH[0], rtol=1e-5, atol=1e-5)


def test_one_step_and_rows_shorter_than_the_unroll() -> None:
    drafter = learner(DrafterSpec(draft_vocab_size=40))
    batch = Batch(torch.tensor([[1, 2, 3]]), torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, 3, dtype=torch.int64))
    teacher = make_teacher(drafter, batch)
    got = objective(drafter, batch, teacher, 6, 0.8, in_vocab=False)
    assert got.counts.rows_K.tolist() == [1, 0, 0, 0, 0, 0] and bool(got.loss.isfinite())
    alone = objective(drafter, batch, teacher, 1, 0.8, in_vocab=False)
    assert math.isclose(float(got.loss.detach()), float(alone.loss.detach()), rel_tol=1e-12)


def test_a_frozen_drafter_can_be_measured() -> None:
    """As one that was loaded: nothing to train, yet loss and figures to read."""
    drafter, batch = learner(presets()["eagle3"]).requires_grad_(False), make_batch()
    assert float(objective(drafter, batch, make_teacher(drafter, batch), K, 0.8).loss) > 0


SEVERAL = WeightedSum([Term(LKLambda(), 0.5), Term(SoftCrossEntropy(), 2.0), Term(TotalVariation(), 0.0)])


@pytest.mark.parametrize("recompute", [False, True])
def test_several_terms_are_counted_one_by_one(recompute: bool) -> None:
    """What the logs show of each is what it is alone, and the loss is their weighted mean."""
    drafter, batch = learner(presets()["eagle3"]), make_batch()
    teacher = make_teacher(drafter, batch)
    got = objective(drafter, batch, teacher, K, 0.8, loss=SEVERAL, recompute=recompute)
    alone = [objective(drafter, batch, teacher, K, 0.8, loss=term.loss) for term in SEVERAL.terms]
    assert got.counts is not None
    for n, one in enumerate(alone):
        torch.testing.assert_close(got.counts.loss_KN[:, n], one.counts.loss_KN[:, 0], rtol=1e-13, atol=0)
    want = sum(term.weight * one.loss for term, one in zip(SEVERAL.terms, alone, strict=True))
    torch.testing.assert_close(got.loss, want, rtol=1e-13, atol=0)
    rows = sum(0.8**k * float(count) for k, count in enumerate(got.counts.rows_K))
    assert math.isclose(float(got.rows), rows, rel_tol=1e-13)


def test_the_order_of_terms_is_the_logs_order() -> None:
    """Terms of the state and of the law, mixed: each column under its own name."""
    drafter, batch = learner(presets()["eagle1"]), make_batch()
    teacher = make_teacher(drafter, batch)
    teacher = teacher._replace(final_BTH=teacher.aux_BTNH[:, :, 0], law=Heads(drafter))
    one, other = Term(SmoothL1(), 0.5), Term(SoftCrossEntropy(), 2.0)
    forth, back, state, soft = (
        objective(drafter, batch, teacher, K, 0.8, loss=WeightedSum(list(terms)))
        for terms in ([one, other], [other, one], [Term(SmoothL1())], [Term(SoftCrossEntropy())])
    )
    torch.testing.assert_close(forth.loss, back.loss, rtol=1e-13, atol=0)
    torch.testing.assert_close(forth.loss, 0.5 * state.loss + 2 * soft.loss, rtol=1e-13, atol=0)
    columns = torch.cat([state.counts.loss_KN, soft.counts.loss_KN], dim=1)
    torch.testing.assert_close(forth.counts.loss_KN, columns, rtol=1e-13, atol=0)
    torch.testing.assert_close(back.counts.loss_KN, columns.flip(1), rtol=1e-13, atol=0)


def test_measuring_changes_no_gradient() -> None:
    drafter, batch = learner(presets()["eagle3_1"]), make_batch()
    teacher, found = make_teacher(drafter, batch), []
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    for measure in (True, False):
        out = objective(drafter, batch, teacher, K, 0.8, measure=measure, loss=SEVERAL)
        assert (out.counts is not None) is measure
        found.append([out.loss, out.rows, *torch.autograd.grad(out.loss, parameters)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("loss", "in_vocab", "measure", "reads", "known"),
    [
        (SOFT, True, False, set(), True),
        (SOFT, False, False, set(), False),
        (SOFT, False, True, {"log_mass_R", "token_R"}, True),
        (HardCrossEntropy(), False, False, {"token_R"}, False),
        (SEVERAL, False, False, {"log_mass_R", "log_p_RD", "token_R"}, False),
    ],
)
def test_the_target_is_asked_for_what_is_read_and_no_more(
    loss: Loss, in_vocab: bool, measure: bool, reads: set[str], known: bool
) -> None:
    recipe = Recipe(loss, in_vocab=in_vocab)
    law = teach(tiny_target(), learner(presets()["eagle3"]), make_batch(), recipe, measure).law
    assert isinstance(law, TargetLaw)
    assert law.known is known and (law.reads == reads or (loss is SEVERAL and law.reads >= {"log_mass_R", "log_p_RD"}))


def test_a_teacher_that_is_no_number_does_not_reach_the_weights_unseen() -> None:
    """Behind the features the last state can still be broken: the loss says so, and no count is made up."""
    drafter, batch = learner(presets()["eagle3"]), make_batch()
    teacher = make_teacher(drafter, batch)
    broken = teacher._replace(final_BTH=torch.full_like(teacher.final_BTH, float("nan")))
    assert not bool(objective(drafter, batch, broken, K, 0.8, in_vocab=False).loss.isfinite())
