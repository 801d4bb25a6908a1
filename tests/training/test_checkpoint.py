"""Checkpoints are whole or absent, say of which step they are, and are verified; which of them are kept."""

import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from specdec.training.checkpoint import (
    DIGEST,
    AtomicCheckpointIO,
    RunCheckpoint,
    newest,
    read_training_checkpoint,
    verify,
)
from specdec.training.run_directory import changed_settings
from tests.tiny import largest_file


def written(path: Path, step: int = 7) -> Path:
    state = {
        "state_dict": {"w": torch.arange(5000.0)},
        "global_step": step,
        "specdec_config": {"a": 1},
    }
    AtomicCheckpointIO().save_checkpoint(state, path)
    return path


def test_a_checkpoint_tells_its_step_and_verifies(tmp_path: Path) -> None:
    path = written(tmp_path / "a.ckpt", 12)
    verify(path)
    assert read_training_checkpoint(path)["global_step"] == 12 and read_training_checkpoint(path)[
        "specdec_config"
    ] == {"a": 1}


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path, draw = written(tmp_path / "a.ckpt"), random.Random(0)
    whole = path.read_bytes()
    for at in [*draw.sample(range(len(whole)), 200), *range(len(whole) - DIGEST - 30, len(whole))]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :])
        with pytest.raises(
            ValueError, match=r"a\.ckpt[^\n]*use an earlier one[^\n]*--ckpt_path auto"
        ):
            verify(path)


def test_of_a_checkpoint_without_a_digest_every_flipped_bit_of_the_data_is_found(
    tmp_path: Path,
) -> None:
    """Weights, and the pickle that says where they go; what lies between them is padding."""
    path, draw = written(tmp_path / "a.ckpt"), random.Random(0)
    torch.save(torch.load(path, weights_only=True), path)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    places = []
    for member in members:
        name, extra = struct.unpack(
            "<HH", whole[member.header_offset + 26 : member.header_offset + 30]
        )
        start = member.header_offset + 30 + name + extra
        places += [draw.randrange(start, start + member.file_size) for _ in range(20)]
    for at in places:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :])
        with pytest.raises(
            ValueError, match=r"a\.ckpt[^\n]*use an earlier one[^\n]*--ckpt_path auto"
        ):
            verify(path)
    # elsewhere: found, or without a say in what is read
    for at in draw.sample(range(len(whole)), 200):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :])
        try:
            found = AtomicCheckpointIO().load_checkpoint(path)
        except ValueError:
            continue
        assert torch.equal(found.pop("state_dict")["w"], torch.arange(5000.0))
        assert found == {"global_step": 7, "specdec_config": {"a": 1}}


@pytest.mark.parametrize("left", [0, 1, 64, -1, -50, -3000])
def test_what_is_cut_off_does_not_count(left: int, tmp_path: Path) -> None:
    path = written(tmp_path / "a.ckpt")
    path.write_bytes(path.read_bytes()[:left])
    # the data is whole
    for look in (read_training_checkpoint, verify) if left >= 0 or left < -DIGEST else (verify,):
        with pytest.raises(ValueError, match=r"a\.ckpt: damaged, cut off or no checkpoint"):
            look(path)


def test_a_damaged_checkpoint_is_not_loaded(tmp_path: Path) -> None:
    path = written(tmp_path / "a.ckpt")
    whole = bytearray(path.read_bytes())
    # a weight, which torch would load in silence
    whole[whole.index(torch.arange(100.0, 110.0).numpy().tobytes())] ^= 1
    path.write_bytes(whole)
    torch.load(path, weights_only=True)
    with pytest.raises(ValueError, match=r"a\.ckpt: damaged, cut off or .* its SHA-256 differs"):
        AtomicCheckpointIO().load_checkpoint(path)
    with pytest.raises(ValueError, match=r"b\.ckpt: checkpoint not found"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "b.ckpt")


class Hostile:
    """Leaves a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> object:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize(
    "make", [lambda mark: {"global_step": 7, "x": Hostile(mark)}, lambda mark: [1, 2]]
)
def test_a_strangers_file_runs_no_code(make: Callable[[Path], object], tmp_path: Path) -> None:
    """As a stranger would write it: what is no mapping, or holds code."""
    path, mark = tmp_path / "step-7.ckpt", tmp_path / "mark"
    torch.save(make(mark), path)
    verify(path)
    load = AtomicCheckpointIO().load_checkpoint
    reads = (lambda: newest(tmp_path), lambda: changed_settings(path, {}, []), lambda: load(path))
    for read, message in zip(
        reads, ("of its 1 checkpoint none is whole", *["no checkpoint of specdec"] * 2), strict=True
    ):
        with pytest.raises(ValueError, match=message) as told:
            read()
        assert "\n" not in str(told.value)
    assert not mark.exists()


@pytest.mark.parametrize("older", [False, True])
def test_a_write_that_fails_half_way_leaves_the_older_file_or_none(
    older: bool, tmp_path: Path
) -> None:
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
    checkpoint = RunCheckpoint(every_n_train_steps=2, save_top_k=top)
    checkpoint.dirpath = folder
    for step in steps:
        trainer.step = step - 1
        checkpoint.on_train_batch_start(trainer)
        trainer.step = step
        checkpoint.on_train_batch_end(trainer)
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("top", [0, 1, 2, -1])
def test_as_many_are_kept_after_any_number_of_kills(tmp_path: Path, top: int) -> None:
    everything = [2, 4, 6, 8, 10, 12]
    for begin in range(0, 6, 2):  # every process knows nothing of those before
        found = saved(tmp_path, top, everything[begin : begin + 2])
    kept = everything if top == -1 else everything[len(everything) - top :]
    assert found == {"last.ckpt", *(f"step-{step}.ckpt" for step in kept)}
