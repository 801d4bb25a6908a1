"""What decides a run's numbers is compared when it is resumed, used and counted: data, target, drafters and code."""

import json
import shutil
from pathlib import Path

import pytest

from specdec.cli import main
from specdec.drafter import load_drafter
from specdec.export.card import trained
from specdec.training.run_directory import run_key
from specdec.utils.machine import files_of_code
from tests.short_run import short_run


@pytest.fixture
def argv(target_directory: Path, text_file: Path, tmp_path: Path) -> list[str]:
    """A run of some steps with validation data of its own, which decodes."""
    validation = tmp_path / "val.txt"
    validation.write_text(text_file.read_text()[:900])
    target = Path(shutil.copytree(target_directory, tmp_path / "target"))
    more = {
        "trainer__max_steps": 4,
        "trainer__val_check_interval": 2,
        "trainer__log_every_n_steps": 1,
        "checkpoint__every_n_train_steps": 2,
    }
    decoded = {"acceptance__count": 2, "acceptance__max_new_tokens": 4, "acceptance__share": 1}
    return ["fit", *short_run(target, text_file, **(more | decoded | {"data__val": validation}))]


def resumed(argv: list[str], out: Path) -> int:
    """The exit status of the run made longer."""
    return main([*argv, "--out", str(out), "--ckpt_path", "auto", "--trainer.max_steps", "6"])


@pytest.mark.slow
def test_edited_validation_data_ends_a_resumed_run(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main([*argv, "--out", str(out)]) == 0
    validation = tmp_path / "val.txt"
    text = validation.read_text()
    validation.write_text(text.replace("add_3", "sub_3"))
    assert resumed(argv, out) == 2
    assert "the rows of validation are not those of the checkpoint" in capsys.readouterr().err
    validation.write_text(text)
    assert resumed(argv, out) == 0


def test_another_chat_template_ends_a_resumed_run(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main([*argv, "--out", str(out)]) == 0
    (tmp_path / "target" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert resumed(argv, out) == 2
    assert "belongs to another drafter" in capsys.readouterr().err


@pytest.mark.slow
def test_a_drafter_of_another_run_is_refused_in_this_one(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, other = tmp_path / "ours", tmp_path / "other"
    assert main([*argv, "--out", str(ours)]) == 0
    assert main([*argv, "--out", str(other), "--model.optimizer.lr", "0.01"]) == 0
    for name in ("drafter", "drafter_best"):
        load_drafter(ours / name)
        shutil.rmtree(ours / name)
        shutil.copytree(other / name, ours / name)
        for use in (load_drafter, trained):
            with pytest.raises(
                ValueError, match=f"ours/{name}: not the drafter that the run in .*ours trained"
            ):
                use(ours / name)
    assert resumed(argv, ours) == 2
    assert "a new best one is chosen from here on" in capsys.readouterr().err
    shutil.rmtree(ours / "drafter_best")
    assert resumed(argv, ours) == 0
    records = [
        json.loads((ours / name).read_text())["run"]
        for name in ("provenance.json", "provenance.1.json")
    ]
    assert records[0] == records[1] and load_drafter(ours / "drafter")


def test_a_run_is_known_by_what_decides_its_numbers() -> None:
    config = "out: a\nmodel: {optimizer: {lr: 1}}\ntrainer: {max_steps: 3, logger: {a: 1}}\n"
    first = run_key(config, ["1", "2"], {"fingerprint": "f"})
    assert first == run_key(config.replace("out: a", "out: b"), ["1", "2"], {"fingerprint": "f"})
    others = {
        run_key(config.replace("lr: 1", "lr: 2"), ["1", "2"], {"fingerprint": "f"}),
        run_key(config, ["1", "3"], {"fingerprint": "f"}),
        run_key(config, ["1", "2"], {"fingerprint": "g"}),
        run_key(config, ["1", "2"], {"fingerprint": "f", "tokenizer": "t"}),
    }
    assert len(others | {first}) == 5


def test_two_changes_of_a_checkout_are_two_codes(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    file = tmp_path / "parts" / "losses.py"
    digests = set()
    for text in ("SCALE = 1\n", "SCALE = 2\n", "SCALE = 3\n"):
        file.write_text(text)
        digests.add(files_of_code(tmp_path))
    (tmp_path / "notes.md").write_text("no code")
    assert len(digests) == 3 and files_of_code(tmp_path) in digests
