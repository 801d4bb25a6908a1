"""A run goes on with its newest whole checkpoint, under the settings that it had."""

import csv
import json
import logging
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdec.cli import main
from specdec.commands.fit import run_fit
from specdec.data import Batch
from specdec.training.checkpoint import AtomicCheckpointIO, newest
from specdec.training.module import DrafterModule
from specdec.training.run_directory import CONFIG, changed_settings
from specdec.utils.reading import check_sums
from tests.short_run import short_run


@pytest.fixture
def base(target_directory: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of six steps with a checkpoint every two."""
    monkeypatch.setattr(sys, "argv", ["specdec"])
    return short_run(
        target_directory, text_file,
        model__ttt_steps=1,
        trainer__max_steps=6,
        trainer__limit_val_batches=0,
        trainer__log_every_n_steps=2,
        trainer__enable_progress_bar="false",
        checkpoint__every_n_train_steps=2,
        checkpoint__save_top_k=2,
        acceptance__every_n_validations=0,
    )  # fmt: skip


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "drafter" / "model.safetensors")


def same(one: Path, two: Path) -> bool:
    a, b = weights(one), weights(two)
    return all(torch.equal(a[name], b[name]) for name in a | b)


def flip(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 4
    path.write_bytes(whole)


def checkpoints(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


KILLED = """
import os, signal, sys
number, *args = sys.argv[1:]

def kill(event, arguments, seen=[]):
    if event == "os.rename" and os.path.basename(os.fspath(arguments[1])) in ("config.yaml", "provenance.json"):
        seen.append(event)
        if len(seen) == int(number):
            os.kill(os.getpid(), signal.SIGKILL)

from specdec.cli import main
sys.addaudithook(kill)
sys.exit(main(args))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_config_and_provenance_are_written_together(
    base: list[str], tmp_path: Path, number: int
) -> None:
    """Killed before either, the run resumes, ends, and is known for a run from then on."""
    out = tmp_path / "run"
    command = ["fit", *base, "--out", str(out), "--ckpt_path", "auto"]
    killed = subprocess.run([sys.executable, "-c", KILLED, str(number), *command], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [*out.glob("config*.yaml")] == [] or not [*out.glob("provenance*.json")]
    for _ in range(2):
        assert main(command) == 0
    names = {path.name for path in out.iterdir() if path.suffix in (".yaml", ".json")}
    assert names == {"config.yaml", "provenance.json", "DONE.json"}
    assert names <= check_sums(out, partial=True).keys()


class DeadError(Exception):
    """Stands for a power failure: nothing that Lightning does on errors happens."""


def dies(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    inner = DrafterModule.training_step

    def dying(self: DrafterModule, batch: Batch, batch_idx: int) -> torch.Tensor:
        if self.global_step == at:
            monkeypatch.setattr(
                "specdec.training.checkpoint.RunCheckpoint.on_exception", lambda *_: None
            )
            raise DeadError
        return inner(self, batch, batch_idx)

    monkeypatch.setattr(DrafterModule, "training_step", dying)


def test_one_command_begins_and_goes_on(
    base: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From the start where there is no checkpoint; past damaged ones to the newest whole one; then it is done."""
    caplog.set_level(logging.INFO, "specdec")
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert run_fit("fit", [*base, f"--out={whole}"]) == 0
    auto = [*base, f"--out={out}", "--ckpt_path=auto"]
    for at, found, damaged in ((1, None, ()), (5, None, ("last.ckpt", "step-4.ckpt")), (5, 2, ())):
        caplog.clear()
        with monkeypatch.context() as patch:
            dies(patch, at)
            with pytest.raises(DeadError):
                run_fit("fit", auto)
        begin = (
            f"resuming from {out}/checkpoints/step-{found}.ckpt"
            if found
            else f"{out}: no checkpoint yet"
        )
        assert begin in caplog.text
        for name in damaged:
            flip(out / "checkpoints" / name)
    caplog.clear()
    # by a killed save, whose lock nobody holds
    (left := out / "checkpoints" / ".tmp-0123456789ab").mkdir()
    (left / ".lock").touch()
    # callbacks that only watch may be added, and Lightning's word for the newest checkpoint is taken
    watched = ["--trainer.callbacks+=LearningRateMonitor", "--trainer.callbacks+=RichProgressBar"]
    watched += ["--trainer.enable_progress_bar=true"]
    assert run_fit("fit", [*base, f"--out={out}", "--ckpt_path=last", *watched]) == 0
    assert f"resuming from {out}/checkpoints/step-4.ckpt" in caplog.text
    assert same(whole, out) and checkpoints(out) == checkpoints(whole) == [
        "last.ckpt",
        "step-4.ckpt",
        "step-6.ckpt",
    ]
    configs = len(list(out.glob("config*")))
    caplog.clear()
    assert run_fit("fit", auto) == 0
    assert (
        f"{out} is done: nothing is left to train" in caplog.text
        and len(list(out.glob("config*"))) == configs
    )


@pytest.mark.parametrize("accumulate", [2])
def test_after_an_error_within_a_step_no_batch_is_lost(
    base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulate: int
) -> None:
    """The loader has counted the batch by then, and under accumulation the one before it too."""
    base = [*base, f"--trainer.accumulate_grad_batches={accumulate}"]
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert run_fit("fit", [*base, f"--out={whole}"]) == 0
    auto, inner = [*base, f"--out={out}", "--ckpt_path=auto"], DrafterModule.training_step

    def failing(self: DrafterModule, batch: Batch, batch_idx: int) -> torch.Tensor:
        if self.global_step == 3 and (batch_idx + 1) % accumulate == 0:
            raise ValueError("of the fourth step")
        return inner(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(DrafterModule, "training_step", failing)
        with pytest.raises(ValueError, match="of the fourth step"):
            run_fit("fit", auto)
    assert checkpoints(out) == ["last.ckpt", "step-2.ckpt"] and not (out / "DONE.json").exists()
    assert run_fit("fit", auto) == 0
    assert same(whole, out)


@pytest.mark.slow
def test_a_scheduler_of_torch_goes_on_to_the_last_bit(
    base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that also moves the momentum, and whose length refers to the run's."""
    cycle = {
        "class_path": "OneCycleLR",
        "init_args": {"max_lr": 1e-2, "total_steps": "${trainer.max_steps}"},
    }
    (tmp_path / "cycle.yaml").write_text(json.dumps({"model": {"schedule": cycle}}))
    base = ["--config", str(tmp_path / "cycle.yaml"), *base, "--trainer.log_every_n_steps=1"]
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert run_fit("fit", [*base, f"--out={whole}"]) == 0
    auto = [*base, f"--out={out}", "--ckpt_path=auto"]
    with monkeypatch.context() as patch:
        dies(patch, 3)
        with pytest.raises(DeadError):
            run_fit("fit", auto)
    assert run_fit("fit", auto) == 0
    assert (
        same(whole, out) and (whole / "losses.txt").read_text() == (out / "losses.txt").read_text()
    )
    rows = list(
        csv.DictReader((whole / "csv" / "version_0" / "metrics.csv").read_text().splitlines())
    )
    rates = [float(row["train/lr"]) for row in rows if row["train/lr"]]
    assert rates[0] == pytest.approx(1e-2 / 25) and max(rates) > 5e-3 and rates[-1] < rates[0]


def test_refused_checkpoints_are_named_in_turn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert newest(tmp_path) is None
    for name, step in (("step-2", 2), ("step-10", 10), ("step-4", 4), ("last", 12)):
        AtomicCheckpointIO().save_checkpoint(
            {"global_step": step, "x": torch.ones(1000)}, tmp_path / f"{name}.ckpt"
        )
    (tmp_path / ".tmp-1").touch()
    assert newest(tmp_path) == tmp_path / "last.ckpt"
    flip(tmp_path / "last.ckpt")
    (tmp_path / "step-10.ckpt").write_bytes(b"")
    (tmp_path / "step-11.ckpt").mkdir()  # no file
    assert newest(tmp_path) == tmp_path / "step-4.ckpt"
    refused = [record.getMessage() for record in caplog.records]
    assert [next(name for name in ("last", "step-10", "step-11") if name in line) for line in refused] == [
        "last", "step-10", "step-11",
    ]  # fmt: skip
    assert all(line.startswith(f"refused: {tmp_path}") and "\n" not in line for line in refused)
    flip(tmp_path / "step-2.ckpt")
    flip(tmp_path / "step-4.ckpt")
    with pytest.raises(ValueError, match="of its 5 checkpoints none is whole"):
        newest(tmp_path)


def saved(path: Path, **config: Any) -> Path:
    AtomicCheckpointIO().save_checkpoint({"global_step": 1, CONFIG: config}, path)
    return path


def test_what_changes_the_training_is_refused_key_by_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "specdec")
    before = {
        "model": {
            "optimizer": {
                "class_path": "specdec.nn.optimizers.AdamW",
                "init_args": {"lr": 0.1, "betas": [0.9, 1]},
            }
        },
        "data": {"class_path": "TextData", "init_args": {"seq_len": 8}},
        "trainer": {"precision": None, "max_steps": 6, "logger": None, "devices": 1},
        "seed_everything": 0,
        "out": "a",
        "checkpoint": {"every_n_train_steps": 2},
    }
    path = saved(tmp_path / "a.ckpt", **before)
    assert changed_settings(path, json.loads(json.dumps(before)), []) == []

    now: dict[str, Any] = json.loads(json.dumps(before))
    now["out"], now["checkpoint"]["every_n_train_steps"], now["trainer"]["max_steps"] = "b", 5, 9
    assert set(changed_settings(path, now, [])) == {
        "out",
        "checkpoint.every_n_train_steps",
        "trainer.max_steps",
    }
    assert (
        "trainer.max_steps was 6, is 9; the learning rate's schedule depends on the run's length"
        in caplog.text
    )
    caplog.clear()

    (
        now["model"]["optimizer"]["init_args"]["lr"],
        now["seed_everything"],
        now["trainer"]["devices"],
    ) = 0.2, 1, 2
    with pytest.raises(
        ValueError, match=r"a\.ckpt was trained under other settings[^\n]*--allow_changes '\["
    ) as told:
        changed_settings(path, now, [])
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert lines == [
        "  model.optimizer.lr was 0.1, is 0.2", "  trainer.devices was 1, is 2", "  seed_everything was 0, is 1",
    ]  # fmt: skip
    assert all(line.split()[0] in str(told.value) for line in lines)
    with pytest.raises(ValueError, match=r"listed above \(seed_everything\)"):
        changed_settings(path, now, ["model.optimizer", "trainer.devices"])
    assert len(changed_settings(path, now, ["model", "trainer.devices", "seed_everything"])) == 6
    with pytest.raises(
        ValueError, match=r"--allow_changes 'model.optimiser': no setting has that name"
    ):
        changed_settings(path, now, ["model.optimiser"])
    AtomicCheckpointIO().save_checkpoint({"global_step": 1}, tmp_path / "b.ckpt")
    with pytest.raises(ValueError, match="it holds no config"):
        changed_settings(tmp_path / "b.ckpt", now, [])


def test_going_back_needs_a_directory_of_its_own(
    base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, again = tmp_path / "run", tmp_path / "again"
    assert run_fit("fit", [*base, f"--out={out}"]) == 0
    before, earlier = checkpoints(out), f"--ckpt_path={out}/checkpoints/step-4.ckpt"
    assert main(["fit", *base, f"--out={out}", earlier]) == 2
    assert "later checkpoints than" in capsys.readouterr().err.splitlines()[-1]
    assert checkpoints(out) == before and (out / "DONE.json").exists()
    assert run_fit("fit", [*base, f"--out={again}", earlier]) == 0
    assert same(out, again)


def test_a_resumed_run_may_be_made_longer_and_changed_by_name(
    base: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "specdec")
    out, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    assert run_fit("fit", [*base, f"--out={out}"]) == 0
    auto = [*base, f"--out={out}", "--ckpt_path=auto"]
    before = checkpoints(out)
    assert main(["fit", *auto, "--model.optimizer.lr=0.5", "--seed_everything=3"]) == 2
    assert "  model.optimizer.lr was 0.0001, is 0.5" in caplog.text
    assert "--allow_changes '[seed_everything,model.optimizer.lr]'" in capsys.readouterr().err
    assert checkpoints(out) == before and (out / "DONE.json").exists()
    # a checkpoint knows its config wherever it lies
    moved = shutil.copy(out / "checkpoints" / "step-4.ckpt", tmp_path / "moved.ckpt")
    assert (
        main(["fit", *base, f"--out={elsewhere}", f"--ckpt_path={moved}", "--model.ttt_steps=2"])
        == 2
    )
    assert "(model.ttt_steps)" in capsys.readouterr().err and not elsewhere.exists()
    allowed = ["--model.optimizer.lr=0.5", "--allow_changes=[model.optimizer]"]
    assert run_fit("fit", [*auto, *allowed, "--trainer.max_steps=8"]) == 0
    assert json.loads((out / "DONE.json").read_text())["steps"] == 8
    assert checkpoints(out) == ["last.ckpt", "step-6.ckpt", "step-8.ckpt"]
