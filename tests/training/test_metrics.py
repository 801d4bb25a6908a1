import pytest
import torch

from specdec.data import Batch
from specdec.training.losses import NamedTerm, SmoothL1, SoftCrossEntropy, Term, WeightedSum, terms
from specdec.training.metrics import StepCounts, UnrollMetrics
from tests.tiny import presets
from tests.training.test_step import learner, make_batch, make_teacher, train_step

ONE = terms(SoftCrossEntropy())
NAMES = {"loss", "prefix_proxy", "coverage"} | {
    f"{n}_{k}" for n in ("accuracy", "expected_acceptance", "loss") for k in range(3)
}


def counts(**rows: list[float]) -> StepCounts:
    """StepCounts with zeros where nothing is given."""
    blank = {name: [0.0, 0.0, 0.0] for name in StepCounts._fields}
    found = {
        name: torch.tensor(row, dtype=torch.float64) for name, row in {**blank, **rows}.items()
    }
    return StepCounts(**{**found, "loss_KN": found["loss_KN"].view(3, -1)})


def measured(
    *updates: StepCounts, named: list[NamedTerm] = ONE, decay: float = 0.8
) -> dict[str, float]:
    metric = UnrollMetrics(named, [decay**k for k in range(3)])
    for update in updates:
        metric.update(update)
    return {name: float(value) for name, value in metric.compute().items()}


FIRST = counts(
    rows_K=[8, 4, 2], loss_KN=[16, 2, 7], covered_K=[8, 4, 2], supervised_K=[10, 8, 2],
    reached_K=[8, 4, 2], hits_K=[6, 3, 1], prefix_hits_K=[6, 2, 1], overlap_K=[5, 2, 0.5],
)  # fmt: skip
SECOND = counts(
    rows_K=[2, 0, 0], loss_KN=[1, 0, 0], covered_K=[2, 0, 0], supervised_K=[2, 0, 0],
    reached_K=[2, 0, 0], hits_K=[0, 0, 0], prefix_hits_K=[0, 0, 0], overlap_K=[1, 0, 0],
)  # fmt: skip


def test_every_figure_by_hand() -> None:
    got = measured(FIRST)
    assert set(got) == NAMES
    assert [got[f"accuracy_{k}"] for k in range(3)] == pytest.approx([6 / 8, 3 / 4, 1 / 2])
    assert [got[f"expected_acceptance_{k}"] for k in range(3)] == pytest.approx(
        [5 / 8, 2 / 4, 0.5 / 2]
    )
    assert [got[f"loss_{k}"] for k in range(3)] == pytest.approx([2, 0.5, 3.5])
    assert got["prefix_proxy"] == pytest.approx(1 + 6 / 8 + 2 / 4 + 1 / 2)
    assert got["coverage"] == pytest.approx(14 / 20)


def test_the_loss_weighs_steps_and_terms() -> None:
    """One denominator: the decayed rows of all steps."""
    assert measured(FIRST)["loss"] == pytest.approx(
        (16 + 0.8 * 2 + 0.64 * 7) / (8 + 0.8 * 4 + 0.64 * 2)
    )
    named = terms(WeightedSum([Term(SmoothL1(), 2.0), Term(SoftCrossEntropy(), 0.5)]))
    two = FIRST._replace(
        loss_KN=torch.tensor([[4.0, 8.0], [0.0, 2.0], [1.0, 1.0]], dtype=torch.float64)
    )
    got = measured(two, named=named, decay=0.5)
    rows = 8 + 0.5 * 4 + 0.25 * 2
    assert got["smooth_l1"] == pytest.approx((4 + 0.25) / rows)
    assert got["soft_cross_entropy"] == pytest.approx((8 + 1 + 0.25) / rows)
    assert got["loss"] == pytest.approx(2 * got["smooth_l1"] + 0.5 * got["soft_cross_entropy"])
    assert got["loss_0"] == pytest.approx((2 * 4 + 0.5 * 8) / 8)


def test_batches_are_weighed_by_their_rows() -> None:
    """The mean over rows, not the mean of the batches' means."""
    got = measured(FIRST, SECOND)
    assert got["accuracy_0"] == pytest.approx(6 / 10) and got["loss_0"] == pytest.approx(17 / 10)
    assert got["accuracy_1"] == pytest.approx(3 / 4) and got["coverage"] == pytest.approx(16 / 22)
    assert got["prefix_proxy"] == pytest.approx(1 + 6 / 10 + 2 / 4 + 1 / 2)


def part(batch: Batch, rows: slice) -> Batch:
    return Batch(*(column[rows] for column in batch))


@pytest.mark.parametrize("name", presets())
def test_sums_over_batches_equal_one_big_batch(name: str) -> None:
    drafter, batch = learner(presets()[name]), make_batch()
    teacher = make_teacher(drafter, batch)
    pieces = [
        train_step(
            drafter,
            part(batch, rows),
            teacher._replace(aux_BTNH=teacher.aux_BTNH[rows], final_BTH=teacher.final_BTH[rows]),
            3,
            0.8,
        ).counts
        for rows in (slice(0, 1), slice(1, 3))
    ]
    whole = train_step(drafter, batch, teacher, 3, 0.8).counts
    assert measured(*pieces) == pytest.approx(measured(whole), rel=1e-6)
