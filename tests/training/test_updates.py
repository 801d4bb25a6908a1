"""The logged size of an optimizer step, group by group: by hand, of parts that do not learn, and without an effect."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from specdec.drafter import Drafter, DrafterSpec
from specdec.nn.optimizers import AdamW
from specdec.training.ema import EMA
from specdec.training.module import DrafterModule
from specdec.training.schedule import WarmupCosine
from specdec.training.step import TrainStep, target_outputs
from specdec.training.updates import copied_weights, group_of, relative_updates
from tests.tiny import biased, presets, tiny_drafter, tiny_target, variants
from tests.training.test_module import (
    RATE,
    InMemory,
    Kept,
    Tiny,
    fit,
    learner,
    moved,
    part,
    sample,
    trainer,
)

ROWS = [12, 4, 9, 5]
GROUPS = {"fusion", "attention", "mlp", "norms", "head"}  # of EAGLE-3 and 3.1, embedding frozen


def trained(module: DrafterModule, logger: Kept, **more: Any) -> Drafter:
    """The drafter after one epoch from the same first weights."""
    torch.manual_seed(0)
    trainer(logger=logger, **more).fit(module, datamodule=InMemory(sample(ROWS), 1))
    assert module.drafter is not None
    return module.drafter


def updates_of(logger: Kept) -> list[dict[str, float]]:
    """Of every logged step, its figures by group."""
    return [
        {name.removeprefix("update/"): row[name] for name in row if name.startswith("update/")}
        for row in logger.metrics
        if any(name.startswith("update/") for name in row)
    ]


def by_hand(drafter: Drafter, gradients: dict[str, Tensor], rate: float) -> dict[str, float]:
    """What plain gradient descent by these gradients would log."""
    found = {}
    for group in {group_of(name) for name in gradients}:
        names = [name for name in gradients if group_of(name) == group]
        moves = torch.cat([rate * gradients[name].flatten() for name in names])
        olds = torch.cat([drafter.get_parameter(name).detach().flatten() for name in names])
        found[group] = float(moves.norm() / olds.norm())
    return found


@pytest.mark.parametrize("train_embed", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_sgd_step_moves_each_group_by_its_gradient(accumulate: int, train_embed: bool) -> None:
    logger, rows = Kept(), sample(ROWS)
    module = learner(train_embed=train_embed)
    before, _ = fit(module, rows, 1, accumulate_grad_batches=accumulate, logger=logger)
    window = part(rows, slice(0, accumulate))
    parameters = {name: p for name, p in before.named_parameters() if p.requires_grad}
    loss = TrainStep(before, module.objective)(
        window, target_outputs(tiny_target(), before, window, module.objective)
    ).loss
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    wanted = by_hand(
        before,
        dict(zip(parameters, gradients, strict=True)),
        RATE * WarmupCosine(0.0).factor(0, len(ROWS) // accumulate),
    )
    found = updates_of(logger)
    assert len(found) == len(ROWS) // accumulate
    assert set(wanted) == GROUPS | ({"embedding"} if train_embed else set())
    assert found[0] == pytest.approx(wanted, rel=1e-9)
    assert min(wanted.values()) > 0


def test_only_logged_steps_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []

    def copied(drafter: Drafter) -> Any:
        copies.append(1)
        return copied_weights(drafter)

    monkeypatch.setattr("specdec.training.module.copied_weights", copied)
    every_step, every_other = Kept(), Kept()
    trained(learner(), every_step)
    trained(learner(), every_other, log_every_n_steps=2)
    assert updates_of(every_other) == updates_of(every_step)[1::2]
    assert len(copies) == 4 + 2


def left_out(named: Any) -> torch.optim.Optimizer:
    """An optimizer that was not given the head."""
    return torch.optim.SGD([p for name, p in named if "lm_head" not in name], lr=RATE)


def at_rate_zero(named: Any) -> torch.optim.Optimizer:
    heads = [p for name, p in named if "lm_head" in name]
    others = [p for name, p in named if "lm_head" not in name]
    return torch.optim.SGD([{"params": others}, {"params": heads, "lr": 0.0}], lr=RATE)


@pytest.mark.parametrize("optimizer", [left_out, at_rate_zero])
def test_a_head_that_does_not_learn_shows_zero(optimizer: Any) -> None:
    logger = Kept()
    module = DrafterModule(
        target=Tiny(), drafter=presets()["eagle3_1"], ttt_steps=3, optimizer=optimizer, schedule=WarmupCosine(0.0)
    )  # fmt: skip
    trained(module, logger)
    assert len(updates_of(logger)) == len(ROWS)
    for row in updates_of(logger):
        assert row.pop("head") == 0 and min(row.values()) > 0 and set(row) == GROUPS - {"head"}


class Blind(pl.Callback):
    """Removes the gradient of one group's weights before the optimizer sees it."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        for name, parameter in module.drafter.named_parameters():
            if group_of(name) == "mlp" and parameter.grad is not None:
                parameter.grad.zero_()


def test_a_group_without_a_gradient_shows_zero() -> None:
    logger = Kept()
    trained(learner(), logger, callbacks=[Blind()])
    assert len(updates_of(logger)) == len(ROWS)
    for row in updates_of(logger):
        assert row.pop("mlp") == 0 and min(row.values()) > 0


def test_frozen_parts_have_no_figure() -> None:
    logger = Kept()
    trained(learner(train_head=False), logger)
    assert len(updates_of(logger)) == len(ROWS)
    assert all(set(row) == GROUPS - {"head"} for row in updates_of(logger))


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
        self.losses.append(float(outputs["loss"]))


def test_losses_and_weights_are_the_same_to_the_last_bit() -> None:
    drafters = []
    losses = []
    for every in (1, 0):
        logger = Kept()
        seen = Losses()
        drafters.append(trained(learner(), logger, callbacks=[seen], log_every_n_steps=every))
        assert bool(updates_of(logger)) == (every == 1)
        losses.append(seen.losses)
    assert losses[0] == losses[1] and len(losses[0]) == len(ROWS)
    assert moved(*drafters) == 0


class Moves(pl.Callback):
    """What each optimizer step does to the weights, by group, in float64 from the weights around it."""

    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.weights = self._weights(pl_module)
        self.step = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any
    ) -> None:
        if trainer.global_step == self.step:
            return
        self.step = trainer.global_step
        weights = self._weights(pl_module)
        self.found.append(
            {
                group: float((weights[group] - old).norm() / old.norm())
                for group, old in self.weights.items()
            }
        )
        self.weights = weights

    @staticmethod
    def _weights(module: Any) -> dict[str, Tensor]:
        pieces: dict[str, list[Tensor]] = {}
        for name, parameter in module.drafter.named_parameters():
            if parameter.requires_grad:
                pieces.setdefault(group_of(name), []).append(parameter.detach().double().flatten())
        return {group: torch.cat(parts) for group, parts in pieces.items()}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("precision", "error"),
    [("64-true", 1e-6), ("32-true", 1e-5), ("bf16-mixed", 1e-5), ("bf16-true", 1e-3)],
)
def test_the_figures_are_what_the_weights_did(
    precision: str, error: float, accumulate: int
) -> None:
    """With AdamW and clipping, in every precision that trains on a CPU."""
    logger, moves = Kept(), Moves()
    module = DrafterModule(
        target=Tiny(), drafter=presets()["eagle3_1"], ttt_steps=3, schedule=WarmupCosine(0.0),
        optimizer=lambda named: AdamW(named, lr=1e-2),
    )  # fmt: skip
    trained(
        module, logger, precision=precision, accumulate_grad_batches=accumulate, gradient_clip_val=0.5,
        callbacks=[moves],
    )  # fmt: skip
    found = updates_of(logger)
    assert len(found) == len(moves.found) == len(ROWS) // accumulate
    for row, wanted in zip(found, moves.found, strict=True):
        assert row == pytest.approx(wanted, rel=error)
        assert min(wanted.values()) > 0


def test_an_average_changes_no_figure() -> None:
    plain, averaged = Kept(), Kept()
    trained(learner(), plain, precision="32-true")
    trained(learner(), averaged, precision="32-true", callbacks=[EMA(0.5)])
    assert updates_of(averaged) == updates_of(plain)


EXPECTED: dict[str, set[str]] = {
    "eagle1": {"entry", "attention", "mlp", "norms", "head", "embedding"},
    "weighted_sum": GROUPS | {"embedding"},
    "qwen3": GROUPS | {"embedding"},
    "peagle": GROUPS | {"embedding", "recurrence"},
    "mtp": {"entry", "attention", "mlp", "norms", "head", "embedding"},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_every_parameter_is_in_a_group_that_a_reader_expects(name: str) -> None:
    drafter = tiny_drafter((presets() | variants())[name])
    assert {group_of(parameter) for parameter, _ in drafter.named_parameters()} == EXPECTED[name]


@pytest.mark.parametrize(
    ("parameter", "group"),
    [
        ("fusion.fc.weight", "fusion"),
        ("norms.aux.0.weight", "fusion"),
        ("entry.feature_fc.bias", "entry"),
        ("entry.token_qkv_proj.weight", "attention"),
        ("layers.layers.1.attention.o_proj.weight", "attention"),
        ("layers.layers.0.attention.norm.q_norm.weight", "norms"),
        ("layers.layers.0.mlp.down_proj.weight", "mlp"),
        ("layers.layers.0.block.self_attn.q_proj.weight", "attention"),
        ("layers.layers.0.block.input_layernorm.weight", "norms"),
        ("norms.output.weight", "norms"),
        ("lm_head.weight", "head"),
        ("embed_tokens.weight", "embedding"),
    ],
)
def test_a_parameter_is_in_its_group(parameter: str, group: str) -> None:
    specs: list[DrafterSpec] = [*presets().values(), *variants().values(), biased()]
    assert any(parameter in dict(tiny_drafter(spec).named_parameters()) for spec in specs)
    assert group_of(parameter) == group


def test_a_group_of_zeros_that_moves_is_infinite_and_one_that_stays_is_zero() -> None:
    drafter = tiny_drafter(presets()["eagle3"]).requires_grad_(True)
    with torch.no_grad():
        drafter.lm_head.weight.zero_()
        before = copied_weights(drafter)
        assert float(relative_updates(before, drafter)["head"]) == 0
        before = copied_weights(drafter)
        drafter.lm_head.weight.add_(1)
        found = relative_updates(before, drafter)
    assert float(found.pop("head")) == float("inf")
    assert all(float(share) == 0 for share in found.values())


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")  # the first step is left out
@pytest.mark.parametrize("scale", [2.0**10, 2.0**120])
def test_a_step_that_a_gradient_scaler_skips_moves_nothing(scale: float) -> None:
    """In float16, a scale that is too large makes gradients infinite, and the step is left out."""
    logger, moves = Kept(), Moves()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    trained(learner(), logger, precision=None, plugins=[plugin], callbacks=[moves])
    found = updates_of(logger)
    assert len(found) == len(ROWS)
    for row, wanted in zip(found, moves.found, strict=True):
        assert row == pytest.approx(wanted, rel=1e-5)
        assert (max(row.values()) == 0) == (scale > 2.0**100)
