"""``specdec tune``: the fastest is found, and the files are written."""

import json
from pathlib import Path
from typing import Any

import pytest

import specdec.evaluation.tune as tune
from specdec.cli import main
from specdec.decoding import parse_shape
from specdec.evaluation import tune_plots
from specdec.report.plots import DOUBLE, PaperFigure, figure_files
from specdec.target import Target
from specdec.utils.reading import SUMS
from tests.report.drawn import assert_whiskers_inside

SHAPES = ["chain:depth=1", "chain:depth=3", "tree:depth=2,top_k=3,nodes=7"]


def test_every_candidate_is_a_shape_of_its_own() -> None:
    assert len({parse_shape(text) for text in tune.CANDIDATES}) == len(tune.CANDIDATES)


@pytest.fixture
def arguments(target_directory: Path, drafter_directory: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "p.txt").write_text(f"def add(a, b):\ndef add_3(\n{'def ' * 300}\n")
    return [
        "tune", "--target", str(target_directory), "--drafter", str(drafter_directory),
        "--prompts", str(tmp_path / "p.txt"), "--max_new_tokens", "6", "--batch_sizes", "2", "1",
        "--shape", *SHAPES, "--compile", "false", "--out", str(tmp_path / "out"),
    ]  # fmt: skip


@pytest.mark.slow
def test_tune_recommends_checks_and_writes(
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main(arguments) == 0
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {
        "tune.json",
        "schedule.json",
        "report.md",
        *figure_files("speed.png"),
        *figure_files("cost_model.png"),
        SUMS,
    }
    found = json.loads((out / "tune.json").read_text())
    fastest = {}
    for batch in found["batches"]:
        chains = [
            one["shape"]
            for one in batch["results"]
            if one["shape"] in SHAPES[:2] and one["speedup"] > 1
        ]
        fastest[batch["batch"]] = int(chains[0][-1]) if chains else 0
    assert json.loads((out / "schedule.json").read_text()) == tune.schedules(fastest)
    assert [batch["batch"] for batch in found["batches"]] == [1, 2]
    for batch in found["batches"]:
        speeds = [one["speedup"] for one in batch["results"]]
        assert speeds == sorted(speeds, reverse=True) and {
            one["shape"] for one in batch["results"]
        } == {*SHAPES}
        assert batch["recommended"] == (batch["results"][0]["shape"] if speeds[0] > 1 else None)
        assert all(one["prompts"] == 2 and one["identical_outputs"] > 0 for one in batch["results"])
    assert [one["prompt_id"] for one in found["skipped"]] == ["line-3"]
    adaptive = found["adaptive"]
    measured = adaptive["measured"]
    assert measured["fixed"]["shape"] == adaptive["fixed"]["shape"]
    assert measured["adaptive"]["shape"] in {row["shape"] for row in adaptive["adaptive"]}
    assert measured["adaptive"]["over_fixed"]["mean"] > 0
    assert all(parse_shape(row["shape"]).depth == 3 for row in adaptive["adaptive"])
    report, told = (out / "report.md").read_text(), capsys.readouterr().out
    assert "## Chains by confidence, batch size 1: run" in report and "Chains that end by" in told
    assert "| line-3 | a prompt of" in report
    assert all("plain decoding" in text and "Batch size 2: " in text for text in (report, told))
    assert "](speed.png)" in report and "](cost_model.png)" in report
    assert main(arguments) == 2 and "exists already" in capsys.readouterr().err
    summary = tune.shape_summary

    def sped(speedup: float, half: float) -> Any:
        interval = {"low": speedup - half, "high": speedup + half}
        faster = {"speedup": speedup, "speedup_interval": interval}
        return lambda *args: summary(*args) | faster

    for name, speedup, half, said in (
        ("slow", 0.9, 0.05, "Batch size 2: plain decoding is faster than every draft shape"),
        ("fast", 1.1, 0.05, "(1.10x [1.05, 1.15])"),
        ("noise", 1.1, 0.2, "(1.10x [0.90, 1.30], perhaps no faster than plain decoding)"),
    ):
        monkeypatch.setattr(tune, "shape_summary", sped(speedup, half))
        assert main([*arguments[:-1], str(tmp_path / name), "--batch_sizes", "2"]) == 0
        told = capsys.readouterr().out
        assert said in told and ("plain decoding at batch size 2." in told) == (speedup < 1)


def chain(depth: int, draft_ms: float, speedup: float) -> dict[str, Any]:
    """A result of a chain whose drafts are accepted half of the time, with verifications of 10 ms."""
    return {
        "shape": f"chain:depth={depth}",
        "speedup": speedup,
        "speedup_interval": {"low": speedup - 0.5, "high": speedup + 0.5},
        "tokens_per_second": {"speculative": 10 * speedup, "plain": 10.0},
        "tokens_per_second_interval": {"speculative": {"low": 5.0, "high": 40.0}},
        "pass_time": {"draft_ms": {"mean": draft_ms}, "verify_ms": {"mean": 10.0}},
        "accepted_per_position": {"joint": [0.5**k for k in range(1, depth + 1)]},
    }


def test_the_cost_model_by_hand() -> None:
    """A draft takes a tenth of a verification: (2 + 4) ms over (2 + 4) times 10 ms."""
    model = tune_plots.cost_model([chain(4, 4.0, 1.2), chain(2, 2.0, 1.3)])
    assert model is not None and model["draft_cost"] == pytest.approx(0.1)
    expected = [1, 1.5 / 1.1, 1.75 / 1.2, 1.875 / 1.3, 1.9375 / 1.4]
    assert model["speedup"] == pytest.approx(expected)
    untimed = chain(2, 2.0, 1.3) | {"pass_time": {"draft_ms": None, "verify_ms": None}}
    assert tune_plots.cost_model([untimed]) is None


def test_the_figures_hold_measured_points_and_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, PaperFigure] = {}
    monkeypatch.setattr(
        tune_plots, "save_figure", lambda paper, path: drawn.update({path.name: paper})
    )
    results = [chain(4, 4.0, 1.2), chain(2, 2.0, 1.3)]
    batches = [
        {"batch": batch, "cost_model": tune_plots.cost_model(results), "results": results}
        for batch in (1, 4)
    ]
    tune_plots.plot_tuning(batches, tmp_path)
    assert set(drawn) == {"speed.png", "cost_model.png"}
    for paper in drawn.values():
        assert paper.figure.get_figwidth() == DOUBLE
        assert_whiskers_inside(paper.figure)
    rows = [row for row in drawn["cost_model.png"].rows if row.panel.startswith("batch size 4")]
    measured = {row.x: (row.value, row.low, row.high) for row in rows if row.series == "measured"}
    assert measured == {2: (1.3, 0.8, 1.8), 4: (1.2, 0.7, 1.7)}
    assert [row.value for row in rows if row.series == "model"] == batches[0]["cost_model"]["speedup"]  # fmt: skip


def test_what_engines_are_told() -> None:
    """vLLM wants ranges from 1 on without a gap, and goes on with the last; it reads the file's own numbers."""
    found = tune.schedules({16: 0, 1: 5, 4: 3})
    vllm = {
        "num_speculative_tokens": 5,
        "num_speculative_tokens_per_batch_size": [[1, 3, 5], [4, 15, 3], [16, 16, 0]],
    }
    sglang = {size: {"candidate_steps": [steps]} for size, steps in (("1", 5), ("4", 3), ("16", 0))}
    assert found == {"vllm": vllm, "sglang": sglang}
    assert tune.schedules({8: 2})["vllm"]["num_speculative_tokens_per_batch_size"] == [[1, 8, 2]]
    assert tune.schedules({1: 0, 2: 0})["vllm"] is None  # vLLM knows no drafter that never drafts


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--batch_sizes", "4", "0"], "--batch_sizes must be at least 1, not 0"),
        (["--shape", "bush"], "bush"),
        (["--max_new_tokens", "1"], "no target pass"),
        (["--max_new_tokens", "999"], "can be decoded"),
        (["--limit", "0"], "limit"),
        (["--drafter", "nowhere"], "nowhere"),
        (["--out", "/dev/null/x"], "/dev/null: a part of the path is a file"),
        ([], "no target pass"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_nothing(
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    extra: list[str],
    message: str,
) -> None:
    if not extra:
        monkeypatch.setattr(Target, "eos_token_ids", frozenset(range(400)))  # answers end at once
    assert main([*arguments, *extra]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"drafter", "p.txt"}
