"""The Lightning module: accumulation over batches, noise, and what it leaves behind.

A step over several batches, with any numbers of supervised rows, is the step over one batch of them all.
"""

import copy
import logging
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from specdec.data import Batch, TokenData
from specdec.data.datamodule import Splits
from specdec.drafter import Drafter
from specdec.embedded.source import TargetSource
from specdec.target import Target
from specdec.training import objective as objective_module
from specdec.training.losses import SmoothL1, SoftCrossEntropy, Term, WeightedSum
from specdec.training.module import DrafterModule
from specdec.training.noise import GaussianNoise, Noise
from specdec.training.objective import Recipe, objective, teach
from specdec.training.schedule import WarmupCosine
from specdec.training.sharding import whole
from tests.tiny import VOCAB, presets, tiny_target

T, RATE = 12, 0.05


@dataclass(frozen=True)
class Tiny(TargetSource):
    """The tests' target, without a directory."""

    def load(self, device: str = "cpu") -> Target:
        return tiny_target()


class InMemory(TokenData):
    """Rows as they are, in their order."""

    def __init__(self, rows: Batch, batch_size: int) -> None:
        super().__init__(rows.ids_BT.shape[1], batch_size)
        self._splits = Splits(rows, rows, rows)

    def setup(self, stage: str | None = None) -> None:
        """Nothing to read."""

    def train_dataloader(self) -> Any:
        return self._loader(self.splits.train, shuffle=False)


class Begin(pl.Callback):
    """Keeps the drafter as it was before the first step."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.drafter: Drafter = copy.deepcopy(whole(pl_module.drafter))  # type: ignore[arg-type]


def sample(answers: list[int], seed: int = 0) -> Batch:
    """One row for each number: how many of its last tokens are answers."""
    ids = torch.randint(0, VOCAB, (len(answers), T), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(T) >= T - torch.tensor(answers)[:, None]
    return Batch(ids, mask, torch.zeros_like(ids))


def part(rows: Batch, at: slice) -> Batch:
    return Batch(*(column[at] for column in rows))


def learner(**more: Any) -> DrafterModule:
    given: dict[str, Any] = {"drafter": presets()["eagle3_1"], "ttt_steps": 3, "schedule": WarmupCosine(0.0)}
    return DrafterModule(
        target=Tiny(), optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=RATE), **(given | more)
    )


def trainer(**more: Any) -> pl.Trainer:
    given: dict[str, Any] = {
        "max_epochs": 1, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0, "limit_val_batches": 0,
        "use_distributed_sampler": False, "precision": "64-true", "log_every_n_steps": 1,
    }  # fmt: skip
    return pl.Trainer(**(given | more))


def fit(module: DrafterModule, rows: Batch, batch_size: int, **more: Any) -> tuple[Drafter, Drafter]:
    """The drafter before and after."""
    begin = Begin()
    trainer(callbacks=[begin], **more).fit(module, datamodule=InMemory(rows, batch_size))
    assert module.drafter is not None
    return begin.drafter, module.drafter


def plain(drafter: Drafter, recipe: Recipe, rows: Batch, windows: list[slice]) -> Drafter:
    """Gradient descent without Lightning: one batch for each step."""
    target, rate = tiny_target(), WarmupCosine(0.0)
    for step, window in enumerate(windows):
        batch = part(rows, window)
        parameters = [p for p in drafter.parameters() if p.requires_grad]
        loss = objective(drafter, batch, teach(target, drafter, batch, recipe), recipe, measure=False).loss
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
        ([12, 5, 4, 8, 6], 1, 2, [slice(0, 2), slice(2, 4), slice(4, 5)]),  # the last window of the epoch is short
        ([12, 5, 4, 8, 6, 9, 3], 2, 2, [slice(0, 4), slice(4, 7)]),  # and so is its last batch
        ([12, 5, 4], 2, 4, [slice(0, 3)]),  # the epoch is shorter than a window
    ],
)
@pytest.mark.parametrize("name", ["eagle3_1", "eagle1"])
def test_accumulated_batches_are_one_batch(
    name: str, answers: list[int], batch_size: int, accumulate: int, windows: list[slice]
) -> None:
    loss = WeightedSum([Term(SmoothL1()), Term(SoftCrossEntropy(), 0.1)]) if name == "eagle1" else SoftCrossEntropy()
    module, rows = learner(drafter=presets()[name], loss=loss, train_embed=True), sample(answers)
    before, after = fit(module, rows, batch_size, accumulate_grad_batches=accumulate)
    wanted = plain(copy.deepcopy(before), module.recipe, rows, windows)
    assert moved(before, wanted) > 1e-3
    assert moved(after, wanted) < 1e-11


def test_accumulating_nothing_moves_nothing() -> None:
    """A step without a supervised token: gradients of zero, no division by zero, and the next step is as ever."""
    module, rows = learner(), sample([0, 0, 1, 1, 12, 9])  # the last token alone has no predecessor that is an answer
    before, after = fit(module, rows, 1, accumulate_grad_batches=2)
    assert moved(plain(copy.deepcopy(before), module.recipe, rows, [slice(0, 4)]), before) == 0
    wanted = plain(copy.deepcopy(before), module.recipe, rows, [slice(0, 2), slice(2, 4), slice(4, 6)])
    assert moved(before, wanted) > 1e-3 and moved(after, wanted) < 1e-11


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


@dataclass(frozen=True)
class Marked(Noise):
    """Adds one, and so says where it went."""

    def __call__(self, aux_BTNH: Tensor, documents_BT: Tensor, generator: torch.Generator) -> Tensor:
        return aux_BTNH + 1


def run(module: DrafterModule, stage: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """What the objective was given at this stage, and what the target says."""
    given = []

    def record(drafter: Drafter, batch: Batch, teacher: Any, *rest: Any) -> Any:
        given.append(teacher)
        return objective_module.objective(drafter, batch, teacher, *rest)

    monkeypatch.setattr("specdec.training.module.objective", record)
    rows = sample([12, 6])
    module._run(rows, stage)
    assert module.drafter is not None
    return given[-1], teach(module.target, module.drafter, rows, module.recipe)


def ready(module: DrafterModule) -> DrafterModule:
    fit(module, sample([12, 6]), 2, max_epochs=-1, max_steps=1)
    return module


def test_noise_is_on_what_enters_the_drafter_in_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ready(learner(noise=Marked()))
    given, said = run(module, "train", monkeypatch)
    assert torch.equal(given.aux_BTNH, said.aux_BTNH + 1) and torch.equal(given.final_BTH, said.final_BTH)
    for mine, theirs in zip(given.law(given.final_BTH[0]), said.law(said.final_BTH[0]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    for stage in ("val", "test"):
        given, said = run(module, stage, monkeypatch)
        assert torch.equal(given.aux_BTNH, said.aux_BTNH)


def test_every_step_draws_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same batch twice, in two steps: two noises; and each rank has its own."""
    asked = []
    monkeypatch.setattr(
        "specdec.training.module.batch_generator",
        lambda batch, *place: asked.append(place) or torch.Generator().manual_seed(0),
    )
    fit(learner(noise=GaussianNoise()), sample([12, 6]), 2, max_epochs=3)
    assert asked == [(0, 0), (1, 0), (2, 0)]


def test_noisy_runs_repeat_themselves_and_differ_from_clean_ones() -> None:
    ends = []
    for noise in (GaussianNoise(0.5), GaussianNoise(0.5), None):
        pl.seed_everything(3, verbose=False)
        module = learner(**({"noise": noise} if noise else {}))
        ends.append(fit(module, sample([12, 6, 9, 8]), 2)[1])
    assert moved(ends[0], ends[1]) == 0 and moved(ends[0], ends[2]) > 1e-6


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ttt_steps": 0}, r"model\.ttt_steps must be at least 1, not 0"),
        ({"step_decay": 0.0}, r"model\.step_decay must lie in \(0, 1\], not 0\.0"),
        ({"step_decay": 1.1}, r"model\.step_decay"),
        ({"loss": SmoothL1()}, "SmoothL1"),
    ],
)
def test_a_module_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        learner(**given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("train_embed", "train_head"), [(False, True), (True, False), (True, True), (False, False)])
@pytest.mark.parametrize("name", ["eagle3_1", "eagle1"])
def test_what_was_asked_for_is_trained_and_nothing_else(name: str, train_embed: bool, train_head: bool) -> None:
    module = learner(drafter=presets()[name], train_embed=train_embed, train_head=train_head)
    before, after = fit(module, sample([12, 12]), 2, max_epochs=-1, max_steps=1)
    frozen = {"embed_tokens.weight": not train_embed, "lm_head.weight": not train_head or name == "eagle1"}
    for (key, a), b in zip(before.named_parameters(), after.parameters(), strict=True):
        assert b.requires_grad is not frozen.get(key, False), key
        assert torch.equal(a, b) is frozen.get(key, False), key


def test_torch_is_left_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    from specdec.nn import pointwise

    before = torch.get_float32_matmul_precision()
    with caplog.at_level(logging.INFO, "specdec"):
        fit(learner(attention="dense"), sample([12, 6]), 2, max_epochs=-1, max_steps=1)
    assert "unroll attention: dense; float32 products: " in caplog.text and "compiled: False" in caplog.text
    assert torch.get_float32_matmul_precision() == before and pointwise._compiling is False


def test_a_failed_run_leaves_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec.nn import pointwise, products

    monkeypatch.setattr(products, "_exact", lambda: True)
    monkeypatch.setattr(products, "_maker", lambda: "AuthenticAMD")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    products._choose.cache_clear()

    def fail(*_: Any) -> None:
        assert torch.get_float32_matmul_precision() == "medium"
        pointwise.compile_pointwise(True)
        raise ZeroDivisionError

    monkeypatch.setattr(DrafterModule, "training_step", fail)
    with pytest.raises(ZeroDivisionError):
        fit(learner(), sample([12, 6]), 2)
    assert torch.get_float32_matmul_precision() == "highest" and pointwise._compiling is False
    products._choose.cache_clear()


def test_flex_is_refused_on_a_cpu() -> None:
    with pytest.raises(ValueError, match=r"model\.attention=flex needs CUDA"):
        fit(learner(attention="flex"), sample([12, 6]), 2)


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
    with pytest.raises(ValueError, match=rf"sample 1, token 4, boundary 3 holds {bad};.*check the checkpoint"):
        teach(target, module.drafter, rows, module.recipe)
    target.forward = broken(1, 9)  # type: ignore[method-assign]
    aux_BTNH = teach(target, module.drafter, rows, module.recipe).aux_BTNH
    assert aux_BTNH.isfinite().all(), "a gradient of zero times it would be none"


def test_validation_reports_what_it_measured() -> None:
    """The mean over all rows of all batches, with batches of different sizes; nothing carries over."""
    module, rows = ready(learner()), sample([12, 4, 9])
    found = trainer(limit_val_batches=1.0).validate(module, datamodule=InMemory(rows, 2), verbose=False)[0]
    assert module.drafter is not None
    whole = objective(module.drafter, rows, teach(module.target, module.drafter, rows, module.recipe), module.recipe)
    assert found["val/loss"] == pytest.approx(float(whole.loss.detach()), rel=1e-6)
    again = trainer(limit_val_batches=1.0).validate(module, datamodule=InMemory(rows, 2), verbose=False)[0]
    assert again == found


def test_a_short_window_is_reported_with_its_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """At an epoch's end too figures are of one step's batches, and none are left over for the next."""
    module, counted = learner(), []
    report = DrafterModule._report

    def note(self: DrafterModule, stage: str) -> None:
        counted.append(int(self._metric(stage).sums[2, 0]))  # supervised rows of step 0
        report(self, stage)

    monkeypatch.setattr(DrafterModule, "_report", note)
    fit(module, sample([12, 5, 4, 8, 6]), 1, accumulate_grad_batches=2, max_epochs=2)
    assert counted == [10 + 4, 3 + 7, 5] * 2
