"""``specdec tune``, from the command line to the files."""

import json
from pathlib import Path

import matplotlib.image
import pytest

from specdec.cli import main
from specdec.decoding import parse_growth
from specdec.evaluation.tuning import costs
from specdec.evaluation.tuning.shape import Shape
from specdec.target import Target


@pytest.fixture
def arguments(
    target_directory: Path, drafter_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    monkeypatch.setattr(costs, "EAGER", (Shape(1, 1, 1), Shape(1, 3, 3), Shape(4, 2, 11)))
    (tmp_path / "p.txt").write_text("def add(a, b):\ndef add_3(\n")
    return [
        "tune", "--target", str(target_directory), "--drafter", str(drafter_directory),
        "--prompts", str(tmp_path / "p.txt"), "--max_new_tokens", "6", "--batch_sizes", "2", "1", "--repeats", "1",
        "--compile", "off",
        "--out", str(tmp_path / "out"),
    ]  # fmt: skip


def test_it_recommends_checks_and_writes(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.txt").write_text(f"def add(a, b):\ndef add_3(\n{'def ' * 300}\n")
    assert main(arguments) == 0
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {"tune.json", "report.md", "tune.png"}
    found = json.loads((out / "tune.json").read_text())
    assert [batch["batch"] for batch in found["batches"]] == [1, 2]
    for batch in found["batches"]:
        best, trial = batch["predictions"][0], batch["trial"]
        assert best["speedup"] == pytest.approx(
            best["acceptance_length"] / (best["verify"] + best["drafting"] + best["rest"])
        )
        assert trial["growth"] == best["growth"] and trial["predicted"] == best["speedup"]
        assert trial["error_percent"] == pytest.approx(100 * (trial["predicted"] / trial["measured"] - 1))
        assert batch["recommended"] == (best["growth"] if best["speedup"] > 1 else None)
        assert parse_growth(best["growth"]).nodes_drafted == best["nodes"]
    replayed = {one["growth"]: one["acceptance_length"] for one in found["profile"]}
    predictions = found["batches"][0]["predictions"]
    assert {one["growth"]: one["acceptance_length"] for one in predictions} == replayed  # no other width is drafted
    assert found["settings"]["prompts_used"] == 2 and "positions" in found["skipped"][0]["reason"]
    report = (out / "report.md").read_text()
    assert "](tune.png)" in report and "line-3" in report and "Break-even batch: " in report
    assert matplotlib.image.imread(out / "tune.png").shape[:2] == (600, 1440)
    told = capsys.readouterr().out
    assert "Break-even batch: " in told and "Predicted speed-up" in told
    before = (out / "tune.json").read_bytes()
    assert main(arguments) == 2
    assert "exists already" in capsys.readouterr().err and (out / "tune.json").read_bytes() == before


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--batch_sizes", "4", "0"], "batch_sizes must be numbers from 1 up, not [4, 0]"),
        (["--max_new_tokens", "1"], "max_new_tokens must be at least 2"),
        (["--max_new_tokens", "999"], "none of 2 can be decoded"),
        (["--repeats", "0"], "repeats must be at least 1"),
        (["--limit", "0"], "limit"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--drafter", "nowhere"], "nowhere"),
        (["--compile", "perhaps"], "compile"),
        (["--out", "/dev/null/x"], "/dev/null/x"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_nothing(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], message: str
) -> None:
    assert main([*arguments, *extra]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"drafter", "p.txt"}


def test_answers_that_end_at_once_are_refused(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "eos_token_ids", frozenset(range(400)))
    assert main(arguments) == 2
    assert "no pass to tune for" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_plain_decoding_is_recommended_where_nothing_is_faster(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fit = costs.fit_costs
    monkeypatch.setattr(costs, "fit_costs", lambda *args: fit(*args)._replace(rest=99.0))
    assert main([*arguments, "--batch_sizes", "2"]) == 0
    told = capsys.readouterr().out
    assert "Batch size 2: plain decoding" in told and "Break-even batch: 2 (measured)" in told
    found = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert {batch["recommended"] for batch in found["batches"]} == {None}
