"""Another tokenizer, or another chat template, is another target for whoever measures, exports or imports a drafter."""

import json
import shutil
from pathlib import Path

import pytest

from specdec.cli import main


@pytest.fixture
def other(target_directory: Path, tmp_path: Path) -> Path:
    """The same model, whose tokenizer has exchanged two words."""
    copy = Path(shutil.copytree(target_directory, tmp_path / "other"))
    text = (copy / "tokenizer.json").read_text()
    swapped = text.replace('"a":', '"?":').replace('"b":', '"a":').replace('"?":', '"b":')
    (copy / "tokenizer.json").write_text(swapped)
    return copy


def evaluate(target: Path, drafter: Path, out: Path, *more: str) -> int:
    """The exit status of a small evaluation."""
    prompts = out.with_suffix(".txt")
    prompts.write_text("def add_3(a, b):\ndef add_4(a, b):\n")
    argv = [
        "evaluate",
        "--target",
        str(target),
        "--drafter",
        str(drafter),
        "--prompts",
        str(prompts),
    ]
    small = [
        "--max_new_tokens",
        "4",
        "--shape",
        "chain:depth=2",
        "--plain",
        "false",
        "--compile",
        "false",
    ]
    return main([*argv, *small, "--out", str(out), *more])


def test_evaluate_and_compare(
    target_directory: Path,
    other: Path,
    drafter_directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    assert evaluate(target_directory, drafter_directory, mine) == 0
    assert evaluate(other, drafter_directory, theirs) == 2
    assert "the tokenizer or chat template of" in capsys.readouterr().err
    assert evaluate(other, drafter_directory, theirs, "--other_target", "true") == 0
    assert not json.loads((theirs / "metrics.json").read_text())["drafter"]["made_for_this_target"]
    assert main(["compare", str(mine), str(theirs)]) == 2
    assert "differ in their target's tokenizer or chat template" in capsys.readouterr().err


def test_compare_knows_the_tokens_that_end_a_text(
    target_directory: Path,
    drafter_directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = Path(shutil.copytree(target_directory, tmp_path / "copy"))
    generation = json.loads((copy / "generation_config.json").read_text())
    (copy / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [1, 9]}))
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for target, out in ((target_directory, mine), (copy, theirs)):
        assert evaluate(target, drafter_directory, out) == 0
    assert main(["compare", str(mine), str(theirs)]) == 2
    assert "differ in eos_token_ids: [1] and [1, 9]" in capsys.readouterr().err


def test_export_and_import(
    target_directory: Path,
    other: Path,
    drafter_directory: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    exported = tmp_path / "exported"
    argv = ["export", "--drafter", str(drafter_directory)]
    assert main([*argv, "--target", str(other), "--out", str(tmp_path / "wrong")]) == 0
    told = "of the same shape: its tokenizer or chat template differs"
    assert told in caplog.text
    assert main([*argv, "--target", str(target_directory), "--out", str(exported)]) == 0
    caplog.clear()
    imported = ["import", "--checkpoint", str(exported), "--target"]
    assert main([*imported, str(target_directory), "--out", str(tmp_path / "same")]) == 0
    assert told not in caplog.text
    assert main([*imported, str(other), "--out", str(tmp_path / "others")]) == 0
    assert told in caplog.text
