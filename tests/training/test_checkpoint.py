"""Checkpoints are whole or absent, say of which step they are, and are verified; which of them are kept."""

import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import save_file

from specdec.training.checkpoint import ALIKE, AtomicCheckpointIO, compare, contents, newest, step_of, verify
from specdec.training.stopping import RunCheckpoint
from specdec.utils.files import staged_directory, write_sums
from tests.tiny import largest_file


def written(path: Path, step: int = 7) -> Path:
    state = {"state_dict": {"w": torch.arange(5000.0)}, "global_step": step, "specdec_config": {"a": 1}}
    AtomicCheckpointIO().save_checkpoint(state, path)
    return path


def sharded(path: Path, step: int = 7) -> Path:
    with staged_directory(path) as temporary:
        for rank in range(2):
            save_file({"w": torch.arange(200.0) + rank}, temporary / f"shard-{rank}.safetensors")
        state = {"global_step": step, "specdec_config": {"a": 1}}
        AtomicCheckpointIO().save_checkpoint(state, temporary / ALIKE)
        write_sums(temporary)
    return path


@pytest.mark.parametrize("make", [written, sharded])
def test_a_seal_tells_the_step_and_verifies(make: object, tmp_path: Path) -> None:
    assert callable(make)
    path = make(tmp_path / "a.ckpt", 12)
    verify(path)
    assert step_of(path) == 12 and contents(path)["specdec_config"] == {"a": 1}


@pytest.mark.parametrize("make", [written, sharded])
def test_every_flipped_bit_is_found(make: object, tmp_path: Path) -> None:
    assert callable(make)
    path, draw = make(tmp_path / "a.ckpt"), random.Random(0)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in files:
        whole = file.read_bytes()
        size = len(whole)
        places = {draw.randrange(size) for _ in range(40)} | set(range(max(0, size - 130), size)) | {0}
        for at in places:
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :])
            with pytest.raises(ValueError, match=r"a\.ckpt[^\n]*use an earlier one[^\n]*--ckpt_path auto"):
                verify(path)
        file.write_bytes(whole)
    verify(path)


@pytest.mark.parametrize("left", [0, 1, 64, -1, -50, -3000])
def test_what_is_cut_off_does_not_count(left: int, tmp_path: Path) -> None:
    path = written(tmp_path / "a.ckpt")
    path.write_bytes(path.read_bytes()[:left])
    for look in (step_of, verify):
        with pytest.raises(ValueError, match=r"a\.ckpt: damaged, cut off or no checkpoint"):
            look(path)


def test_a_damaged_checkpoint_is_not_loaded(tmp_path: Path) -> None:
    path = written(tmp_path / "a.ckpt")
    whole = bytearray(path.read_bytes())
    whole[whole.index(torch.arange(100.0, 110.0).numpy().tobytes())] ^= 1  # a weight, which torch would load in silence
    path.write_bytes(whole)
    torch.load(path, weights_only=True)
    with pytest.raises(ValueError, match=r"a\.ckpt: damaged: its SHA-256"):
        AtomicCheckpointIO().load_checkpoint(path)
    with pytest.raises(ValueError, match=r"b\.ckpt: checkpoint not found"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "b.ckpt")


def stamped(value: object, file: Path) -> None:
    """As a stranger would write it: what is no mapping, or holds code, under a hash that is right."""
    torch.save(value, file)
    content = file.read_bytes() + b"\nspecdec checkpoint of step %020d, sha256 " % 7
    file.write_bytes(content + hashlib.sha256(content).hexdigest().encode() + b"\n")


class Hostile:
    """Leaves a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> object:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("make", [lambda mark: {"global_step": 7, "x": Hostile(mark)}, lambda mark: [1, 2]])
@pytest.mark.parametrize("shards", [False, True])
def test_what_a_stranger_sealed_runs_no_code(make: Callable[[Path], object], shards: bool, tmp_path: Path) -> None:
    """A hash tells nothing of who wrote it."""
    path, mark = tmp_path / "step-7.ckpt", tmp_path / "mark"
    file = path / ALIKE if shards else path
    file.parent.mkdir(exist_ok=True)
    stamped(make(mark), file)
    if shards:
        write_sums(path)
    found = newest(tmp_path)
    assert found == path
    for read in (lambda: compare(found, {}, []), lambda: AtomicCheckpointIO().load_checkpoint(file)):
        with pytest.raises(ValueError, match=r"no checkpoint of specdec") as told:
            read()
        assert "\n" not in str(told.value)
    assert not mark.exists()


@pytest.mark.parametrize("older", [False, True])
def test_a_write_that_fails_half_way_leaves_the_older_file_or_none(older: bool, tmp_path: Path) -> None:
    """The system refuses the file at 100 kB, in the midst of torch's own writing."""
    path = tmp_path / "last.ckpt"
    if older:
        AtomicCheckpointIO().save_checkpoint({"global_step": 1}, path)
    with largest_file(100_000), pytest.raises((ValueError, RuntimeError)):
        AtomicCheckpointIO().save_checkpoint({"x": torch.zeros(1 << 20)}, path)
    assert [p.name for p in tmp_path.iterdir()] == (["last.ckpt"] if older else [])
    if older:
        assert torch.load(path, weights_only=True) == {"global_step": 1}


class Saves(pl.Trainer):
    """Writes nothing but names."""

    step = 0

    @property
    def global_step(self) -> int:
        return self.step

    def save_checkpoint(self, filepath: Any, *rest: Any, **more: Any) -> None:
        Path(filepath).touch()


def saved(folder: Path, top: int, steps: list[int]) -> set[str]:
    """What lies there after a process has saved at these steps, and was killed."""
    trainer = Saves(logger=False, accelerator="cpu", enable_checkpointing=False)
    checkpoint = RunCheckpoint(every_n_train_steps=1, save_top_k=top)
    checkpoint.dirpath = str(folder)
    for step in steps:
        trainer.step = step
        candidates = checkpoint._monitor_candidates(trainer)
        checkpoint._save_topk_checkpoint(trainer, candidates)
        checkpoint._save_last_checkpoint(trainer, candidates)
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("top", [0, 1, 2, -1])
def test_as_many_are_kept_after_any_number_of_kills(tmp_path: Path, top: int) -> None:
    everything = [2, 4, 6, 8, 10, 12]
    for begin in range(0, 6, 2):  # every process knows nothing of those before
        found = saved(tmp_path, top, everything[begin : begin + 2])
    kept = everything if top == -1 else everything[len(everything) - top :]
    assert found == {"last.ckpt", *(f"step-{step}.ckpt" for step in kept)}
