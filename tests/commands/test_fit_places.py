"""Where a run writes: a config decides within its directory, the command line anywhere."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.cli import main
from specdec.utils.places import flags_for
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
    log = ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", str(tmp_path / "logs")]
    typed = [*log, "--trainer.callbacks+=ModelCheckpoint"]  # in the logger's folder
    assert main(["fit", *given, "--out", "runs/c", *typed]) == 0
    assert [*(tmp_path / "logs").glob("**/checkpoints/*.ckpt")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_what_is_typed_for_one_part_frees_no_other(
    target_directory: Path,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two dots of a template, at step 46, lead up from the run, and from no folder that was typed for the profiler."""
    work = tmp_path / "a" / "b"
    work.mkdir(parents=True)
    monkeypatch.chdir(work)
    config = tmp_path / "c.yaml"
    names = {45: "plain", 46: "{step:c}{step:c}/stolen"}
    callbacks = [
        {"class_path": "ModelCheckpoint", "init_args": {
            "dirpath": ".", "filename": name, "auto_insert_metric_name": False, "every_n_train_steps": step}}
        for step, name in names.items()
    ]  # fmt: skip
    config.write_text(yaml.safe_dump({"trainer": {"callbacks": callbacks}}))
    given = short_run(target_directory, text_file, trainer__max_steps=46, trainer__limit_val_batches=0,
                      trainer__log_every_n_steps=1, acceptance__every_n_validations=0)  # fmt: skip
    typed = ["--trainer.profiler=SimpleProfiler", "--trainer.profiler.dirpath=.",
             "--trainer.profiler.filename=prof"]  # fmt: skip
    assert main(["fit", *given, "--config", str(config), "--out", "run", *typed]) == 2
    assert not [*tmp_path.rglob("stolen*")]
    assert [*tmp_path.rglob("plain*")] == [work / "run" / "plain.ckpt"]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_resumed_run_writes_where_the_first_one_did(
    target_directory: Path,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    given = short_run(target_directory, text_file, trainer__max_steps=1, trainer__limit_val_batches=0,
                      trainer__log_every_n_steps=1, acceptance__every_n_validations=0)  # fmt: skip
    typed = [
        "--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.dirpath", "ckpts",
        "--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", ".", "--trainer.logger.name", "../mine",
    ]  # fmt: skip
    assert main(["fit", *given, "--out", "runs/a", *typed]) == 0
    again = ["--config", "runs/a/config.yaml", "--ckpt_path", "auto", "--trainer.max_steps", "2"]
    assert main(["fit", *again]) == 2
    saved = yaml.safe_load(Path("runs/a/config.yaml").read_text())
    flags = flags_for(saved, Path("runs/a"))
    assert flags == ["--allow_keys", "dirpath,name"]
    assert main(["fit", *flags, *again]) == 0, capsys.readouterr().err
    assert "step=2" in str([*Path("ckpts").iterdir()]) and not Path("runs/a/ckpts").exists()
    assert len([*Path("runs/mine").glob("version_*")]) == 2


@pytest.mark.slow
def test_no_config_continues_or_changes_another_run(
    target_directory: Path,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, config = tmp_path / "run", tmp_path / "c.yaml"
    given = short_run(target_directory, text_file, trainer__max_steps=1, trainer__limit_val_batches=0,
                      trainer__log_every_n_steps=1, acceptance__every_n_validations=0)  # fmt: skip
    assert main(["fit", *given, "--out", str(out)]) == 0
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    settings = {
        "out": str(out),
        "trainer": {"max_steps": 2, "gradient_clip_val": 0.25},
    }
    longer = [*given[: given.index("--trainer.max_steps")], "--config", str(config)]
    longer += [
        "--trainer.limit_val_batches=0",
        "--acceptance.every_n_validations=0",
        "--trainer.log_every_n_steps=1",
    ]
    for start in ("auto", str(out / "checkpoints" / "last.ckpt")):
        config.write_text(yaml.safe_dump(settings | {"ckpt_path": start}))
        assert main(["fit", *longer]) == 2
        assert "resume it by typing --ckpt_path auto" in capsys.readouterr().err
    other = tmp_path / "other.yaml"
    changes = {"allow_changes": ["trainer.gradient_clip_val"]}
    other.write_text(yaml.safe_dump(changes))
    for way in (changes, {"allow_changes+": changes["allow_changes"]}, {"config": str(other)}):
        config.write_text(yaml.safe_dump(settings | way))
        for more in ([], ["--allow_changes+=trainer.max_steps"]):
            assert main(["fit", *longer, "--ckpt_path", "auto", *more]) == 2
            assert "--allow_changes '[trainer.gradient_clip_val]" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == before
    typed = ["--ckpt_path", "auto", "--allow_changes", "[trainer.gradient_clip_val]"]
    assert main(["fit", *longer, *typed]) == 0
    own = ["--config", str(out / "config.1.yaml"), "--ckpt_path", "auto", "--trainer.max_steps=3"]
    assert main(["fit", *own]) == 0
