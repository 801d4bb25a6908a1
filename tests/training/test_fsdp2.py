"""Ten steps and more in two processes lose what one process loses; weights in shards are saved and taken up again.

This file is also the program that the processes run.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.distributed.tensor import DTensor

from specdec.drafter import load_drafter
from specdec.nn.optimizers import AdamW, MuonAdamW
from specdec.training.callbacks import RunRecord
from specdec.training.checkpoint import RunCheckpoint, read_training_checkpoint
from specdec.training.distributed import FSDP2, unsharded
from specdec.training.ema import EMA
from specdec.training.module import DrafterModule
from tests.tiny import presets
from tests.training.test_module import InMemory, Tiny, sample, trainer
from tests.two_processes import launch

pytestmark = pytest.mark.slow
PROCESSES, STEPS, HALF = 2, 12, 6
# by turns the processes' rows; one, or both, may have none
ANSWERS = [12, 3, 4, 8, 0, 9, 7, 0, 0, 0, 12, 1] * 4
ACCUMULATE = {1: ANSWERS[: 2 * STEPS], 2: ANSWERS}


class Losses(pl.Callback):
    """The logged loss of every optimizer step, its gradient's norm, and how far it moved each group of weights."""

    def __init__(self) -> None:
        self.found: list[float] = []
        self.norms: list[float] = []
        self.updates: list[dict[str, float]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.steps = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        if trainer.global_step > self.steps:
            self.steps = trainer.global_step
            self.found.append(float(trainer.callback_metrics["train/loss"]))
            logged = trainer.callback_metrics
            self.norms.append(float(logged["train/grad_norm"]))
            self.updates.append({name: float(logged[name]) for name in logged if "update/" in name})


def train(
    accumulate: int,
    batch_size: int,
    optimizer: Any = AdamW,
    ckpt_path: Path | None = None,
    **more: Any,
) -> tuple[DrafterModule, list[float]]:
    module = DrafterModule(
        target=Tiny(),
        drafter=presets()["eagle3_1"],
        ttt_steps=3,
        optimizer=lambda named: optimizer(named, lr=1e-2),
    )
    losses = Losses()
    more["callbacks"] = [losses, *more.pop("callbacks", [])]
    torch.manual_seed(1)
    more = {"precision": "32-true"} | more
    run = trainer(gradient_clip_val=0.5, accumulate_grad_batches=accumulate, **more)
    run.fit(
        module, datamodule=InMemory(sample(ACCUMULATE[accumulate]), batch_size), ckpt_path=ckpt_path
    )
    return module, losses.found


def norms(module: DrafterModule) -> list[float]:
    return next(each.norms for each in module.trainer.callbacks if isinstance(each, Losses))  # type: ignore[attr-defined]


def updates(module: DrafterModule) -> list[dict[str, float]]:
    return next(each.updates for each in module.trainer.callbacks if isinstance(each, Losses))  # type: ignore[attr-defined]


class Keep(pl.Callback):
    """Offers the drafter as the best when training ends."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, DrafterModule)
        for record in (each for each in trainer.callbacks if isinstance(each, RunRecord)):  # type: ignore[attr-defined]
            record.keep_best(pl_module, {"step": STEPS, "mean": 2.0, "decoded": {}})
            record.keep_best(pl_module, {"step": STEPS + 1, "mean": 1.9, "decoded": {}})


def program(out: Path) -> None:
    rank, found = int(os.environ["RANK"]), dict[str, Any]()
    torch.set_num_threads(1)
    for name, strategy in (("ddp", "ddp"), ("fsdp2", "fsdp2")):
        for accumulate in ACCUMULATE:
            module, losses = train(accumulate, 1, strategy=strategy, devices=PROCESSES)
            assert module.drafter is not None
            found[f"{name} {accumulate}"] = losses, unsharded(module.drafter).state_dict()
            found[f"{name} {accumulate} norms"] = norms(module)
            found[f"{name} {accumulate} updates"] = updates(module)
    shares = [
        p.to_local().numel() / p.numel()
        for p in module.drafter.parameters()
        if isinstance(p, DTensor)
    ]
    found["shares"] = max(shares) if len(shares) == len(list(module.drafter.parameters())) else 1.0
    found["muon"] = train(1, 1, MuonAdamW, strategy="fsdp2", devices=PROCESSES)[1]

    hybrid = {"strategy": "fsdp2", "devices": 1, "num_nodes": PROCESSES}
    own = {name: os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")}
    # each a node of its own
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=str(rank))
    module, losses = train(1, 1, **hybrid)
    os.environ.update(own)
    assert module.drafter is not None
    mesh = module.drafter.lm_head.weight.device_mesh  # type: ignore[union-attr]
    assert mesh.mesh_dim_names == ("replicate", "shard") and mesh.shape == (PROCESSES, 1)  # type: ignore[union-attr]
    found["hybrid 1"] = losses, unsharded(module.drafter).state_dict()
    found["hybrid 1 norms"], found["hybrid 1 updates"] = norms(module), updates(module)
    for strategy in ("ddp", "fsdp2"):
        half = {"strategy": strategy, "devices": PROCESSES, "precision": "bf16-mixed"}
        found[f"{strategy} bf16"] = train(1, 1, **half)[1]

    checkpoint = RunCheckpoint(every_n_train_steps=HALF, save_top_k=-1)
    checkpoint.dirpath = out / "checkpoints"
    more = {"strategy": "fsdp2", "devices": PROCESSES, "enable_checkpointing": True}
    train(2, 1, callbacks=[checkpoint, RunRecord(out, 0), Keep()], **more)
    half = out / "checkpoints" / f"step-{HALF}.ckpt"
    module, losses = train(2, 1, ckpt_path=half, strategy="fsdp2", devices=PROCESSES)
    assert module.drafter is not None
    found["resumed"] = losses, unsharded(module.drafter).state_dict()
    torch.save(found, out / f"{rank}.pt")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fsdp2")
    launch("tests.training.test_fsdp2", out, PROCESSES)
    return out


@pytest.fixture(scope="module")
def found(out: Path) -> list[dict[str, Any]]:
    return [torch.load(out / f"{i}.pt", weights_only=True) for i in range(PROCESSES)]


def differ(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


@pytest.mark.parametrize("accumulate", ACCUMULATE)
def test_losses_of_two_processes_are_those_of_one(
    found: list[dict[str, Any]], accumulate: int
) -> None:
    """In float32, of the same rows at every step, to 1e-6 of their size; weights as far as Adam lets rounding grow."""
    module, wanted = train(accumulate, PROCESSES)
    assert module.drafter is not None and len(wanted) == STEPS
    for strategy in ("ddp", "fsdp2", "hybrid")[: 3 if accumulate == 1 else 2]:
        for rank in range(PROCESSES):
            losses, weights = found[rank][f"{strategy} {accumulate}"]
            assert found[rank][f"{strategy} {accumulate} norms"] == pytest.approx(
                norms(module), rel=1e-3, abs=1e-12
            )
            assert losses == pytest.approx(wanted, rel=1e-6, abs=1e-12)
            assert differ(weights, module.drafter.state_dict()) < 1e-4


@pytest.mark.parametrize("accumulate", ACCUMULATE)
def test_logged_updates_of_two_processes_are_those_of_one(
    found: list[dict[str, Any]], accumulate: int
) -> None:
    """A process that counted its shards alone would be right only where all shards moved alike."""
    module, _ = train(accumulate, PROCESSES)
    wanted = updates(module)
    assert len(wanted) == STEPS and len(wanted[0]) == 5
    for strategy in ("ddp", "fsdp2", "hybrid")[: 3 if accumulate == 1 else 2]:
        for rank in range(PROCESSES):
            rows = found[rank][f"{strategy} {accumulate} updates"]
            assert len(rows) == STEPS
            for row, expected in zip(rows, wanted, strict=True):
                assert row == pytest.approx(expected, rel=1e-3, abs=1e-9)


def test_weights_gathered_in_bfloat16_lose_what_autocast_loses(found: list[dict[str, Any]]) -> None:
    """Norms' weights are rounded besides; both are trained in float32."""
    for rank in found:
        assert rank["fsdp2 bf16"] == pytest.approx(rank["ddp bf16"], rel=2e-2)
        assert rank["fsdp2 bf16"] != pytest.approx(rank["fsdp2 1"][0], rel=1e-5)


def test_a_resumed_run_is_the_run(found: list[dict[str, Any]]) -> None:
    """To the last bit."""
    for rank in found:
        losses, weights = rank["resumed"]
        whole_losses, whole_weights = rank["fsdp2 2"]
        assert losses == whole_losses[HALF:] and len(losses) == STEPS - HALF
        assert differ(weights, whole_weights) == 0


def test_the_saved_drafter_is_whole(out: Path, found: list[dict[str, Any]]) -> None:
    for folder in ("drafter", "drafter_best"):
        assert differ(load_drafter(out / folder).state_dict(), found[0]["fsdp2 2"][1]) == 0
    assert (
        json.loads((out / "drafter_best" / "config.json").read_text())["chosen_by"]["step"] == STEPS
    )


def test_a_checkpoint_is_one_file_with_all_weights(out: Path, found: list[dict[str, Any]]) -> None:
    last = read_training_checkpoint(out / "checkpoints" / "last.ckpt")
    assert last["global_step"] == STEPS and last["drafter_config"]
    prefix = "train_step.drafter."
    weights = {
        name.removeprefix(prefix): value
        for name, value in last["state_dict"].items()
        if prefix in name
    }
    assert differ(weights, found[0]["fsdp2 2"][1]) == 0


def test_an_average_is_refused() -> None:
    with pytest.raises(ValueError, match="EMA: weights in shards"):
        EMA().setup(SimpleNamespace(strategy=FSDP2(), precision="32-true"), None, "fit")  # type: ignore[arg-type]


if __name__ == "__main__":
    program(Path(sys.argv[1]))
