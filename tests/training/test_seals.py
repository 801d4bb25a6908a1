"""Checkpoints that say of which step they are, and that they are whole."""

import random
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specdec.files import staged_directory
from specdec.sums import SUMS, write_sums
from specdec.training.checkpoint_io import AtomicCheckpointIO
from specdec.training.resuming import compare, newest
from specdec.training.seals import ALIKE, Sealing, contents, step_of, verify


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


def test_a_sealed_file_is_still_what_torch_and_zip_read(tmp_path: Path) -> None:
    path = written(tmp_path / "a.ckpt")
    for mapped in (False, True):
        assert torch.load(path, weights_only=True, mmap=mapped)["global_step"] == 7
    assert zipfile.ZipFile(path).testzip() is None


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


@pytest.mark.parametrize("gone", [SUMS, ALIKE, "shard-1.safetensors"])
def test_a_directory_that_lacks_a_file_does_not_count(gone: str, tmp_path: Path) -> None:
    path = sharded(tmp_path / "a.ckpt")
    (path / gone).unlink()
    with pytest.raises(ValueError, match=r"a\.ckpt.*" + ("unfinished" if gone == SUMS else gone)):
        verify(path)


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


def test_a_sharded_checkpoint_is_removed_whole(tmp_path: Path) -> None:
    path = sharded(tmp_path / "a.ckpt")
    AtomicCheckpointIO().remove_checkpoint(path)
    assert list(tmp_path.iterdir()) == []


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
    with file.open("wb") as stream:
        sealing = Sealing(stream)
        torch.save(make(mark), sealing)  # type: ignore[arg-type]
        sealing.seal(7)
    if shards:
        write_sums(path)
    found = newest(tmp_path)
    assert found == path
    for read in (lambda: compare(found, {}, []), lambda: AtomicCheckpointIO().load_checkpoint(file)):
        with pytest.raises(ValueError, match=r"no checkpoint of specdec") as told:
            read()
        assert "\n" not in str(told.value)
    assert not mark.exists()
