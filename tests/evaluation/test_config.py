"""Commands that decode take a drafter with its own target, and say where that will be slow."""

from pathlib import Path

import pytest

from specdec.cli import main
from specdec.evaluation.config import load_pair
from specdec.target import TargetSource

COMMANDS = ("evaluate", "tune", "drift", "robustness")


@pytest.mark.parametrize("command", COMMANDS)
def test_another_target_is_refused_unless_asked_for(
    command: str,
    target_directory: Path,
    foreign_drafter: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "p.txt").write_text("def add_3(a, b):\n")
    argv = [command, "--target", str(target_directory), "--drafter", str(foreign_drafter)]
    argv += ["--prompts", str(tmp_path / "p.txt"), "--max_new_tokens", "16"]
    argv += ["--out", str(tmp_path / "out")]
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert "trained for another target" in error and len(error.splitlines()) == 1

    def beyond(*_: object, refuse: bool) -> None:
        assert not refuse
        raise ValueError("it got beyond the check")

    monkeypatch.setattr("specdec.evaluation.config.warn_unless_made_for", beyond)
    assert main([*argv, "--other_target", "true"]) == 2
    assert "it got beyond the check" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("able", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_slow_dtype_is_said(
    able: bool,
    dtype: str,
    target_directory: Path,
    drafter_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("specdec.evaluation.config.multiplies_bfloat16", lambda: able)
    assert load_pair(
        TargetSource(str(target_directory), dtype=dtype), drafter_directory
    ).made_for_each_other
    assert ("bfloat16 may take many times as long" in caplog.text) == (
        dtype == "bfloat16" and not able
    )
