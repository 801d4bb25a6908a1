"""``specdec export`` and ``specdec import`` from the command line."""

import json
import logging
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from specdec.cli import main
from specdec.drafter import Drafter, DrafterSpec, ScalarMix, load_drafter, save_drafter
from specdec.export import checkpoint
from specdec.target import Target
from tests.export.made import made_drafter, same_state


@pytest.fixture
def drafter(target_directory: Path, tmp_path: Path) -> Drafter:
    """Saved in ``tmp_path / "drafter"``."""
    made = made_drafter(DrafterSpec(draft_vocab_size=200), Target.load(target_directory))
    save_drafter(made, tmp_path / "drafter")
    return made


def test_out_and_in_again(
    drafter: Drafter,
    target_directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="specdec")
    here, there, back = (str(tmp_path / name) for name in ("drafter", "served", "back"))
    of = ["--target", str(target_directory)]
    assert main(["export", "--drafter", here, *of, "--out", there, "--draft_tokens", "4"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[:3] == ["vllm", "serve", str(target_directory)]
    assert json.loads(words[4])["num_speculative_tokens"] == 4
    assert main(["import", "--checkpoint", there, *of, "--out", back]) == 0
    assert capsys.readouterr().out == f"{back}\n"
    again = load_drafter(back)
    assert same_state(again, load_drafter(here)) and again.config == drafter.config
    said = [record.getMessage().partition(": ") for record in caplog.records]
    layout, boundaries, switches, vocabulary = (
        next(text for key, _, text in said if key == name)
        for name in ("layout", "boundaries", "switches", "draft vocabulary")
    )
    assert layout.startswith("EAGLE-3, an export of specdec's")
    assert boundaries.startswith(", ".join(map(str, again.config.aux_layers)))
    assert " on; " in switches and switches.endswith(" off")
    assert (
        vocabulary.startswith(f"200 of {again.config.vocab_size:,} tokens") and "d2t" in vocabulary
    )


@pytest.mark.slow
def test_killed_in_the_middle(drafter: Drafter, target_directory: Path, tmp_path: Path) -> None:
    """All written, nothing verified: there is no directory of that name, and none that stands in the way."""
    argv = ["export", "--drafter", str(tmp_path / "drafter"), "--target", str(target_directory)]
    argv += ["--out", str(tmp_path / "there" / "served")]
    code = (
        "import os, sys; from specdec.export import write; from specdec.cli import main\n"
        "write._verify = lambda *of: os.kill(os.getpid(), 9)\n"
        "main(sys.argv[1:])"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    claim, unfinished = sorted(path.name for path in (tmp_path / "there").iterdir())
    assert claim == ".served.claimed" and unfinished.startswith(".tmp-")
    assert main(argv) == 0 and (tmp_path / "there" / "served" / "config.json").is_file()
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["served"]


def test_the_line_that_serves_says_everything_of_the_target(
    drafter: Drafter, target_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    pinned = ["--target.revision", "v2", "--target.trust_remote_code", "true"]
    argv = ["export", "--drafter", "drafter", "--target", str(target_directory), *pinned]
    for format, wanted in (
        ("vllm", ["--revision", "v2", "--tokenizer-revision", "v2", "--trust-remote-code"]),
        ("sglang", ["--revision", "v2", "--trust-remote-code"]),
    ):
        assert main([*argv, "--out", format, "--format", format]) == 0
        words = shlex.split(capsys.readouterr().out)
        assert words[-len(wanted) :] == wanted
        assert str(tmp_path / format) in " ".join(words)


def test_the_stored_dtype_is_kept(drafter: Drafter, target_directory: Path, tmp_path: Path) -> None:
    save_drafter(drafter.to(torch.bfloat16), tmp_path / "half")
    of = ["--target", str(target_directory)]
    out = str(tmp_path / "out")
    assert (
        main(
            [
                "export",
                "--drafter",
                str(tmp_path / "half"),
                *of,
                "--out",
                out,
                "--format",
                "speculators",
            ]
        )
        == 0
    )
    tensors = checkpoint.read_checkpoint(tmp_path / "out").tensors
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
    assert main(["import", "--checkpoint", out, *of, "--out", str(tmp_path / "back")]) == 0
    assert same_state(load_drafter(tmp_path / "back", dtype=torch.bfloat16), drafter)


def test_mistakes_are_one_line(
    drafter: Drafter, target_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of = ["--target", str(target_directory)]
    save_drafter(
        made_drafter(DrafterSpec(ScalarMix()), Target.load(target_directory)), tmp_path / "sum"
    )
    here, out = str(tmp_path / "drafter"), str(tmp_path / "out")
    for argv, message in (
        (["export", "--drafter", here, *of, "--out", here], "exists already"),
        (
            ["export", "--drafter", here, *of, "--out", out, "--format", "onnx"],
            "unknown format 'onnx'",
        ),
        (["export", "--drafter", "nowhere", *of, "--out", out], "no such drafter directory"),
        (["export", "--drafter", str(tmp_path / "sum"), *of, "--out", out], "fusion ScalarMix"),
        (["export", "--drafter", here, *of], "out"),
        (["import", "--checkpoint", here, *of, "--out", here], "exists already"),
        (
            ["import", "--checkpoint", here, *of, "--out", out],
            "specdec's own, which needs no import",
        ),
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
    assert checkpoint.fetch_checkpoint("org/drafter", "v1") == tmp_path
    assert ["*.bin" in patterns for patterns in asked] == [False, True]
    assert not any(".py" in pattern for patterns in asked for pattern in patterns)
    (tmp_path / "model.safetensors").touch()
    assert checkpoint.fetch_checkpoint("org/drafter", "v1") == tmp_path
    assert len(asked) == 3 and "*.bin" not in asked[2]

    def gone(source: str, revision: str | None, allow_patterns: list[str]) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", gone)
    with pytest.raises(
        ValueError, match=r"org/drafter: no such directory, nor to be had .*offline"
    ):
        checkpoint.fetch_checkpoint("org/drafter", None)
    assert checkpoint.fetch_checkpoint(str(tmp_path), None) == tmp_path
