"""``specdec parity`` from the command line."""

import json
from pathlib import Path

import pytest

from specdec.cli import main
from tests.diagnostics.parity_made import edit


def test_a_drafter_is_exported_and_compared(
    line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*line, "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert "training and export" in told and "0 to 2" in told and "DIFFERENT" not in told
    assert told.splitlines()[-1] == (
        "PASS: training, decoding and the exported files agree; no engine was run"
    )
    report = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert report["holds"] and report["export_not_compared"] is None
    assert (report["method"], report["dtype"], report["texts"]) == ("eagle3", "float32", 3)
    assert len(report["rows"]) == 2 * 2 * 3
    row = report["rows"][-1]
    assert (row["pair"], row["place"], row["depth"]) == ("training and export", "packed", 2)
    assert row["equal"] and row["verdict"] == "equal" and 0 < row["share"] < row["allowed"] == 1e-4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter", "out", "served"]
    assert main([*line, "--out", str(tmp_path / "out")]) == 2
    assert "out exists already" in capsys.readouterr().err


def test_a_directory_that_is_given(
    line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served, prompts = tmp_path / "served", tmp_path / "p.txt"
    prompts.write_text("def add(a, b):\n")
    line += ["--exported", str(served), "--prompts", str(prompts), "--target.dtype", "float64"]
    assert main(line) == 0
    assert "log-probabilities in float64" in capsys.readouterr().out
    edit(served, lambda raw: raw.update(norm_output=False), None)
    assert main([*line, "--out", str(tmp_path / "out")]) == 1
    told = capsys.readouterr().out
    assert "DIFFERENT: what the step before handed on" in told and told.splitlines()[-1].startswith(
        "NOT THE SAME"
    )
    report = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert not report["holds"] and report["texts"] == 1
    edit(served, None, lambda w: w.pop("norm.weight"))
    assert main(line) == 1
    told = capsys.readouterr().out
    assert (
        "the export was not compared" in told
        and "lacks norm.weight" in told
        and "NOT SERVED" in told
    )


def test_tokens_that_no_number_tells_apart(line: list[str], tmp_path: Path) -> None:
    """An infinite difference is null: JSON has no other word for it."""

    def move(w: dict) -> None:
        taken = {int(offset) + draft for draft, offset in enumerate(w["d2t"])}
        w["d2t"][0] = min(set(range(300)) - taken)

    edit(tmp_path / "served", None, move)
    assert (
        main([*line, "--exported", str(tmp_path / "served"), "--out", str(tmp_path / "out")]) == 1
    )
    rows = json.loads((tmp_path / "out" / "parity.json").read_text())["rows"]
    assert {row["gap"] for row in rows if row["pair"] == "training and export"} == {None}


def test_mistakes_are_one_line(
    line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more, message in (
        (["--exported", str(tmp_path / "nowhere")], "nowhere: no such file or directory"),
        (["--depth", "6"], "max_new_tokens is 8: depth 6 needs at least 9"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--max_new_tokens", "4000"], "exceed the target's"),
        (["--drafter", "nowhere"], "no such drafter directory"),
        (["--limit", "0"], "--limit must be at least 1, not 0"),
        (["--colour", "red"], "colour"),
    ):
        assert main([*line, *more]) == 2
        error = capsys.readouterr().err
        assert message in error.splitlines()[-1]


def test_an_export_for_another_engine_is_refused(
    line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("xllamacpp")
    (tmp_path / "target.gguf").touch()
    engine = ["--engine", "llama.cpp", "--target_gguf", str(tmp_path / "target.gguf")]
    line = [*line, "--target.dtype", "float32", "--exported", str(tmp_path / "served")]
    assert main([*line, *engine]) == 2
    assert (
        "exported for another engine: export it again with --format gguf" in capsys.readouterr().err
    )
