"""``specdec export`` and ``specdec import`` from the command line."""

import json
import shlex
from pathlib import Path

import pytest
import torch

from specdec.cli import main
from specdec.drafter import Drafter, DrafterSpec, WeightedSum, load, save
from specdec.export import checkpoint
from specdec.target import Target
from tests.export.made import made_drafter, same_state


@pytest.fixture
def drafter(target_directory: Path, tmp_path: Path) -> Drafter:
    """Saved in ``tmp_path / "drafter"``."""
    made = made_drafter(DrafterSpec(draft_vocab_size=200), Target.load(target_directory))
    save(made, tmp_path / "drafter")
    return made


def test_out_and_in_again(
    drafter: Drafter, target_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there, back = (str(tmp_path / name) for name in ("drafter", "served", "back"))
    of = ["--target", str(target_directory)]
    assert main(["export", "--drafter", here, *of, "--out", there, "--draft_tokens", "4"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[:3] == ["vllm", "serve", str(target_directory)]
    assert json.loads(words[4])["num_speculative_tokens"] == 4
    assert main(["import", "--checkpoint", there, *of, "--out", back]) == 0
    assert capsys.readouterr().out == f"{back}\n"
    again = load(back)
    assert same_state(again, load(here)) and again.config == drafter.config


def test_the_stored_dtype_is_kept(drafter: Drafter, target_directory: Path, tmp_path: Path) -> None:
    save(drafter.to(torch.bfloat16), tmp_path / "half")
    of = ["--target", str(target_directory)]
    out = str(tmp_path / "out")
    assert main(["export", "--drafter", str(tmp_path / "half"), *of, "--out", out, "--format", "speculators"]) == 0
    tensors = checkpoint.read_checkpoint(tmp_path / "out").tensors
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
    assert main(["import", "--checkpoint", out, *of, "--out", str(tmp_path / "back")]) == 0
    assert same_state(load(tmp_path / "back", dtype=torch.bfloat16), drafter)


def test_mistakes_are_one_line(
    drafter: Drafter, target_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of = ["--target", str(target_directory)]
    save(made_drafter(DrafterSpec(WeightedSum()), Target.load(target_directory)), tmp_path / "sum")
    here, out = str(tmp_path / "drafter"), str(tmp_path / "out")
    for argv, message in (
        (["export", "--drafter", here, *of, "--out", here], "exists already"),
        (["export", "--drafter", here, *of, "--out", out, "--format", "onnx"], "unknown format 'onnx'"),
        (["export", "--drafter", "nowhere", *of, "--out", out], "no such drafter directory"),
        (["export", "--drafter", str(tmp_path / "sum"), *of, "--out", out], "fusion WeightedSum"),
        (["export", "--drafter", here, *of], "out"),
        (["import", "--checkpoint", here, *of, "--out", here], "exists already"),
        (["import", "--checkpoint", str(tmp_path / "sum"), *of, "--out", out], "no EAGLE drafter"),
    ):
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert message in error.splitlines()[-1]
    assert not Path(out).exists()


def test_a_checkpoint_on_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pickles are fetched only where there is nothing else."""
    asked: list[list[str]] = []

    def snapshot(source: str, revision: str | None, allow_patterns: list[str]) -> str:
        assert (source, revision) == ("org/drafter", "v1")
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    for files, pickled in ((["model.safetensors", "pytorch_model.bin"], False), (["pytorch_model.bin"], True)):
        monkeypatch.setattr("huggingface_hub.list_repo_files", lambda source, revision, files=files: files)
        assert checkpoint.fetch("org/drafter", "v1") == tmp_path
        assert ("*.bin" in asked[-1]) == pickled and not any(".py" in pattern for pattern in asked[-1])

    def gone(source: str, revision: str | None) -> list[str]:
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.list_repo_files", gone)
    with pytest.raises(ValueError, match=r"org/drafter: no such directory, nor to be had .*offline"):
        checkpoint.fetch("org/drafter", None)
    assert checkpoint.fetch(str(tmp_path), None) == tmp_path
