from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.training.checkpoint_io import AtomicCheckpointIO
from tests.tiny import largest_file, presets, tiny_drafter


def checkpoint() -> dict[str, Any]:
    drafter = tiny_drafter(presets()["eagle3_1"])
    return {"state_dict": drafter.state_dict(), "drafter_config": drafter.config.to_json(), "global_step": 3}


def test_what_is_written_loads_with_weights_only(tmp_path: Path) -> None:
    path, saved = tmp_path / "deep" / "last.ckpt", checkpoint()
    AtomicCheckpointIO().save_checkpoint(saved, path)
    back = torch.load(path, weights_only=True)
    assert back["drafter_config"] == saved["drafter_config"] and back["global_step"] == 3
    assert all(torch.equal(back["state_dict"][key], tensor) for key, tensor in saved["state_dict"].items())
    again = AtomicCheckpointIO().load_checkpoint(path, weights_only=True)
    assert again["global_step"] == 3
    assert [p.name for p in path.parent.iterdir()] == ["last.ckpt"]


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


def test_a_write_that_fails_half_way_says_why(tmp_path: Path) -> None:
    with largest_file(100_000), pytest.raises(ValueError, match=r"last\.ckpt: .*[Ff]ile too large") as caught:
        AtomicCheckpointIO().save_checkpoint({"x": torch.zeros(1 << 20)}, tmp_path / "last.ckpt")
    assert "\n" not in str(caught.value)


def test_it_stages_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one file system, so that the last act is a rename: nothing of the final name is there before it."""
    seen: list[list[str]] = []
    write = torch.save

    def spy(value: Any, where: Any) -> None:
        write(value, where)
        seen.append([p.name for p in tmp_path.iterdir()])

    monkeypatch.setattr(torch, "save", spy)
    AtomicCheckpointIO().save_checkpoint({"x": 1}, tmp_path / "a.ckpt")
    assert len(seen) == 1 and len(seen[0]) == 1 and seen[0] != ["a.ckpt"]
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(ValueError, match=r"run.*: a part of the path is a file"):
        AtomicCheckpointIO().save_checkpoint({"x": 1}, tmp_path / "run" / "a.ckpt")
