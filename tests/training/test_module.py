"""The Lightning module: accumulation over batches, noise, and what it leaves behind.

A step over several batches, with any numbers of supervised rows, is the step over one batch of them all.
"""

import copy
import dataclasses
import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import ReduceLROnPlateau
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from specdec.data import Batch, TokenData
from specdec.data.token_data import Splits
from specdec.drafter import Drafter
from specdec.nn import backend
from specdec.target import Target, TargetSource
from specdec.training.distributed import unsharded
from specdec.training.losses import SmoothL1, SoftCrossEntropy, Term, WeightedSum
from specdec.training.module import DrafterModule
from specdec.training.noise import FeatureNoise
from specdec.training.schedule import Schedule, WarmupCosine
from specdec.training.step import ObjectiveConfig, TrainStep, target_outputs
from specdec.training.step_weights import StepWeights
from tests.tiny import VOCAB, presets, tiny_target

T, RATE = 12, 0.05


@dataclass(frozen=True)
class Tiny(TargetSource):
    """The tests' target, without a directory."""

    def load(self, device: str = "cpu") -> Target:
        return tiny_target()


class InMemory(TokenData):
    """LossRows as they are, in their order."""

    def __init__(self, rows: Batch, batch_size: int) -> None:
        super().__init__(rows.ids_BT.shape[1], batch_size)
        self._splits = Splits(rows, rows)

    def setup(self, stage: str | None = None) -> None:
        """Nothing to read."""

    def train_dataloader(self) -> Any:
        return self._loader(self.splits.train, shuffle=False)


class Begin(pl.Callback):
    """Keeps the drafter as it was before the first step."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.drafter: Drafter = copy.deepcopy(unsharded(pl_module.drafter))  # type: ignore[arg-type]


def sample(answers: list[int], seed: int = 0) -> Batch:
    """One row for each number: how many of its last tokens are answers."""
    ids = torch.randint(0, VOCAB, (len(answers), T), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(T) >= T - torch.tensor(answers)[:, None]
    return Batch(ids, mask, torch.zeros_like(ids))


def part(rows: Batch, at: slice) -> Batch:
    return Batch(*(column[at] for column in rows))


def learner(**more: Any) -> DrafterModule:
    given: dict[str, Any] = {
        "drafter": presets()["eagle3_1"],
        "ttt_steps": 3,
        "schedule": WarmupCosine(0.0),
    }
    return DrafterModule(
        target=Tiny(),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=RATE),
        **(given | more),
    )


def trainer(**more: Any) -> pl.Trainer:
    given: dict[str, Any] = {
        "max_epochs": 1, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0, "limit_val_batches": 0,
        "use_distributed_sampler": False, "precision": "64-true", "log_every_n_steps": 1,
    }  # fmt: skip
    return pl.Trainer(**(given | more))


def fit(
    module: DrafterModule, rows: Batch, batch_size: int, **more: Any
) -> tuple[Drafter, Drafter]:
    """The drafter before and after."""
    begin = Begin()
    trainer(callbacks=[begin], **more).fit(module, datamodule=InMemory(rows, batch_size))
    assert module.drafter is not None
    return begin.drafter, module.drafter


def plain(drafter: Drafter, recipe: ObjectiveConfig, rows: Batch, windows: list[slice]) -> Drafter:
    """Gradient descent without Lightning: one batch for each step."""
    target, rate = tiny_target(), WarmupCosine(0.0)
    for step, window in enumerate(windows):
        batch = part(rows, window)
        parameters = [p for p in drafter.parameters() if p.requires_grad]
        loss = TrainStep(drafter, recipe)(
            batch, target_outputs(target, drafter, batch, recipe), measure=False
        ).loss
        with torch.no_grad():
            for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                p.sub_(gradient, alpha=RATE * rate.factor(step, len(windows)))
    return drafter


def moved(one: Drafter, other: Drafter) -> float:
    """The largest difference of a weight; NaN if there is one."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return float(torch.stack([(a - b).detach().abs().max() for a, b in pairs]).max())


@pytest.mark.parametrize(
    ("answers", "batch_size", "accumulate", "windows"),
    [
        ([12, 4, 9, 5], 2, 1, [slice(0, 2), slice(2, 4)]),
        ([12, 3, 4, 3], 2, 2, [slice(0, 4)]),  # batches with many and with few rows
        ([12, 7, 0, 0], 2, 2, [slice(0, 4)]),  # one without any
        ([0, 2, 9, 0, 12], 1, 5, [slice(0, 5)]),
        # the last window of the epoch is short
        ([12, 5, 4, 8, 6], 1, 2, [slice(0, 2), slice(2, 4), slice(4, 5)]),
        ([12, 5, 4, 8, 6, 9, 3], 2, 2, [slice(0, 4), slice(4, 7)]),  # and so is its last batch
        ([12, 5, 4], 2, 4, [slice(0, 3)]),  # the epoch is shorter than a window
    ],
)
@pytest.mark.parametrize("name", ["eagle3_1", "eagle1"])
def test_accumulated_batches_are_one_batch(
    name: str, answers: list[int], batch_size: int, accumulate: int, windows: list[slice]
) -> None:
    loss = (
        WeightedSum([Term(SmoothL1()), Term(SoftCrossEntropy(), 0.1)])
        if name == "eagle1"
        else SoftCrossEntropy()
    )
    module, rows = learner(drafter=presets()[name], loss=loss, train_embed=True), sample(answers)
    before, after = fit(module, rows, batch_size, accumulate_grad_batches=accumulate)
    wanted = plain(copy.deepcopy(before), module.objective, rows, windows)
    assert moved(before, wanted) > 1e-3
    assert moved(after, wanted) < 1e-11


@pytest.mark.parametrize("accumulate", [1, 3])
def test_clipping_sees_the_true_gradient(accumulate: int) -> None:
    """The norm that is clipped is that of the rows' mean, however many batches it came from."""
    limit, module, rows = 1e-3, learner(), sample([12, 4, 9])
    before, after = fit(
        module, rows, 3 // accumulate, accumulate_grad_batches=accumulate, gradient_clip_val=limit, max_epochs=-1,
        max_steps=1,
    )  # fmt: skip
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    length = float(torch.stack([(a - b).detach().square().sum() for a, b in pairs]).sum().sqrt())
    assert length == pytest.approx(RATE * limit, rel=1e-4)


class Kept(DummyLogger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[dict[str, float]] = []
        self.given: list[dict[str, Any]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.metrics.append(dict(metrics))

    def log_hyperparams(self, params: Any, *rest: Any, **more: Any) -> None:
        self.given.append(params)

    def of(self, name: str) -> list[float]:
        return [each[name] for each in self.metrics if name in each]


@pytest.mark.parametrize(("every", "accumulate"), [(1, 1), (1, 2), (2, 1)])
def test_the_norm_is_that_before_clipping_and_the_rate_that_of_the_step(
    every: int, accumulate: int
) -> None:
    logger, module, rows = (
        Kept(),
        learner(schedule=WarmupCosine(0.5)),
        sample([12, 4, 9, 5] * accumulate),
    )
    before, after = fit(
        module, rows, 1, accumulate_grad_batches=accumulate, logger=logger, log_every_n_steps=every,
        gradient_clip_val=1e-6,
    )  # fmt: skip
    assert logger.of("train/lr") == pytest.approx(
        [RATE * WarmupCosine(0.5).factor(n, 4) for n in range(4)][every - 1 :: every]
    )
    found = logger.of("train/grad_norm")
    assert len(found) == 4 // every == len(logger.of("train/loss"))
    if every == 1:  # clipped to nothing, the drafter stays as it was
        window, target = part(rows, slice(0, accumulate)), tiny_target()
        loss = TrainStep(before, module.objective)(
            window, target_outputs(target, before, window, module.objective)
        ).loss
        gradients = torch.autograd.grad(loss, [p for p in before.parameters() if p.requires_grad])
        assert found[0] == pytest.approx(float(torch.nn.utils.get_total_norm(gradients)), rel=1e-4)
    assert moved(before, after) < 1e-6


def test_groups_of_other_rates_are_logged_beside_the_first() -> None:
    def two(named: Any) -> torch.optim.Optimizer:
        (_, one), *rest = named
        return torch.optim.SGD(
            [{"params": [one]}, {"params": [p for _, p in rest], "lr": 0.5}], lr=RATE
        )

    logger, module = (
        Kept(),
        DrafterModule(target=Tiny(), drafter=presets()["eagle3_1"], ttt_steps=1, optimizer=two),
    )
    fit(module, sample([12, 4]), 2, logger=logger)
    assert logger.of("train/lr") == [pytest.approx(RATE)] and logger.of("train/lr_1") == [
        pytest.approx(0.5)
    ]


@dataclass(frozen=True)
class Halves(Schedule):
    """Half the rate from the middle on."""

    def factor(self, step: int, total: int) -> float:
        return 1.0 if 2 * step < total else 0.5


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (Halves(), [1, 1, 0.5, 0.5]),
        (
            partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.25, total_iters=3),
            [0.25, 0.5, 0.75, 1],
        ),
        (partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.1), [1, 1, 1, 0.1]),
        # once an epoch
        (partial(ReduceLROnPlateau, monitor="train/lr", patience=0, factor=0.5), [1, 1, 1, 1]),
    ],
)
def test_schedules_of_one_s_own_and_of_torch(schedule: Any, rates: list[float]) -> None:
    logger = Kept()
    fit(learner(schedule=schedule), sample([12, 4, 9, 5]), 1, logger=logger)
    assert logger.of("train/lr") == pytest.approx([RATE * rate for rate in rates])


def test_a_schedule_must_say_its_factor() -> None:
    with pytest.raises(TypeError, match="Schedule must say its factor"):
        Schedule().factor(0, 1)


def test_a_logger_gets_the_module_s_arguments_as_plain_data() -> None:
    loss = WeightedSum([Term(SmoothL1()), Term(SoftCrossEntropy(), 0.1)])
    logger, module = Kept(), learner(drafter=presets()["eagle1"], loss=loss)
    fit(module, sample([12, 4]), 2, logger=logger)
    (given,) = logger.given
    assert json.loads(json.dumps(given)) == given  # nothing but plain data
    model = given["model"]
    assert model["ttt_steps"] == 3 and model["drafter"]["fusion"]["class_path"] == "LastLayer"
    assert model["loss"]["terms"][1] == {"loss": {"class_path": "SoftCrossEntropy"}, "weight": 0.1}
    assert model["schedule"] == {"class_path": "WarmupCosine", "warmup": 0.0, "floor": 0.0}


@dataclass(frozen=True)
class Marked(FeatureNoise):
    """Adds one, and so says where it went."""

    def __call__(
        self, aux_BTNH: Tensor, documents_BT: Tensor, generator: torch.Generator
    ) -> Tensor:
        return aux_BTNH + 1


def run(module: DrafterModule, stage: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """What the objective was given at this stage, and what the target says."""
    given = []

    def record(step: TrainStep, batch: Batch, teacher: Any, *rest: Any) -> Any:
        given.append(teacher)
        return forward(step, batch, teacher, *rest)

    forward = TrainStep.forward
    monkeypatch.setattr(TrainStep, "forward", record)
    rows = sample([12, 6])
    module._run(rows, stage)
    assert module.drafter is not None
    return given[-1], target_outputs(module.target, module.drafter, rows, module.objective)


def ready(module: DrafterModule) -> DrafterModule:
    fit(module, sample([12, 6]), 2, max_epochs=-1, max_steps=1)
    return module


def test_noise_is_on_what_enters_the_drafter_in_training_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ready(learner(noise=Marked()))
    given, said = run(module, "train", monkeypatch)
    assert torch.equal(given.aux_BTNH, said.aux_BTNH + 1) and torch.equal(
        given.final_BTH, said.final_BTH
    )
    for mine, theirs in zip(
        given.probs(given.final_BTH[0]), said.probs(said.final_BTH[0]), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    given, said = run(module, "val", monkeypatch)
    assert torch.equal(given.aux_BTNH, said.aux_BTNH)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ttt_steps": 0}, r"model\.ttt_steps must be at least 1, not 0"),
        (
            {"step_weights": StepWeights()},
            r"^model\.step_weights=StepWeights is an abstract base class",
        ),
        ({"loss": SmoothL1()}, "SmoothL1"),
        (
            {"drafter": "dflash", "recompute": True},
            r"the steps of a block are one call.*model\.step_keep",
        ),
    ],
)
def test_a_module_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        learner(**given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_features_that_are_no_numbers_are_told_by_their_place(bad: float) -> None:
    """Sample, token and boundary of the first; padding may hold anything."""
    target, module, rows = tiny_target(), ready(learner(ttt_steps=1)), sample([12, 12])
    documents = torch.zeros_like(rows.documents_BT)
    documents[1, 9:] = -1
    rows = rows._replace(documents_BT=documents)
    forward = target.forward

    def broken(b: int, t: int) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            out.aux_BTNH[b, t, 1, 5] = bad
            return out

        return run

    assert module.drafter is not None
    target.forward = broken(1, 4)  # type: ignore[method-assign]
    with pytest.raises(
        ValueError, match=rf"sample 1, token 4, boundary 3 holds {bad};.*check the checkpoint"
    ):
        target_outputs(target, module.drafter, rows, module.objective)
    target.forward = broken(1, 9)  # type: ignore[method-assign]
    aux_BTNH = target_outputs(target, module.drafter, rows, module.objective).aux_BTNH
    assert aux_BTNH.isfinite().all(), "a gradient of zero times it would be none"


def test_validation_reports_what_it_measured() -> None:
    """The mean over all rows of all batches, with batches of different sizes; nothing carries over."""
    module, rows = ready(learner()), sample([12, 4, 9])
    found = trainer(limit_val_batches=1.0).validate(
        module, datamodule=InMemory(rows, 2), verbose=False
    )[0]
    assert module.drafter is not None
    whole = TrainStep(module.drafter, module.objective)(
        rows, target_outputs(module.target, module.drafter, rows, module.objective)
    )
    assert found["val/loss"] == pytest.approx(float(whole.loss.detach()), rel=1e-6)
    again = trainer(limit_val_batches=1.0).validate(
        module, datamodule=InMemory(rows, 2), verbose=False
    )[0]
    assert again == found


class MakesTensorsElsewhere(SingleDeviceStrategy):
    """As on a GPU: while Lightning has the model made, new tensors are made on another device."""

    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        return cast(AbstractContextManager[None], torch.device("meta"))


@pytest.mark.parametrize("draft_vocab", ["all", VOCAB // 2])
def test_what_comes_from_the_data_stays_on_the_cpu(draft_vocab: int | str) -> None:
    spec = dataclasses.replace(presets()["eagle3_1"], draft_vocab_size=draft_vocab)
    rows = sample([12, 4])
    drafters = [
        fit(learner(drafter=spec), rows, 2, strategy=strategy, accelerator="cpu")[1]
        for strategy in ("auto", MakesTensorsElsewhere(device="cpu"))
    ]
    assert moved(*drafters) == 0
    assert torch.equal(*[drafter.vocab.target_ids_D for drafter in drafters])


class Fails(pl.Callback):
    """Ends training with an error."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        raise ZeroDivisionError


def test_torchs_settings_are_restored_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(backend, "_cpu_maker", lambda: "AuthenticAMD")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    module = learner()
    with pytest.raises(ZeroDivisionError):
        trainer(callbacks=[Fails()]).fit(module, datamodule=InMemory(sample([12, 4]), 2))
    assert torch.get_float32_matmul_precision() == "highest"
    assert module.drafter is not None  # the module is still there, so that its end restored nothing
