"""``specdec tune``: the fastest is found, and the files are written."""

import json
from pathlib import Path
from typing import Any

import pytest

import specdec.evaluation.tune as tune
from specdec.cli import main
from specdec.decoding import parse_shape
from specdec.report.plots import figure_files
from specdec.target import Target
from specdec.utils.reading import SUMS

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
    report, told = (out / "report.md").read_text(), capsys.readouterr().out
    assert "| line-3 | a prompt of" in report
    assert all("Drafting does not pay from batch size: " in text for text in (report, told))
    assert main(arguments) == 2 and "exists already" in capsys.readouterr().err
    summary = tune.shape_summary

    def sped(speedup: float) -> Any:
        return lambda *args: summary(*args) | {"speedup": speedup}

    for name, speedup, said in (
        ("slow", 0.9, "Batch size 2: plain decoding"),
        ("fast", 1.1, "2: --shape chain:"),
    ):
        monkeypatch.setattr(tune, "shape_summary", sped(speedup))
        assert main([*arguments[:-1], str(tmp_path / name), "--batch_sizes", "2"]) == 0
        told = capsys.readouterr().out
        assert said in told and ("not pay from batch size: 2" in told) == (speedup < 1)


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
