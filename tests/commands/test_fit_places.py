"""Where a run writes: a config decides within its directory, the command line anywhere."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.cli import main
from tests.short_run import short_run

LIGHTNING = "lightning.pytorch"
OUTSIDE: dict[str, dict[str, Any]] = {
    "a name": {"logger": {"class_path": f"{LIGHTNING}.loggers.CSVLogger", "init_args": {
        "save_dir": ".", "name": "../../elsewhere"}}},
    "a version": {"logger": {"class_path": "TensorBoardLogger", "init_args": {
        "save_dir": ".", "name": "x", "version": "../../../elsewhere"}}},
    "a sub-folder": {"logger": {"class_path": f"{LIGHTNING}.loggers.TensorBoardLogger", "init_args": {
        "save_dir": ".", "sub_dir": "a/../../../../elsewhere"}}},
    "a home": {"logger": {"class_path": f"{LIGHTNING}.loggers.TensorBoardLogger", "init_args": {
        "save_dir": ".", "name": "~/elsewhere"}}},
    "a file name": {"callbacks": [{"class_path": f"{LIGHTNING}.callbacks.ModelCheckpoint", "init_args": {
        "filename": "../../elsewhere/{step}"}}]},
    "a reference": {"callbacks": [{"class_path": f"{LIGHTNING}.callbacks.ModelCheckpoint", "init_args": {
        "dirpath": "${model.target.source}"}}]},
    "a profiler": {"profiler": {"class_path": f"{LIGHTNING}.profilers.SimpleProfiler", "init_args": {
        "dirpath": ".", "filename": "../../elsewhere/x"}}},
}  # fmt: skip


@pytest.mark.parametrize("case", OUTSIDE)
def test_no_config_writes_outside_the_run(
    case: str,
    target_directory: Path,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "metrics.csv").write_text("precious")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "c.yaml"
    config.write_text(yaml.safe_dump({"trainer": OUTSIDE[case]}))
    given = short_run(
        target_directory, text_file, trainer__max_steps=1, out=tmp_path / "runs" / "run"
    )
    assert main(["fit", *given, "--config", str(config)]) == 2
    assert "is taken from the command line alone" in capsys.readouterr().err
    assert [path.name for path in elsewhere.iterdir()] == ["metrics.csv"]
    assert (elsewhere / "metrics.csv").read_text() == "precious"
    assert not (tmp_path / "runs" / "run").exists()


def test_places_of_a_config_lie_in_the_run_and_typed_ones_where_they_say(
    target_directory: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "c.yaml"
    config.write_text(yaml.safe_dump({"trainer": {"callbacks": [
        {"class_path": f"{LIGHTNING}.callbacks.ModelCheckpoint", "init_args": {"dirpath": "more", "save_last": True}}
    ]}}))  # fmt: skip
    given = short_run(target_directory, text_file, trainer__max_steps=1, trainer__limit_val_batches=0,
                      trainer__log_every_n_steps=1, acceptance__every_n_validations=0)  # fmt: skip
    typed = [
        "--trainer.logger",
        "CSVLogger",
        "--trainer.logger.save_dir",
        "../logs",
        "--trainer.logger.name",
        "mine",
    ]
    assert main(["fit", *given, "--config", str(config), "--out", "runs/a", *typed]) == 0
    assert (tmp_path / "runs" / "a" / "more" / "last.ckpt").exists() and not Path("more").exists()
    assert [*Path("runs/logs/mine").glob("**/metrics.csv")]
    typed = [
        "--trainer.callbacks+=ModelCheckpoint",
        "--trainer.callbacks.dirpath",
        str(tmp_path / "far"),
    ]
    assert main(["fit", *given, "--out", "runs/b", *typed]) == 0
    assert [*(tmp_path / "far").glob("*.ckpt")]
