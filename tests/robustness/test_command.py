"""``specdec robustness``, from the command line to the files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from specdec.cli import main
from specdec.evaluation.benchmark import benchmark
from specdec.evaluation.several import labelled
from specdec.robustness.command import parser
from specdec.robustness.kept import kept

CONDITIONS = ["no_template", "system:text=short", "noise_hidden:alpha=0", "noise_hidden:alpha=1", "context:tokens=9999"]


@pytest.fixture
def arguments(target_directory: Path, drafter_directory: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "p.txt").write_text("def add(a, b):\ndef add_3(\nreturn a\n")
    (tmp_path / "filler.txt").write_text("import os, sys and so on\n" * 30)
    return [
        "robustness", "--target", str(target_directory), "--drafter", str(drafter_directory), "--prompts",
        str(tmp_path / "p.txt"), "--growth", "chain:depth=2", "--max_new_tokens", "6", "--filler",
        str(tmp_path / "filler.txt"), "--conditions", *CONDITIONS,
    ]  # fmt: skip


def test_one_drafter(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main([*arguments, "--plain", "true", "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {"robustness.json", "report.md", "robustness.png"}
    found = json.loads((out / "robustness.json").read_text())
    assert found["version"] == 1 and found["clean"] == "clean"
    assert found["prompts"] == ["line-1", "line-2", "line-3"]
    by_name = {one["name"]: one for one in found["conditions"]}
    assert list(by_name) == ["clean", *CONDITIONS]
    for one in found["conditions"]:
        assert len(one["committed"]) == len(one["passes"]) == 3
        if one["skipped"] is None:
            assert all(c >= p > 0 for c, p in zip(one["committed"], one["passes"], strict=True))
            assert one["identical_outputs"] == one["compared_outputs"] == 3
        else:
            assert one["committed"] == one["passes"] == [0, 0, 0] and one["length_kept"] is None
    assert by_name["no_template"]["skipped"] == "no prompt is written by a chat template"
    assert by_name["context:tokens=9999"]["skipped"] == "the target has 256 positions"
    assert by_name["noise_hidden:alpha=0"]["committed"] == by_name["clean"]["committed"]
    counts = [
        dict(zip(found["prompts"], zip(one["committed"], one["passes"], strict=True), strict=True))
        for one in (by_name["system:text=short"], by_name["clean"])
    ]
    again = kept(counts[0], counts[1])
    assert again.length_kept is not None
    assert by_name["system:text=short"]["length_kept"] == again.length_kept._asdict()
    assert [one["name"] for one in found["means"]] == ["noise on the drafter's input", "all conditions"]
    assert found["drafter"]["made_for_this_target"] is True and len(found["drafter"]["weights_sha256"]) == 64
    assert found["settings"]["growth"] == "chain of 2" and found["provenance"]["command"].startswith("specdec robust")
    report = (out / "report.md").read_text()
    assert "| no template | no prompt is written by a chat template |" in report
    assert "| system prompt: short |" in report and "raw text: put in front" in report
    assert "3 of 3 outputs identical" in report and "too narrow" in report
    shown = capsys.readouterr().out
    assert "hidden + 1 RMS" in shown and "not measured: 9,999 tokens of context" in shown
    assert main([*arguments, "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_drafters_side_by_side(arguments: list[str], drafter_directory: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(drafter_directory, other)
    out = tmp_path / "out"
    at = arguments.index("--prompts")
    assert main([*arguments[:at], str(other), *arguments[at:], "--out", str(out)]) == 0
    names = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    expected = {"report.md", "robustness.png", "comparison.json", "drafter/robustness.json", "other/robustness.json"}
    assert names == expected
    one, two = (json.loads((out / name / "robustness.json").read_text()) for name in ("drafter", "other"))
    assert one["conditions"] == two["conditions"]
    compared = json.loads((out / "comparison.json").read_text())
    (apart,) = compared["differences"]
    assert (apart["drafter"], apart["less"]) == ("other", "drafter")
    assert [row["name"] for row in apart["conditions"]] == [CONDITIONS[1], CONDITIONS[2], CONDITIONS[3]]
    assert all(row["length_kept"]["mean"] == 0 for row in [*apart["conditions"], *apart["means"]])
    assert "other - drafter: AL kept" in (out / "report.md").read_text()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--conditions", "dark"], "expected one of no_bos"),
        (["--growth", "bush"], "growth"),
        (["--batch_size", "0"], "batch_size"),
        (["--seed", "-1"], "seed"),
        (["--labels", "a", "b"], "2 names for 1 drafters"),
        (["--filler", "nowhere.txt"], "nowhere.txt"),
        (["--max_new_tokens", "999"], "positions"),
        (["--system", "Be brief."], "raw text takes no system prompt"),
    ],
)
def test_wrong_input_leaves_nothing(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], message: str
) -> None:
    before = set(tmp_path.rglob("*"))
    assert main([*arguments, *extra, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
    assert set(tmp_path.rglob("*")) == before


def test_an_interrupted_run_goes_on(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def counting(*args: Any, **how: Any) -> Any:
        asked.append(len(asked))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return benchmark(*args, **how)

    monkeypatch.setattr("specdec.robustness.run.benchmark", counting)
    before = set(tmp_path.iterdir())
    out = tmp_path / "out"
    assert main([*arguments, "--out", str(out)]) == 130
    assert set(tmp_path.iterdir()) - before == {tmp_path / "out.partial"}
    assert len(list((tmp_path / "out.partial").iterdir())) == 2 and f"--out {out} goes on" in caplog.text
    assert main([*arguments, "--batch_size", "1", "--out", str(out)]) == 0
    assert len(asked) == 5 and set(tmp_path.iterdir()) - before == {out}  # two of four conditions were there
    assert main([*arguments, "--out", str(tmp_path / "whole")]) == 0
    found = [json.loads((folder / "robustness.json").read_text()) for folder in (out, tmp_path / "whole")]
    assert found[0]["conditions"] == found[1]["conditions"] and found[0]["means"] == found[1]["means"]


def test_names_of_drafters(tmp_path: Path) -> None:
    assert labelled(["runs/a/drafter", "runs/b/drafter"], []) == ["a-drafter", "b-drafter"]
    assert labelled(["x/one", "x/two"], []) == ["one", "two"]
    assert labelled(["x/one", "x/two"], ["EAGLE-3", "EAGLE-3.1"]) == ["EAGLE-3", "EAGLE-3.1"]
    for labels in (["a", "a"], ["a"], ["a", "b/c"], ["..", "b"]):
        with pytest.raises(ValueError, match="--labels"):
            labelled(["x/one", "x/two"], labels)
    with pytest.raises(ValueError, match="given twice"):
        labelled(["x", "./x"], [])


def test_a_planner_can_read_the_arguments() -> None:
    args = parser().parse_args(["--drafter", "d", "--prompts", "p", "--conditions", "no_bos", "context:tokens=64"])
    assert args.conditions == ["no_bos", "context:tokens=64"] and args.growth == "chain:depth=5"
    assert args.batch_size == 8 and args.limit is None and args.max_new_tokens == 128
