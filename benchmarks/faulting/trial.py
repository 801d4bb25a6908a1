"""One run in a process of its own, forked from a server that has imported everything, and killed on the way.

Every batch's loss is on the disk, bit for bit, before the next batch begins.
"""

import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch

import specdec.files
from specdec import imports
from specdec.fit import run
from specdec.training import seals
from specdec.training.module import DrafterModule
from specdec.training.run_checkpoint import RunCheckpoint

REPOSITORY = Path(__file__).resolve().parents[2]
Key = tuple[int, int, int]
"""Optimizer step, batch within it, rank."""


class StepLosses(pl.Callback):
    """Appends ``step part rank loss`` for every batch, the loss in hexadecimal."""

    def __init__(self, path: Path) -> None:
        self.path, self.step, self.part = path, -1, 0

    def on_train_batch_start(self, trainer: pl.Trainer, *rest: Any) -> None:
        """Count the batches of a step."""
        self.part = self.part + 1 if trainer.global_step == self.step else 0
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *rest: Any) -> None:
        """Write the loss as the backward pass took it; what is logged skips the batches of an accumulated step."""
        loss = float(outputs["loss"])
        line = f"{self.step} {self.part} {trainer.global_rank} {loss.hex()}\n"
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, line.encode())
        os.close(handle)


class Trial(NamedTuple):
    """What one process is to do."""

    args: tuple[str, ...]
    out: Path
    temporary: Path
    """``$TMPDIR``."""
    kill_in_save: int = 0
    """Kill itself at this act on the file system within a save, counted over all saves; 0 for never."""
    processes: int = 1


def losses_of(out: Path) -> Path:
    """Where a run's losses are written: beside its directory."""
    return out.with_name(f"{out.name}.losses")


def read_losses(out: Path) -> list[tuple[Key, str]]:
    """All that was written, of every process; a line that a kill cut short counts for nothing."""
    path = losses_of(out)
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [((int(step), int(part), int(rank)), loss) for step, part, rank, loss in map(str.split, lines)]


def start(trial: Trial) -> "multiprocessing.process.BaseProcess":
    """Fork a child that runs it, in a process group of its own."""
    os.environ["PYTHONPATH"] = str(REPOSITORY)  # the server looks for what it preloads in no other way
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.faulting.trial", "transformers.models.llama.modeling_llama"])
    process = context.Process(target=_child, args=(trial,))
    process.start()
    return process


def kill(process: "multiprocessing.process.BaseProcess") -> None:
    """SIGKILL the whole group, as a machine that goes down would."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has not made its group yet, or is gone
        process.kill()
    process.join()


def _child(trial: Trial) -> None:
    os.setpgid(0, 0)
    multiprocessing.set_start_method("fork", force=True)  # data workers, as anywhere: the server's way is ours alone
    torch.set_num_threads(1)
    os.environ["TMPDIR"] = str(trial.temporary)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with trial.out.with_name(f"{trial.out.name}.log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    inner = DrafterModule.configure_callbacks
    DrafterModule.configure_callbacks = lambda self: [*inner(self), StepLosses(losses_of(trial.out))]  # type: ignore[method-assign]
    if trial.kill_in_save:
        _count_acts(trial.kill_in_save)
    sys.argv = ["specdec"]
    others = _ranks(trial.processes)
    try:
        with imports.allowing(["benchmarks.faulting.dropout"]):
            status = run("fit", [*trial.args, f"--out={trial.out}", "--ckpt_path=auto"])
    except ValueError as error:
        print(f"error: {error}", flush=True)
        os._exit(2)
    for other in others:
        status = status or os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])
    os._exit(status)


def _ranks(processes: int) -> list[int]:
    """Fork the further processes of a job, each with what torchrun would tell it; their ids, in the first."""
    if processes == 1:
        return []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "faults", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_RANK": "0",
        "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "RANK": "0", "LOCAL_RANK": "0",
    }  # fmt: skip
    others = []
    for rank in range(1, processes):
        child = os.fork()
        if child == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            return []
        others.append(child)
    return others


def _count_acts(last: int) -> None:
    """Count syncs, renames, removals and some writes while checkpoints are saved, and die at one of them."""
    acts, writes, inside = 0, 0, False

    def act() -> None:
        nonlocal acts
        acts += inside
        if inside and acts == last:
            os.killpg(0, signal.SIGKILL)

    def watched(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def before_and_after(*args: Any, **kwargs: Any) -> Any:
            nonlocal writes
            writes += name == "write"
            counts = name != "write" or writes % 40 == 0  # a checkpoint has hundreds, and two renames
            if counts:
                act()
            out = inner(*args, **kwargs)
            if counts:
                act()
            return out

        setattr(owner, name, before_and_after)

    for owner, name in (
        (seals.Sealing, "write"), (seals.Sealing, "seal"), (specdec.files, "_sync"), (os, "replace"), (os, "fsync"),
        (Path, "chmod"), (Path, "unlink"), (Path, "mkdir"), (os, "rename"), (torch, "save"),
    ):  # fmt: skip
        watched(owner, name)
    save = RunCheckpoint._save_checkpoint

    def saving(*args: Any) -> None:
        nonlocal inside
        inside = True
        save(*args)
        act()
        inside = False

    RunCheckpoint._save_checkpoint = saving  # type: ignore[method-assign]


def wait_for(process: "multiprocessing.process.BaseProcess", out: Path, lines: int, limit: float = 120.0) -> bool:
    """Whether a run has written so many losses in all; false if it ended before."""
    end = time.monotonic() + limit
    path = losses_of(out)
    while process.is_alive():
        if path.exists() and path.read_bytes().count(b"\n") >= lines:
            return True
        if time.monotonic() > end:
            kill(process)
            raise TimeoutError(f"{out}: no {lines} losses within {limit:.0f} s; see {out}.log")
        time.sleep(0.002)
    return False
