"""``specdec drift`` from its arguments to its files."""

import json
import shutil
from pathlib import Path

import pytest

from specdec.cli import main
from specdec.diagnostics import waterfall
from specdec.diagnostics.anchors import answered_texts
from specdec.diagnostics.drift import depth_of_training
from specdec.diagnostics.drift_measure import VERSION
from specdec.diagnostics.drift_plots import CAPTIONS
from specdec.diagnostics.waterfall import DOWN
from specdec.evaluation.config import load_pair
from specdec.evaluation.metrics import read_answers
from specdec.report.plots import figure_files
from specdec.target import TargetSource
from specdec.utils.reading import SUMS

LINES = ["def add_3(a, b):", "    return a + b", "def add_4("]


@pytest.fixture
def line(target_directory: Path, drafter_directory: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "prompts.txt").write_text("\n".join(LINES))
    prompts = [
        "--prompts",
        str(tmp_path / "prompts.txt"),
        "--max_new_tokens",
        "10",
        "--depths",
        "3",
    ]
    return [
        "drift",
        "--target",
        str(target_directory),
        "--drafter",
        str(drafter_directory),
        *prompts,
    ]


def test_the_drift_command(
    line: list[str],
    target_directory: Path,
    drafter_directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (drafter_directory.parent / "config.yaml").write_text("model: {ttt_steps: 2}\n")
    (drafter_directory.parent / "provenance.json").write_text("{}")
    out = tmp_path / "out"
    out.mkdir()
    assert main([*line, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "before the norm, step 3 over step 1" in said
    figures = {file for name in CAPTIONS for file in figure_files(name)}
    assert {path.name for path in out.iterdir()} == {"drift.json", "report.md", *figures, SUMS}
    found = json.loads((out / "drift.json").read_text())
    assert (found["trained_depth"], found["depths"], found["version"]) == (2, 3, VERSION)
    assert found["prompts"] == ["line-1", "line-2", "line-3"] and found["skipped"] == []
    assert found["drafter"]["label"] == "drafter" and found["drafter"]["made_for_this_target"]
    assert found["settings"]["depths"] == 3 and "specdec drift" in found["provenance"]["command"]
    model, one, *_ = load_pair(TargetSource(str(target_directory)), drafter_directory)
    asked = [
        (name, model.tokenizer.encode(text))
        for name, text in zip(found["prompts"], LINES, strict=True)
    ]
    for number, text in enumerate(
        waterfall.measure_levels(model, one, answered_texts(model, asked, 13), 10, 3)[1]
    ):
        every_series = [*found["series"].values(), *found["rows"].values()]
        for row, series in zip(text.sums_FK2, every_series, strict=True):
            own = [float(total / weight) if weight else None for total, weight in row]
            assert [values[number] for values in series["values"]] == own
    assert main([*line, "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results have no picture."""
    monkeypatch.setattr("specdec.diagnostics.drift.plot_drift", lambda drifts, names, folder: None)


@pytest.mark.usefixtures("undrawn")
def test_several_drafters_come_in_one_result(line: list[str], tmp_path: Path) -> None:
    drafters = [Path(line[line.index("--drafter") + 1]), tmp_path / "other" / "drafter"]
    shutil.copytree(*drafters)
    line.insert(line.index("--drafter") + 2, str(drafters[1]))
    out = tmp_path / "out"
    assert main([*line, "--limit", "2", "--out", str(out)]) == 0
    found = json.loads((out / "drift.json").read_text())
    (other,) = found["beside"]
    assert [one["drafter"]["directory"] for one in (found, other)] == list(map(str, drafters))
    for key in ("series", "inputs", "waterfall", "summary", "prompts", "calibration"):
        assert found[key] == other[key]
    assert (out / "report.md").read_text().count(f"## {drafters[1]}: ") == 6


@pytest.mark.usefixtures("undrawn")
def test_bars_are_what_evaluate_measures_and_fail_where_they_are_not(
    line: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, evaluated, some = (
        tmp_path / "out",
        tmp_path / "evaluated",
        [word for word in line[1:] if word != "--depths"],
    )
    some.remove("3")
    assert main([*line, "--out", str(out)]) == 0
    found = json.loads((out / "drift.json").read_text())["waterfall"]
    assert found["prompts"] == ["line-1", "line-2", "line-3"] and found["check"]["holds"]
    assert [level["name"] for level in found["levels"]] == [*DOWN, "observed"]
    assert "The bars add up: 4.000" in " ".join(capsys.readouterr().out.split())
    arguments = [
        "--shape",
        "chain:depth=3",
        "--plain",
        "false",
        "--compile",
        "false",
        "--out",
        str(evaluated),
    ]
    assert main(["evaluate", *some, *arguments]) == 0
    (answers,) = read_answers(evaluated / "answers.jsonl", 1)
    for level in found["levels"][-2:]:
        assert level["passes"] == [len(answer.accepted) for answer in answers]
        assert level["committed"] == [
            sum(answer.accepted) + len(answer.accepted) for answer in answers
        ]
    monkeypatch.setattr(waterfall, "observed_passes", lambda *args: [[2] * 5 for _ in args[2]])
    assert main([*line, "--limit", "1", "--out", str(tmp_path / "other")]) == 1
    assert "THE BARS DO NOT ADD UP" in capsys.readouterr().out
    assert "THE BARS DO NOT ADD UP" in (tmp_path / "other" / "report.md").read_text()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--depths", "10"], "depths is 10: it must be below max_new_tokens, 10"),
        (["--depths", "0"], "--depths must be at least 1, not 0"),
        (["--max_new_tokens", "300"], "303 new ones exceed"),
        (["--trained_depth", "0"], "trained_depth must be at least 1"),
        (["--limit", "0"], "--limit must be at least 1, not 0"),
        (["--colour", "red"], "colour"),
        (["--drafter", "a/a", "a/a"], "drafter names 2 drafters: give one or more, each once"),
    ],
)
def test_wrong_input_leaves_nothing(
    line: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    extra: list[str],
    message: str,
) -> None:
    out = tmp_path / "out"
    assert main([*line, "--out", str(out), *extra]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not out.exists() and not list(tmp_path.glob(".tmp-*"))


def test_the_run_says_how_deep_it_trained(tmp_path: Path) -> None:
    def write(name: str, steps: object) -> None:
        (tmp_path / name).write_text(f"model: {{ttt_steps: {steps}}}\n")

    place = tmp_path / "drafter"
    place.mkdir()
    write("config.yaml", 5)
    assert depth_of_training(place, None) is None and depth_of_training(place, 3) == 3  # no run's
    (tmp_path / "provenance.json").write_text("{}")
    assert depth_of_training(place, None) == 5 == depth_of_training(place, 5)
    for times in (2, 10):
        write(f"config.{times}.yaml", times)
    assert depth_of_training(place, None) == 10  # the last that went on with it
    write("config.11.yaml", "many")
    assert depth_of_training(place, None) is None
