"""The command's front door."""

import contextlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.cli import COMMANDS, StderrLines, main
from specdec.commands import known
from specdec.commands.spelling import check_spelling


def test_help_names_every_command_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from specdec.cli import main; status = main(['--help']); "
        "heavy = {'torch', 'lightning', 'transformers', 'jsonargparse', 'numpy'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)


def test_a_command_says_at_once_what_it_waits_for() -> None:
    """Before anything heavy is imported, on standard error, and by one process of a job alone."""
    code = (
        "import os, sys, specdec.cli as cli\n"
        "cli.run_command = lambda *of: print('ran', 'torch' in sys.modules) or 0\n"
        "cli.main(['quickstart']); os.environ['LOCAL_RANK'] = '1'; cli.main(['quickstart'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "ran False\n" * 2
    assert done.stderr == "specdec quickstart: loading torch, lightning and transformers\n"


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fly"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: specdec" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["evaluate", "--drafter", "nowhere", "--prompts", "x.jsonl"], "nowhere: no such drafter"),
        (["evaluate", "--drafter", "x", "--prompts", "y", "--colour", "red"], "colour"),
        (["evaluate", "--drafter", "x", "--prompts", "y", "--shape", "bush"], "shape 'bush'"),
        (["evaluate", "--prompts", "y"], "drafter"),
        (["fit", "--model.colour", "red"], "colour"),
        (["fit", "--model.ttt_steps", "many"], "ttt_steps"),
        (["fit", "--config", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["fit", "--model.drafter.fusion", "Blend"], "Blend"),
        (["fit", "--model.ttt_steps", "0"], "at least 1"),
        (["quickstart", "--speed", "9"], "speed"),
        (["compare", "nowhere", "nowhere"], "nowhere: no such file"),
        (["fit", "--allow_imports", "nowhere.at_all"], "cannot be imported"),
        (["evaluate", "--allow_imports"], "needs a module's name"),
        (["fit", "--model.loss", "os.system"], "os.system (model.loss) was not imported"),
    ],
)
def test_wrong_input_is_one_clear_line(
    argv: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["specdec"])
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert "Traceback" not in error


def test_a_terminal_obeys_neither_errors_nor_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "\x1b]0;title\x07no\x1b[2Jwhere", "b"]) == 2
    StderrLines().handle(
        logging.LogRecord("specdec", logging.INFO, "", 0, "one\n%s", ("t\x1b[1Awo\r",), None)
    )
    error = capsys.readouterr().err
    assert "\x1b" not in error and "\r" not in error
    assert "nowhere: no such file" in error and error.endswith("one\ntwo\n")


def test_what_a_logger_passes_on_is_not_judged(tmp_path: Path) -> None:
    """``WandbLogger`` hands further arguments to wandb, which is not here; a saved config has them."""
    path = tmp_path / "a.yaml"
    for logger, wrong in (("WandbLogger", False), ("CSVLogger", True)):
        part = {
            "class_path": f"lightning.pytorch.loggers.{logger}",
            "init_args": {"save_dir": ".", "entity": None},
        }
        path.write_text(json.dumps({"trainer": {"logger": [part]}}))
        with (
            pytest.raises(ValueError, match="has no argument entity")
            if wrong
            else contextlib.nullcontext()
        ):
            check_spelling(
                ["fit"],
                ["--config", str(path)],
                False,
            )


def _into_a_closed_pipe(*args: str) -> subprocess.CompletedProcess[str]:
    """A command whose standard output nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [sys.executable, "-m", "specdec", *args],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writer)


@pytest.mark.parametrize("args", [("--help",), ("fit", "--help"), ("--version",)])
def test_a_reader_that_has_gone_is_no_fault(args: tuple[str, ...]) -> None:
    done = _into_a_closed_pipe(*args)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("place", ["checkout", "elsewhere", "gone"])
def test_what_a_command_starts_imports_nothing_of_the_working_folder(
    place: str, tmp_path: Path
) -> None:
    """Unless specdec is found there alone; ``-P`` puts the checkout of $PYTHONPATH where a script's folder stands."""
    root = Path(__file__).parents[1]
    code = "import os; from specdec.cli import main; main(['presets']); print(os.environ.get('PYTHONSAFEPATH'))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    (tmp_path / "folder").mkdir()
    leave = 'cd "$0" && rmdir "$0" &&' if place == "gone" else 'cd "$0" &&'
    folder = root if place == "checkout" else tmp_path / "folder"
    done = subprocess.run(
        ["sh", "-c", f'{leave} exec "$@"', str(folder), sys.executable, "-P", "-c", code],
        env=environment | {"PYTHONPATH": str(root)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == ("None" if place == "checkout" else "1")


def test_a_full_disk_under_the_log_ends_nothing(tmp_path: Path) -> None:
    """Results on standard output are another matter: what is lost there is an error."""
    out = tmp_path / "presets"
    argv = [sys.executable, "-m", "specdec", "cp", "drafter/eagle3", "--to", str(out / "a.yaml")]
    out.mkdir()
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(argv, stderr=full, timeout=60, check=False)
        assert done.returncode == 0 and (out / "a.yaml").exists()
        wrong = [*argv[:3], "evaluate", "--drafter", "nowhere"]
        assert subprocess.run(wrong, stderr=full, timeout=60, check=False).returncode == 2
        listed = [*argv[:3], "presets"]
        lost = subprocess.run(
            listed, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert lost.returncode != 0 and "No space left on device" in lost.stderr


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"commands": {}, "parts": {}, "classes": {}, "versions": {}}']
)
@pytest.mark.parametrize(
    "args", [("fit", "--help"), ("evaluate", "--help"), ("evaluate", "--drafter", "x"), ("cp", "x")]
)
def test_a_damaged_help_file_is_named(
    content: str,
    args: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "help.json"
    file.write_text(content)
    monkeypatch.setattr(known, "HELP", file)
    known.index.cache_clear()
    try:
        assert main(list(args)) == 2
    finally:
        known.index.cache_clear()
    (line,) = capsys.readouterr().err.splitlines()
    assert str(file) in line


@pytest.mark.parametrize("command", ["fit", "evaluate", "cache", "regenerate"])
def test_a_path_of_too_many_folders_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path) + "/d" * 1000
    assert main([command, "--out", out]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--out: more than 200 folders" in line or "needs --" in line
    assert not (tmp_path / "d").exists()
