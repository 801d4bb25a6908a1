"""Whole training runs on a tiny target."""

import json
import logging
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from specdec.cli import main
from specdec.commands.fit import run_fit
from specdec.commands.lightning_defaults import _once
from specdec.drafter import load_drafter
from specdec.features import OnTheFly
from specdec.target.target import TargetOutput
from specdec.training.run_directory import CLAIM
from tests.short_run import short_run

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def base(target_directory: Path, text_file: Path, tmp_path: Path) -> list[str]:
    """Arguments of a short run on the CPU."""
    config = {
        "model": {
            "target": {"source": str(target_directory)},
            "drafter": {"draft_vocab_size": 200},
            "ttt_steps": 3,
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}},
        },
        "data": {
            "class_path": "TextData",
            "init_args": {
                "train": str(text_file),
                "val": str(text_file),
                "seq_len": 32,
                "batch_size": 2,
            },
        },
        "trainer": {
            "max_steps": 6,
            "log_every_n_steps": 2,
            "accelerator": "cpu",
            "enable_model_summary": False,
        },
        "checkpoint": {"every_n_train_steps": 3, "save_top_k": -1},
        "acceptance": {"max_new_tokens": 8, "count": 2},
    }
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(config))
    return ["--config", str(tmp_path / "base.yaml")]


@pytest.fixture(autouse=True)
def bare_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["specdec"])


def test_a_run_keeps_everything(base: list[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert (
        run_fit(
            "fit",
            [
                *base,
                "--out",
                str(out),
                "--trainer.limit_val_batches",
                "2",
                "--trainer.val_check_interval",
                "3",
            ],
        )
        == 0
    )
    assert json.loads((out / "DONE.json").read_text())["steps"] == 6
    assert (out / "config.yaml").is_file() and (out / "provenance.json").is_file()
    assert list(out.glob("tensorboard/version_0/events*"))
    rows = (out / "csv" / "version_0" / "metrics.csv").read_text()
    assert (
        "train/accuracy_2" in rows
        and "val/prefix_proxy" in rows
        and "val/acceptance_length" in rows
    )
    drafter = load_drafter(out / "drafter")
    assert drafter.config.draft_vocab_size == 200
    assert drafter.config.target["fingerprint"]
    again = tmp_path / "again"  # the saved config is a run of its own
    assert run_fit("fit", ["--config", str(out / "config.yaml"), "--out", str(again)]) == 0
    one, two = (load_file(path / "drafter" / "model.safetensors") for path in (out, again))
    assert all(torch.equal(one[name], two[name]) for name in one)


MINE = ["--trainer.logger.save_dir=.", "--trainer.logger.name=mine"]


@pytest.mark.parametrize(
    ("given", "folders"),
    [
        (
            ["--trainer.logger+=lightning.pytorch.loggers.CSVLogger", *MINE],
            ["csv", "mine", "tensorboard"],
        ),
        (["--trainer.logger=lightning.pytorch.loggers.CSVLogger", *MINE], ["mine"]),
        (["--trainer.logger=true"], ["csv", "tensorboard"]),
        (["--trainer.logger=false"], []),
    ],
)
def test_loggers_are_added_replaced_and_switched_off(
    base: list[str], tmp_path: Path, given: list[str], folders: list[str]
) -> None:
    """Each lies in the run directory and has the config, flattened by its own habit."""
    out = tmp_path / "run"
    short = ["--trainer.max_steps=1", "--trainer.limit_val_batches=0"]
    assert run_fit("fit", [*base, *short, *given, f"--out={out}"]) == 0
    assert sorted(path.parent.name for path in out.glob("*/version_0")) == folders
    for folder in folders:
        found = yaml.safe_load((out / folder / "version_0" / "hparams.yaml").read_text())
        assert found["model"]["optimizer"] == {
            "class_path": "torch.optim.AdamW",
            **yaml.safe_load((out / "config.yaml").read_text())["model"]["optimizer"]["init_args"],
        }
        assert found["data"]["class_path"] == "specdec.TextData" and found["data"]["seq_len"] == 32
        assert found["trainer"]["max_steps"] == 1 and "ckpt_path" not in found
        assert "logger" not in found["trainer"]  # whose run may go on under another config of it
    if "tensorboard" in folders:
        (events,) = out.glob("tensorboard/version_0/events*")
        assert b"model/optimizer/lr" in events.read_bytes()
    # none of it lies in the first run's
    saved = ["--config", str(out / "config.yaml"), f"--out={tmp_path / 'again'}"]
    if folders == ["csv", "mine", "tensorboard"]:
        assert run_fit("fit", saved) == 0
        assert (
            sorted(path.parent.name for path in (tmp_path / "again").glob("*/version_0")) == folders
        )
        assert not list(out.glob("*/version_1"))


def test_what_no_file_may_say_may_be_typed(base: list[str], tmp_path: Path) -> None:
    """And is saved, as what has to be allowed when that config is given."""
    out, logs = tmp_path / "run", tmp_path / "elsewhere"
    typed = [
        "--trainer.logger=CSVLogger",
        f"--trainer.logger.save_dir={logs}",
        "--trainer.max_steps=1",
    ]
    assert run_fit("fit", [*base, *typed, f"--out={out}"]) == 0
    assert list(logs.glob("*/version_0/hparams.yaml"))
    saved = ["--config", str(out / "config.yaml"), f"--out={tmp_path / 'again'}"]
    with pytest.raises(ValueError, match="--allow_keys save_dir"):
        run_fit("fit", saved)


def test_a_config_that_was_printed_leaves_the_next_run_alone(
    base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run_fit("fit", [*base, "--print_config"]) == 0 and "ttt_steps: 3" in capsys.readouterr().out
    )
    assert main(["fit", *base, "--print_config", "--trainer.max_steps=many"]) == 2
    short = ["--trainer.max_steps=1", "--trainer.limit_val_batches=0"]
    assert run_fit("fit", [*base, *short, f"--out={tmp_path / 'run'}"]) == 0
    assert (tmp_path / "run" / "DONE.json").exists()


def test_callbacks_are_added(base: list[str], tmp_path: Path) -> None:
    out, short = tmp_path / "run", ["--trainer.max_steps=2", "--trainer.limit_val_batches=0"]
    added = ["--trainer.callbacks+=EMA", "--trainer.callbacks.decay=0.5"]
    added += ["--trainer.callbacks+=lightning.pytorch.callbacks.LearningRateMonitor"]
    assert run_fit("fit", [*base, *short, *added, f"--out={out}"]) == 0
    # of the average
    assert "current_model_state" in torch.load(out / "checkpoints" / "last.ckpt", weights_only=True)
    metrics = (out / "csv" / "version_0" / "metrics.csv").read_text()
    assert "lr-AdamW" in metrics and "train/lr" in metrics


def test_a_run_ends_with_what_to_do_next(
    base: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The commands do it."""
    caplog.set_level("INFO", "specdec")
    out = tmp_path / "run"
    assert run_fit("fit", [*base, "--data.init_args.seq_len=64", f"--out={out}"]) == 0
    first, place, drafter, best, accepted, evaluate, export = caplog.messages[-1].splitlines()
    assert first.startswith("trained 6 steps, train/loss ") and "val/acceptance_length 1." in first
    assert place.split() == ["run", "directory", str(out)] and drafter.split() == [
        "drafter",
        str(out / "drafter"),
    ]
    assert (
        best.split() == ["best", "drafter", str(out / "drafter_best")] and "at step 6" in accepted
    )
    prompts = [
        json.loads(line) for line in (out / "validation_prompts.jsonl").read_text().splitlines()
    ]
    assert prompts[0]["prompt"].startswith("def add_0(a, b):")
    command = shlex.split(evaluate)[3:]
    assert command[0] == "evaluate"
    few = ["--limit", "2", "--max_new_tokens", "4", "--compile", "false", "--plain", "false"]
    assert (
        main([*command, *few, "--shape", "chain:depth=2", "--out", str(tmp_path / "evaluation")])
        == 0
    )
    metrics = json.loads((tmp_path / "evaluation" / "metrics.json").read_text())
    assert metrics["results"][0]["acceptance_length"]["mean"] >= 1
    command = shlex.split(export)[3:]
    assert (
        command[0] == "export" and main(command) == 0 and (out / "vllm" / "config.json").is_file()
    )
    capsys.readouterr()


def test_of_several_processes_the_first_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(name: str, level: int) -> bool:
        return _once(logging.LogRecord(name, level, "", 0, "", None, None))

    cases = [
        ("specdec.commands.fit", logging.INFO),
        ("specdec.data.rows", logging.WARNING),
        ("lightning", logging.INFO),
    ]
    # of one process, it may be
    cases += [("specdec.commands.fit", logging.ERROR), ("torch", logging.WARNING)]
    assert all(said(*case) for case in cases)
    monkeypatch.setattr("lightning.pytorch.utilities.rank_zero.rank_zero_only.rank", 1)
    assert [said(*case) for case in cases] == [False, False, False, True, True]


def test_training_learns_and_leaves_the_target_out(base: list[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert (
        run_fit(
            "fit",
            [
                *base,
                "--out",
                str(out),
                "--trainer.max_steps",
                "30",
                "--checkpoint.every_n_train_steps",
                "30",
                "--model.optimizer.init_args.lr",
                "1e-2",
                "--trainer.limit_val_batches",
                "0",
            ],
        )
        == 0
    )
    rows = [
        line.split(",")
        for line in (out / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    ]
    losses = [
        float(row[rows[0].index("train/loss_0")])
        for row in rows[1:]
        if row[rows[0].index("train/loss_0")]
    ]
    assert losses[-1] < losses[0] - 0.1
    names = torch.load(out / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert names and all(name.startswith("train_step.drafter.") for name in names)


def test_a_run_directory_is_never_overwritten(
    base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "precious").write_text("work")
    assert main(["fit", *base, "--out", str(out)]) == 2
    assert "never overwritten" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["precious"]


@pytest.mark.slow
def test_a_checkpoint_of_another_config_is_refused(
    base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    short = ["--trainer.max_steps=3", "--trainer.limit_val_batches=0"]
    assert run_fit("fit", [*base, *short, "--out", str(out)]) == 0
    checkpoint = str(out / "checkpoints" / "step-3.ckpt")
    for override, message in (
        (
            ["--model.drafter.norms.aux", "concat", "--allow_changes", "[model.drafter]"],
            "norms was",
        ),
        (["--data.init_args.seq_len", "64", "--allow_changes", "[data]"], "seq_len"),
    ):
        given = [
            *base,
            *short,
            *override,
            "--out",
            str(tmp_path / "other"),
            "--ckpt_path",
            checkpoint,
        ]
        assert main(["fit", *given]) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "not found"), (b"PK no checkpoint", "damaged"), (b"", "damaged")],
)
def test_a_checkpoint_that_cannot_be_read_is_one_line(
    base: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
    message: str,
) -> None:
    path = tmp_path / "some.ckpt"
    if content is not None:
        path.write_bytes(content)
    assert main(["fit", *base, "--out", str(tmp_path / "run"), "--ckpt_path", str(path)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert message in error and str(path) in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (["--model.drafter.hidden_size", "16"], "train_embed"),
        (["--data.seq_len", "300"], "256 positions"),
        (["--data.batch_size", "0"], "batch_size"),
        (["--trainer.max_step", "3"], "max_step"),
        (["--data.trian", "x"], "trian"),
        (["--trainer.strategy", "ddp_spawn"], "set auto, ddp, ddp_fork, fsdp2"),
        (["--trainer.strategy", "fsdp"], "set auto, ddp, ddp_fork, fsdp2"),
        (
            ["--trainer.strategy", "lightning.pytorch.strategies.ModelParallelStrategy"],
            "ModelParallelStrategy: specdec",
        ),
        (["--ckpt_path", "s3://runs/a.ckpt"], "a.ckpt: checkpoint not found"),
        (["--model.drafter.norms.output", "false"], "PostNorm"),
        (
            ["--trainer.max_steps", "-1", "--trainer.max_epochs", "-1"],
            "max_steps or trainer.max_epochs",
        ),
        (
            ["--trainer.max_steps", "-1", "--trainer.max_time", "00:00:00:01"],
            "max_time can only end it earlier",
        ),
        (["--model.drafter.aux_layers", "[1, 9]"], "boundaries 0 to 7"),
        (["--model.drafter.aux_layers", "[3, 3]"], "strictly increasing"),
        (["--model.target.source", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--data.train", "/nowhere/*.txt"], "/nowhere/"),
        (["--data", "ChatData", "--data.train", "CHAT", "--data.val", "CHAT"], "chat template"),
        (["--data.train", "BROKEN"], "line 2"),
        (["--data.train", "EMPTY"], "every file is empty"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_nothing(
    base: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    override: list[str],
    message: str,
) -> None:
    chat = json.dumps(
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    )
    files = {"CHAT": f"{chat}\n{chat}\n", "BROKEN": '{"text": "a"}\n{broken\n', "EMPTY": ""}
    for name, text in files.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    override = [str(tmp_path / f"{word}.jsonl") if word in files else word for word in override]
    out = tmp_path / "run"
    assert main(["fit", *base, *override, "--out", str(out)]) == 2
    error = capsys.readouterr().err.splitlines()
    assert message in error[-1]
    assert error[-1].startswith("specdec fit: error: ")
    assert not out.exists()


@pytest.mark.parametrize("made", [False, True])
def test_a_run_that_fails_before_its_first_step_leaves_nothing(
    base: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    made: bool,
) -> None:
    """What only the first batch finds out, when config and logs are written: its features are NaN."""
    out, whole = tmp_path / "run", OnTheFly.__call__

    def broken(self: OnTheFly, *args: Any) -> TargetOutput:
        found = whole(self, *args)
        return found._replace(aux_BTNH=found.aux_BTNH * float("nan"))

    if made:
        out.mkdir()
    quick = [
        *base,
        "--out",
        str(out),
        "--trainer.max_steps",
        "1",
        "--trainer.limit_val_batches",
        "0",
    ]
    with monkeypatch.context() as patch:
        patch.setattr(OnTheFly, "__call__", broken)
        assert main(["fit", *quick]) == 2
    assert "features are not finite" in capsys.readouterr().err.splitlines()[-1]
    assert (list(out.iterdir()) == []) if made else not out.exists()
    assert main(["fit", *quick]) == 0
    assert (out / "DONE.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_share_a_directory(base: list[str], tmp_path: Path, strategy: str) -> None:
    """Lightning runs the command once more for the second, which finds the directory taken by the first."""
    out = tmp_path / "run"
    more = {
        "trainer.devices": "2",
        "trainer.strategy": strategy,
        "trainer.max_steps": "1",
        "trainer.limit_val_batches": 0,
    }
    args = [*base, "--out", str(out), *(f"--{name}={value}" for name, value in more.items())]
    environment = {
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
        "HOME": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "specdec", "fit", *args]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (out / "DONE.json").exists() and not (out / CLAIM).exists()
    assert list(out.glob("config*")) == [out / "config.yaml"]
    for line in (
        "train: ",
        "unroll attention: ",
        "drafter: ",
        "trained 1 step, ",
        "validation reads training files",
    ):
        assert sum(found.startswith(line) for found in done.stderr.splitlines()) == 1, (
            line,
            done.stderr,
        )
    assert (out / "checkpoints" / "last.ckpt").is_file()
    assert load_drafter(out / "drafter").config.draft_vocab_size == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "status"),
    [
        (signal.SIGHUP, 129),  # which is told to Lightning as SIGTERM
        (signal.SIGTERM, 143),
        (signal.SIGINT, 130),
    ],
)
def test_an_interrupted_run_can_be_resumed(
    base: list[str], tmp_path: Path, signum: signal.Signals, status: int
) -> None:
    out = tmp_path / "run"
    long = [
        *base,
        "--out",
        str(out),
        "--trainer.max_steps",
        "100000",
        "--checkpoint.every_n_train_steps",
        "100000",
    ]
    code = "import sys; from specdec.cli import main; sys.exit(main(sys.argv[1:]))"
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", code, "fit", *long]
    with subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: signal.signal(signum, signal.SIG_DFL),  # nohup has it ignored
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step "):
                break
        time.sleep(0.5)
        process.send_signal(signum)
        rest = process.stderr.read()
        assert process.wait(timeout=200) == status, rest
    assert "Traceback" not in rest
    assert (
        f"Interrupted. To resume: specdec fit --config {out}/config.yaml --ckpt_path auto" in rest
    )
    assert not (out / "DONE.json").exists()
    saved = torch.load(out / "checkpoints" / "last.ckpt", weights_only=True)
    steps = saved["global_step"]
    assert steps > 0
    drafter = load_drafter(out / "drafter")
    assert torch.equal(
        drafter.lm_head.weight, saved["state_dict"]["train_step.drafter.lm_head.weight"]
    )
    more = [*base, "--out", str(out), "--trainer.max_steps", str(steps + 2)]
    assert run_fit("fit", [*more, "--ckpt_path", str(out / "checkpoints" / "last.ckpt")]) == 0
    assert json.loads((out / "DONE.json").read_text())["steps"] == steps + 2
    assert (out / "config.yaml").read_text() != (out / "config.1.yaml").read_text()


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_last_bit(base: list[str], tmp_path: Path) -> None:
    """SIGKILL, wherever it strikes after the first checkpoint, and ``--ckpt_path auto``."""
    args = [
        *base,
        "--trainer.max_steps=24",
        "--checkpoint.every_n_train_steps=2",
        "--trainer.limit_val_batches=0",
    ]
    whole, out = tmp_path / "whole", tmp_path / "killed"
    assert run_fit("fit", [*args, f"--out={whole}"]) == 0
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "specdec", "fit", *args, f"--out={out}"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stderr=subprocess.DEVNULL
    ) as process:
        while process.poll() is None and not list(out.glob("checkpoints/step-*.ckpt")):
            time.sleep(0.02)
        process.kill()
    assert run_fit("fit", [*args, f"--out={out}", "--ckpt_path=auto"]) == 0
    assert (out / "losses.txt").read_text() == (whole / "losses.txt").read_text()
    one, two = (load_drafter(path / "drafter").state_dict() for path in (whole, out))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
def test_a_full_disk_of_tensorboards_ends_the_run(base: list[str], tmp_path: Path) -> None:
    """Its thread dies with what it was to write; nothing hangs, and the run goes on when there is room."""
    small, out = tmp_path / "small", tmp_path / "run"
    small.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", str(small)], check=False
    ).returncode:
        pytest.skip("nobody may mount a file system here")
    try:
        args = [
            *base,
            "--trainer.limit_val_batches=0",
            "--trainer.log_every_n_steps=1",
            f"--out={out}",
        ]
        args += [
            "--trainer.logger=TensorBoardLogger",
            f"--trainer.logger.save_dir={small}",
            "--allow_keys=save_dir",
        ]
        command = [sys.executable, "-m", "specdec", "fit", *args, "--trainer.max_steps=5000"]
        ended = subprocess.run(
            command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, timeout=600, check=False
        )
        said = [line for line in ended.stderr.splitlines() if "No space left" in line]
        assert ended.returncode == 2, ended.stderr
        assert "Traceback" not in ended.stderr
        assert sorted(said) == [
            "a logger's thread cannot write: [Errno 28] No space left on device",
            f"specdec fit: error: {out}: No space left on device",
        ]
        subprocess.run(["mount", "-o", "remount,size=1m", str(small)], check=True)
        steps = torch.load(out / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] + 2
        assert main(["fit", *args, f"--trainer.max_steps={steps}", "--ckpt_path=auto"]) == 0
        assert json.loads((out / "DONE.json").read_text())["steps"] == steps > 5
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


@pytest.mark.parametrize("command", ["fit", "doctor"])
def test_an_unknown_accelerator_is_refused(
    command: str, target_directory: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [command, *short_run(target_directory, text_file), "--trainer.accelerator", "gpux"]
    assert main(argv) == 2
    assert "trainer.accelerator is 'gpux': choose from auto, cpu, " in capsys.readouterr().err
