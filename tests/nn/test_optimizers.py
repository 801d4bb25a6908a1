"""Which parameters get what, and that one optimizer of two parts behaves as one."""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from specdec.commands.fit import run_fit
from specdec.nn.optimizers import AdamW, MuonAdamW, hidden_matrix, orthogonal
from tests.short_run import short_run
from tests.tiny import presets, tiny_drafter, variants

CONF = sorted((Path(__file__).parents[2] / "conf" / "optimizer").glob("*.yaml"))
Named = list[tuple[str, nn.Parameter]]


def parameters() -> Named:
    """A hidden matrix, a norm's scale and a head, each with a gradient."""
    torch.manual_seed(0)
    shapes = {"layers.0.fc.weight": (4, 6), "norms.output.weight": (6,), "lm_head.weight": (5, 6)}
    named = [(name, nn.Parameter(torch.randn(shape))) for name, shape in shapes.items()]
    for _, parameter in named:
        parameter.grad = torch.randn_like(parameter)
    return named


def values(named: Named) -> list[torch.Tensor]:
    return [parameter.detach().clone() for _, parameter in named]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(one, two, strict=True)]


@pytest.mark.parametrize("generation", presets())
def test_the_hidden_matrices_of_a_drafter(generation: str) -> None:
    named = list(tiny_drafter(presets()[generation]).named_parameters())
    chosen = {name for name, parameter in named if hidden_matrix(name, parameter)}
    tables = {name for name, parameter in named if parameter.ndim > 1} - chosen
    assert tables == {"embed_tokens.weight", "lm_head.weight"}
    assert {
        f"layers.layers.0.{name}.weight" for name in ("attention.o_proj", "mlp.down_proj")
    } < chosen


def test_dsparks_heads_are_tables_and_a_users_own_modules_are_not() -> None:
    named = list(tiny_drafter(variants()["dspark"]).named_parameters())
    tables = {name for name, p in named if p.ndim > 1 and not hidden_matrix(name, p)}
    heads = {f"recurrence.{name}.weight" for name in ("previous", "transition", "confidence")}
    assert tables == {"embed_tokens.weight", "lm_head.weight"} | heads
    matrix = torch.nn.Parameter(torch.zeros(2, 2))
    assert hidden_matrix("fusion.transition.weight", matrix)
    assert not hidden_matrix("drafter.recurrence.transition.weight", matrix)


@pytest.mark.parametrize("bare", [False, True])
def test_adamw_decays_matrices_alone(bare: bool) -> None:
    named, lone = parameters(), parameters()
    for _, parameter in named:
        parameter.grad = torch.zeros_like(parameter)
    before = values(named)
    AdamW([p for _, p in named] if bare else named, lr=0.1, weight_decay=0.5).step()
    matrix, scale, head = values(named)
    torch.testing.assert_close(matrix, before[0] * 0.95)
    torch.testing.assert_close(head, before[2] * 0.95)
    assert torch.equal(scale, before[1])
    named = parameters()
    AdamW(named, lr=0.1).step()  # no decay unless it is asked for
    torch.optim.AdamW(lone, lr=0.1, betas=(0.9, 0.95), weight_decay=0.0, fused=True).step()
    assert all(same(values(named), values(lone)))


def test_adamw_leaves_the_scaling_to_the_scaler() -> None:
    plain, scaled = parameters(), parameters()
    optimizer, scaler = AdamW(scaled, lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))  # it scales the loss before anything else
    for _, parameter in scaled:
        parameter.grad *= 1024.0
    scaler.unscale_(optimizer)  # what must come before clipping
    assert all(same([p.grad for _, p in scaled], [p.grad for _, p in plain]))
    scaler.step(optimizer)
    AdamW(plain, lr=0.1).step()
    assert all(same(values(scaled), values(plain)))


@pytest.mark.parametrize("able", [True, False])
def test_muon_steps_as_the_two_alone(able: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.nn.optimizers.multiplies_bfloat16", lambda: able)
    named, lone = parameters(), parameters()
    MuonAdamW(named, lr=0.02, lr_rest=0.01).step()
    torch.optim.Muon(lone[:1], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw").step()
    torch.optim.AdamW(lone[1:], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0, fused=True).step()
    near = [torch.allclose(a, b, rtol=0, atol=0.02 * 0.2 * 6**0.5 * 0.03) for a, b in zip(values(named), values(lone), strict=True)]  # fmt: skip # noqa: E501
    # bfloat16's eight digits
    assert same(values(named), values(lone)) == [able, True, True] and all(near)


@pytest.mark.parametrize("shape", [(5, 8), (8, 5)])
def test_orthogonal_moves_singular_values_towards_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    update = torch.randn(shape)
    turned = orthogonal(update, torch.float32)
    assert turned.dtype == torch.float32 and turned.shape == shape
    found = torch.linalg.svdvals(turned)
    assert found.min() > 0.6 and found.max() < 1.3
    left, _, right = torch.linalg.svd(update, full_matrices=False)
    torch.testing.assert_close(
        turned, left @ torch.diag((left.T @ turned @ right.T).diag()) @ right, atol=1e-4, rtol=0
    )


def test_one_schedule_drives_both() -> None:
    named = parameters()
    before = values(named)
    optimizer = MuonAdamW(named, lr=0.02, lr_rest=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step))
    optimizer.step()
    assert all(same(values(named), before))
    schedule.step()
    optimizer.step()
    assert not any(same(values(named), before))
    optimizer.zero_grad()
    assert all(parameter.grad is None for _, parameter in named)


def test_closure() -> None:
    named = parameters()
    optimizer = MuonAdamW(named)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = named[0][1].square().sum() + named[1][1].sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.item() == parameters()[0][1].square().sum().item() + parameters()[1][1].sum().item()
    assert named[2][1].grad is None and torch.equal(named[1][1].grad, torch.ones(6))


@pytest.mark.parametrize("make", [AdamW, MuonAdamW])
def test_a_loaded_state_goes_on_as_if_never_saved(
    make: Callable[[Any], torch.optim.Optimizer], tmp_path: Path
) -> None:
    named = parameters()
    optimizer = make(named)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(3):
        optimizer.step()
        schedule.step()
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert len(state["state"]) == 3 and all(state["state"].values())
    again = copy.deepcopy(named)
    for (_, copied), (_, parameter) in zip(again, named, strict=True):
        copied.grad = parameter.grad.clone()
    resumed = make(again)
    later = torch.optim.lr_scheduler.LambdaLR(resumed, lambda step: 1 / (1 + step))
    resumed.load_state_dict(state)
    later.load_state_dict(schedule.state_dict())
    for each, its in ((optimizer, schedule), (resumed, later)):
        for _ in range(3):
            each.step()
            its.step()
    assert all(same(values(named), values(again)))
    assert [g["lr"] for g in resumed.param_groups] == [g["lr"] for g in optimizer.param_groups]


def test_muon_refuses_what_it_cannot_tell_apart() -> None:
    with pytest.raises(ValueError, match="named_parameters"):
        MuonAdamW([parameter for _, parameter in parameters()])  # type: ignore[misc]
    with pytest.raises(ValueError, match="no hidden matrix"):
        MuonAdamW(parameters()[1:])
    MuonAdamW(parameters()[:1]).step()


@pytest.fixture
def base(
    target_directory: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Arguments of a short run on the CPU."""
    monkeypatch.setattr(sys, "argv", ["specdec"])
    return short_run(
        target_directory, text_file,
        trainer__max_steps=4,
        trainer__limit_val_batches=0,
        trainer__log_every_n_steps=1,
        checkpoint__every_n_train_steps=2,
        checkpoint__save_top_k=-1,
    )  # fmt: skip


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "drafter" / "model.safetensors")


@pytest.mark.parametrize(
    "precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.slow] * (path.stem != "muon"), id=path.stem)
        for path in CONF
    ],
)
def test_a_shipped_optimizer_resumes_exactly(
    base: list[str], tmp_path: Path, path: Path, precision: str
) -> None:
    assert f"specdec fit --model.optimizer {path.stem}" in path.read_text()
    args = [
        *base,
        "--model.optimizer",
        str(path),
        "--model.optimizer.lr",
        "1e-2",
        "--trainer.precision",
        precision,
    ]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert run_fit("fit", [*args, "--out", str(whole)]) == 0
    checkpoint = whole / "checkpoints" / "step-2.ckpt"
    assert run_fit("fit", [*args, "--out", str(halves), "--ckpt_path", str(checkpoint)]) == 0
    one, two = weights(whole), weights(halves)
    assert all(torch.equal(one[name], two[name]) for name in one)
    saved = torch.load(checkpoint, weights_only=True)["state_dict"]
    moved = {
        name for name in one if not torch.equal(one[name], saved[f"train_step.drafter.{name}"])
    }
    assert moved >= {"fusion.fc.weight", "lm_head.weight"} and "embed_tokens.weight" not in moved
