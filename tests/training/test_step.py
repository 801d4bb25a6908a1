"""A training step against a slow reading of its definition, one slot at a time, in plain Python floats."""

import math
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.data import Batch
from specdec.drafter import Drafter, DrafterSpec
from specdec.nn.unroll import Dense
from specdec.nn.view import View
from specdec.training.divergences import HardCrossEntropy, LKLambda, TotalVariation
from specdec.training.losses import Loss, SoftCrossEntropy, Term, WeightedSum
from specdec.training.metrics import StepCounts
from specdec.training.step import (
    CUDA_PIECE,
    ObjectiveConfig,
    StepOutput,
    TargetOutputs,
    TrainStep,
    target_outputs,
)
from specdec.training.step_weights import Decay
from specdec.training.target_head import TargetHead
from tests.tiny import HIDDEN, LAYERS, VOCAB, presets, tiny_drafter, tiny_target

K, T = 4, 14
SOFT = SoftCrossEntropy()


class Echo:
    """A target whose states are its logits already."""

    vocab_size = VOCAB

    def logits(self, final_BTV: Tensor, rows: Tensor | slice | None = None) -> Tensor:
        return final_BTV if rows is None else final_BTV[..., rows]


def train_step(
    drafter: Drafter,
    batch: Batch,
    teacher: TargetOutputs,
    steps: int,
    decay: float,
    in_vocab: bool = True,
    measure: bool = True,
    loss: Loss = SOFT,
    **more: Any,
) -> StepOutput:
    return TrainStep(drafter, ObjectiveConfig(loss, steps, Decay(decay), in_vocab, **more))(
        batch, teacher, measure
    )


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


def make_teacher(drafter: Drafter, batch: Batch, seed: int = 1) -> TargetOutputs:
    generator = torch.Generator().manual_seed(seed)
    n = len(drafter.config.aux_layers)
    aux = torch.randn(*batch.ids_BT.shape, n, HIDDEN, dtype=torch.float64, generator=generator)
    logits = 2 * torch.randn(*batch.ids_BT.shape, VOCAB, dtype=torch.float64, generator=generator)
    return TargetOutputs(
        aux,
        logits,
        TargetHead(
            Echo(), drafter.vocab, {"log_p_RD", "log_mass_R", "token_R"}, needs_covered=True
        ),
    )


def softmax(values: list[float]) -> list[float]:
    top = max(values)
    raw = [math.exp(value - top) for value in values]
    return [value / math.fsum(raw) for value in raw]


class Slow(NamedTuple):
    loss: float
    counts: dict[str, list[float]]


@torch.no_grad()
def slow(
    drafter: Drafter, batch: Batch, teacher: TargetOutputs, decay: float, in_vocab: bool
) -> Slow:
    """The definition, slot by slot."""
    ids = drafter.vocab.target_ids_D.tolist()
    logits_K = [
        drafter.logits(step.normed_BTH)
        for step in drafter.unroll(batch.ids_BT, teacher.aux_BTNH, batch.documents_BT, K)
    ]
    counts = {name: [0.0] * K for name in (*StepCounts._fields, "loss_K") if name != "loss_KN"}
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
                    counts["loss_K"][k] -= math.fsum(
                        p * math.log(q) for p, q in zip(P, Q, strict=True)
                    )
                if all(m[t + 1 : predicted + 1]):
                    hit = ids[max(range(len(ids)), key=lambda j: Q[j])] == best
                    right[b, t] &= hit
                    counts["reached_K"][k] += 1
                    counts["hits_K"][k] += hit
                    counts["prefix_hits_K"][k] += right[b, t]
                    counts["overlap_K"][k] += math.fsum(
                        min(full[v], Q[j]) for j, v in enumerate(ids)
                    )
    total = math.fsum(decay**k * rows for k, rows in enumerate(counts["rows_K"]))
    return Slow(
        math.fsum(decay**k * loss for k, loss in enumerate(counts["loss_K"])) / max(total, 1e-30),
        counts,
    )


@pytest.mark.parametrize("in_vocab", [True, False])
@pytest.mark.parametrize("decay", [0.8, 1.0])
@pytest.mark.parametrize("name", presets())
def test_loss_and_counts_are_their_definition(name: str, decay: float, in_vocab: bool) -> None:
    drafter, batch = learner(presets()[name]), make_batch()
    teacher = make_teacher(drafter, batch)
    got, want = (
        train_step(drafter, batch, teacher, K, decay, in_vocab),
        slow(drafter, batch, teacher, decay, in_vocab),
    )
    assert math.isclose(float(got.loss.detach()), want.loss, rel_tol=1e-12)
    for field, values in (got.counts._replace(loss_KN=got.counts.loss_KN[:, 0]))._asdict().items():
        assert values.dtype == torch.float64
        field = "loss_K" if field == "loss_KN" else field
        assert values.tolist() == pytest.approx(want.counts[field], rel=1e-12, abs=1e-12), field
    covered, all_rows = sum(want.counts["covered_K"]), sum(want.counts["supervised_K"])
    assert (covered < all_rows) == (name != "eagle1") and min(want.counts["reached_K"]) > 0


def test_the_teacher_is_renormalised_for_the_loss_and_not_for_the_overlap() -> None:
    """Mass that the target puts outside the draft vocabulary: no change of loss, all the change of acceptance."""
    drafter, batch = learner(presets()["eagle3"]), make_batch()
    teacher = make_teacher(drafter, batch)
    outside = next(v for v in range(VOCAB) if v not in drafter.vocab.target_ids_D.tolist())
    heavier = teacher.final_BTH.clone()
    heavier[..., outside] = 40.0
    before, after = (
        train_step(drafter, batch, teacher._replace(final_BTH=logits), K, 0.8, in_vocab=False)
        for logits in (teacher.final_BTH, heavier)
    )
    torch.testing.assert_close(after.loss, before.loss, rtol=1e-13, atol=0)
    assert (
        float(before.counts.overlap_K.min()) > 1e-3 and float(after.counts.overlap_K.max()) < 1e-9
    )
    with_mask = train_step(
        drafter, batch, teacher._replace(final_BTH=heavier), K, 0.8, in_vocab=True
    )
    assert float(with_mask.counts.rows_K.sum()) == 0 and float(with_mask.loss.detach()) == 0
    assert torch.equal(with_mask.counts.supervised_K, before.counts.supervised_K)


@pytest.mark.parametrize("name", presets())
def test_no_supervised_row_gives_zero_loss_and_zero_gradients_everywhere(name: str) -> None:
    drafter, batch = learner(presets()[name]), make_batch()
    teacher = make_teacher(drafter, batch)
    empty = batch._replace(loss_mask_BT=torch.zeros_like(batch.loss_mask_BT))
    got = train_step(drafter, empty, teacher, K, 0.8)
    assert float(got.loss.detach()) == 0 and all(float(values.sum()) == 0 for values in got.counts)
    got.loss.backward()
    for key, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, key
            assert bool((parameter.grad == 0).all()), key
        else:
            assert parameter.grad is None


@pytest.mark.parametrize("name", presets())
def test_the_teacher_is_the_targets_own_word(name: str) -> None:
    target, drafter, batch = tiny_target(), learner(presets()[name]), make_batch()
    teacher = target_outputs(target, drafter, batch, ObjectiveConfig())
    assert not teacher.aux_BTNH.requires_grad and not teacher.final_BTH.requires_grad
    # the first row is one whole document
    own = target.model(batch.ids_BT[:1], output_hidden_states=True)
    probs = teacher.probs(teacher.final_BTH[0])
    want = own.logits[0][:, drafter.vocab.target_ids_D].softmax(-1)
    torch.testing.assert_close(probs.p_CD, want, rtol=1e-5, atol=1e-7)
    # EAGLE-1's last one after the final norm, as theirs
    for n, boundary in enumerate(drafter.config.aux_layers):
        torch.testing.assert_close(
            teacher.aux_BTNH[0, :, n], own.hidden_states[boundary][0], rtol=1e-5, atol=1e-5
        )
    assert (name == "eagle1") == (drafter.config.aux_layers == (LAYERS,))
    second = target(batch.ids_BT[1:2, 6:], View.packed(torch.zeros(1, 8, dtype=torch.int64)), [2])
    torch.testing.assert_close(teacher.final_BTH[1, 6:], second.final_BTH[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "kept", "arrive"),
    [
        # a projection reads them, for which autocast would round them
        ("eagle3", torch.bfloat16, torch.bfloat16),
        ("eagle3", torch.float64, torch.float32),  # which autocast leaves alone
        ("eagle3_1", torch.bfloat16, torch.float32),  # a norm reads them
        ("eagle1", torch.bfloat16, torch.float32),  # the drafter's own residual stream
    ],
)
def test_states_are_widened_under_autocast_only_where_they_have_to_be(
    name: str, kept: torch.dtype, arrive: torch.dtype
) -> None:
    target, drafter, batch = tiny_target(dtype=kept), learner(presets()[name]).float(), make_batch()
    with torch.autocast("cpu", torch.bfloat16):
        teacher = target_outputs(target, drafter, batch, ObjectiveConfig(steps=2))
        assert teacher.aux_BTNH.dtype == arrive and teacher.final_BTH.dtype == kept
        TrainStep(drafter, ObjectiveConfig(steps=2))(batch, teacher).loss.backward()
    assert target_outputs(target, drafter, batch, ObjectiveConfig()).aux_BTNH.dtype == torch.float32


SEVERAL = WeightedSum(
    [Term(LKLambda(), 0.5), Term(SoftCrossEntropy(), 2.0), Term(TotalVariation(), 0.0)]
)


@pytest.mark.parametrize("recompute", [False, True])
def test_several_terms_are_counted_one_by_one(recompute: bool) -> None:
    """What the logs show of each is what it is alone, and the loss is their weighted mean."""
    drafter, batch = learner(presets()["eagle3"]), make_batch()
    teacher = make_teacher(drafter, batch)
    got = train_step(drafter, batch, teacher, K, 0.8, loss=SEVERAL, recompute=recompute)
    alone = [train_step(drafter, batch, teacher, K, 0.8, loss=term.loss) for term in SEVERAL.terms]
    assert got.counts is not None
    for n, one in enumerate(alone):
        torch.testing.assert_close(
            got.counts.loss_KN[:, n], one.counts.loss_KN[:, 0], rtol=1e-13, atol=0
        )
    want = sum(term.weight * one.loss for term, one in zip(SEVERAL.terms, alone, strict=True))
    torch.testing.assert_close(got.loss, want, rtol=1e-13, atol=0)
    rows = sum(0.8**k * float(count) for k, count in enumerate(got.counts.rows_K))
    assert math.isclose(float(got.weight), rows, rel_tol=1e-13)


class Counted(TorchDispatchMode):
    """Operators by name, within which on a GPU the process waits for it or not."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("K", [1, 7])
def test_how_often_a_device_is_waited_for(K: int) -> None:
    """Six times a step, whatever is unrolled: for features that are finite, the number and places of kept slots, the
    numbers, places and cuts of pieces (a list is read here without an operator). A CPU's slices ask twice, of three."""
    drafter, batch, config = (
        learner(presets()["eagle3_1"]),
        make_batch(),
        ObjectiveConfig(steps=K, kernel=Dense()),
    )
    step, target = TrainStep(drafter, config), tiny_target()
    with Counted() as counted:
        step(
            batch, target_outputs(target, drafter, batch, config, measure=False), measure=False
        ).loss.backward()
    assert counted.found["aten::nonzero"] <= 2
    assert counted.found["aten::_local_scalar_dense"] == 2 + 2 * 3 * K
    assert not {
        "aten::item",
        "aten::equal",
        "aten::is_nonzero",
        "aten::_unique2",
        "aten::masked_select",
    } & {*counted.found}


def test_how_many_operators_a_step_launches() -> None:
    """On a GPU each costs some microseconds. Pieces of the loss are few there: 14 at EAGLE-3's usual shape."""
    found = []
    for size in (CUDA_PIECE, 1):  # one piece of all, and two
        drafter, batch = learner(presets()["eagle3_1"]), make_batch()
        config, target = ObjectiveConfig(steps=7, kernel=Dense(), piece_bytes=size), tiny_target()
        teacher = target_outputs(target, drafter, batch, config, measure=False)
        with Counted() as counted:
            TrainStep(drafter, config)(batch, teacher, measure=False).loss.backward()
        found.append(counted.found.total())
    one, two = found
    assert one <= 3420 and two - one <= 280
    rows, T, D = 8, 4096, 32_000
    assert -(-rows * T // ObjectiveConfig(steps=7, piece_bytes=CUDA_PIECE).piece(4, D)) == 14


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
    recipe = ObjectiveConfig(loss, in_vocab=in_vocab)
    probs = target_outputs(
        tiny_target(), learner(presets()["eagle3"]), make_batch(), recipe, measure
    ).probs
    assert isinstance(probs, TargetHead)
    assert probs.needs_covered is known and (
        probs.reads == reads or (loss is SEVERAL and probs.reads >= {"log_mass_R", "log_p_RD"})
    )
