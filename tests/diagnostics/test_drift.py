"""``specdec drift`` from its arguments to its files, and drift measured while a drafter is trained."""

import csv
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec.cli import main
from specdec.data import TextData
from specdec.diagnostics import waterfall
from specdec.diagnostics.anchors import answered_texts
from specdec.diagnostics.drift import AttentionDrift, depth_of_training
from specdec.diagnostics.drift_measure import document, measure, summary
from specdec.diagnostics.waterfall import DOWN
from specdec.drafter import load
from specdec.evaluation.answers import read_answers
from specdec.evaluation.callback import document_prompts
from specdec.evaluation.config import load_pair
from specdec.fit import run
from specdec.target import Target, TargetSource
from tests.diagnostics.made import PROMPTS, drafter, target
from tests.short_run import short_run

LINES = ["def add_3(a, b):", "    return a + b", "def add_4("]
CALLBACK = {"max_new_tokens": 12, "count": 3, "depths": 4}


@pytest.fixture
def line(target_directory: Path, drafter_directory: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "prompts.txt").write_text("\n".join(LINES))
    prompts = ["--prompts", str(tmp_path / "prompts.txt"), "--max_new_tokens", "16", "--depths", "3"]
    return ["drift", "--target", str(target_directory), "--drafter", str(drafter_directory), *prompts]


def test_the_command(
    line: list[str], target_directory: Path, drafter_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (drafter_directory.parent / "config.yaml").write_text("model: {ttt_steps: 2}\n")
    (drafter_directory.parent / "provenance.json").write_text("{}")
    out = tmp_path / "out"
    out.mkdir()
    assert main([*line, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "RMS of the state, step 3 over step 1" in said
    assert {path.name for path in out.iterdir()} == {"drift.json", "report.md", "drift.png"}
    found = json.loads((out / "drift.json").read_text())
    assert (found["trained_depth"], found["depths"], found["version"]) == (2, 3, 1)
    assert found["prompts"] == ["line-1", "line-2", "line-3"] and found["skipped"] == []
    assert found["drafter"]["label"] == "drafter" and found["drafter"]["made_for_this_target"]
    assert found["settings"]["depths"] == 3 and "specdec drift" in found["provenance"]["command"]
    model, one, _ = load_pair(TargetSource(str(target_directory)), drafter_directory)
    asked = [(name, model.tokenizer.encode(text)) for name, text in zip(found["prompts"], LINES, strict=True)]
    for number, text in enumerate(waterfall.measure_levels(model, one, asked, 16, 3)[1]):
        for row, series in zip(text.sums_FK2, found["series"].values(), strict=True):
            own = [float(total / weight) if weight else None for total, weight in row]
            assert [values[number] for values in series["values"]] == own
    assert main([*line, "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_bars_are_what_evaluate_measures_and_fail_where_they_are_not(
    line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, evaluated, some = tmp_path / "out", tmp_path / "evaluated", [word for word in line[1:] if word != "--depths"]
    some.remove("3")
    assert main([*line, "--out", str(out)]) == 0
    found = json.loads((out / "drift.json").read_text())["waterfall"]
    assert found["prompts"] == ["line-1", "line-2", "line-3"] and found["check"]["holds"]
    assert [level["name"] for level in found["levels"]] == [*DOWN, "observed"]
    assert "The bars add up: 4.000" in " ".join(capsys.readouterr().out.split())
    arguments = ["--shape", "chain:depth=3", "--plain", "false", "--compile", "false", "--out", str(evaluated)]
    assert main(["evaluate", *some, *arguments]) == 0
    (answers,) = read_answers(evaluated / "answers.jsonl", 1)
    for level in found["levels"][-2:]:
        assert level["passes"] == [len(answer.accepted) for answer in answers]
        assert level["committed"] == [sum(answer.accepted) + len(answer.accepted) for answer in answers]
    monkeypatch.setattr(waterfall, "observed", lambda *args: [[2] * 5 for _ in args[2]])
    assert main([*line, "--out", str(tmp_path / "other")]) == 1
    assert "THE BARS DO NOT ADD UP" in capsys.readouterr().out
    assert "THE BARS DO NOT ADD UP" in (tmp_path / "other" / "report.md").read_text()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--depths", "16"], "depths is 16, max_new_tokens 16: depths must be from 1 to below"),
        (["--depths", "0"], "depths is 0"),
        (["--max_new_tokens", "300"], "303 new ones exceed"),
        (["--trained_depth", "0"], "trained_depth must be at least 1"),
        (["--limit", "0"], "limit is 0"),
        (["--colour", "red"], "colour"),
    ],
)
def test_wrong_input_leaves_nothing(
    line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], message: str
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


@pytest.fixture(scope="module")
def base(target_directory: Path, text_file: Path) -> list[str]:
    """Arguments of a run on the CPU that is validated twice."""
    return short_run(
        target_directory, text_file,
        trainer__max_steps=4,
        trainer__val_check_interval=2,
        trainer__limit_val_batches=1,
        trainer__log_every_n_steps=1,
        acceptance__every_n_validations=0,
    )  # fmt: skip


def with_callback(**more: Any) -> list[str]:
    words = ["--trainer.callbacks+=specdec.diagnostics.drift.AttentionDrift"]
    return words + [f"--trainer.callbacks.{name}={value}" for name, value in (CALLBACK | more).items()]


@pytest.fixture(scope="module")
def runs(base: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """One with the callback, one without."""
    out = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["specdec"])
        for drifts in (False, True):
            out[drifts] = tmp_path_factory.mktemp("run") / "out"
            average = ["--trainer.callbacks+=EMA", "--trainer.callbacks.decay=0.5"]
            more = [*average, *(with_callback() if drifts else [])]
            assert run("fit", [*base, *more, "--out", str(out[drifts])]) == 0
    return out


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "csv" / "version_0" / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_training_is_left_alone_to_the_last_bit(runs: dict[bool, Path]) -> None:
    plain, watched = (rows(runs[drifts]) for drifts in (False, True))
    names = [name for name in plain[0] if name.endswith("loss")]
    assert {"train/loss", "val/loss"} <= set(names)
    for name in names:
        column = [row[name] for row in plain if row[name]]
        assert column and column == [row[name] for row in watched if row[name]]
    states = [torch.load(runs[drifts] / "checkpoints" / "last.ckpt", weights_only=True) for drifts in (False, True)]
    for one, two in zip(*(state["state_dict"].values() for state in states), strict=True):
        assert torch.equal(one, two)


def test_what_is_logged_is_of_the_drafter_as_it_stands(
    runs: dict[bool, Path], target_directory: Path, text_file: Path
) -> None:
    out = runs[True]
    loaded = Target.load(target_directory)
    data = TextData(str(text_file), str(text_file), seq_len=32)
    data.prepare(loaded.tokenizer)
    asked = [(f"validation-{n}", ids) for n, ids in enumerate(document_prompts(data.splits.validation, 3, 64, 200))]
    kept = load(out / "drafter")
    sums = [measure(loaded, kept, text, 4) for text in answered_texts(loaded, asked, 12)]
    figures = summary(document([name for name, _ in asked], sums, 2, 4))
    logged = {name: [float(row[name]) for row in rows(out) if row[name]] for name in rows(out)[0] if "drift/" in name}
    assert {f"drift/{name}" for name in figures} >= set(logged) >= {"drift/state_rms_growth", "drift/sink_mass_last"}
    assert all(len(values) == 2 for values in logged.values())  # of two validations, the last with the kept weights
    for name, values in logged.items():
        assert values[-1] == pytest.approx(figures[name.removeprefix("drift/")]["mean"], rel=1e-4)
    assert logged["drift/kl_first"][0] != logged["drift/kl_first"][1]


def test_processes_share_the_prompts() -> None:
    """What each of two finds, zero for the other's prompts, adds up to what one finds."""

    def found(rank: int, world: int, others: torch.Tensor | float = 0.0) -> list[torch.Tensor]:
        one = AttentionDrift("validation", max_new_tokens=12, depths=3)
        one._asked = list(PROMPTS)
        strategy = SimpleNamespace(reduce=lambda flat, reduce_op: flat + others if reduce_op == "sum" else None)
        trainer: Any = SimpleNamespace(global_rank=rank, world_size=world, strategy=strategy)
        module: Any = SimpleNamespace(target=target(), drafter=drafter(), device=torch.device("cpu"))
        return one._measured(trainer, module)

    shares = [found(rank, 2) for rank in range(2)]
    assert [[int(one[0, 0, 1]) for one in share] for share in shares] == [[9, 0, 9], [0, 9, 0]]
    for one, two in zip(found(0, 1), found(0, 2, torch.stack(shares[1])), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"depths": 12}, "depths is 12, max_new_tokens 12"),
        ({"prompt_tokens": 4}, "prompt_tokens 4"),
        ({"max_new_tokens": 250}, "no validation document can be made a prompt"),
    ],
)
def test_wrong_input_is_told_before_training(
    base: list[str], tmp_path: Path, wrong: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["specdec"])
    with pytest.raises(ValueError, match=message):
        run("fit", [*base, *with_callback(**wrong), "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()
