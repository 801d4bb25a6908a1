"""``specdec tune``: costs are fitted, the fastest is found, and the files are written."""

import json
from pathlib import Path

import pytest

import specdec.evaluation.tune as tune
from specdec.cli import main
from specdec.decoding import parse_shape
from specdec.evaluation.tune import CANDIDATES, TIMED, CandidateShape, Costs, fit_costs, predict
from specdec.target import Target


def test_every_candidate_is_a_shape_that_the_command_line_names() -> None:
    for one in (CandidateShape(*numbers) for numbers in (*CANDIDATES, *TIMED)):
        assert parse_shape(one.text) == one.shape
        assert (one.shape.depth, one.shape.nodes_drafted) == (one.depth, one.nodes)


def test_the_fit_finds_steps_and_rest() -> None:
    steps, rest, shapes = {1: 0.1, 4: 0.2, 8: 0.5}, 0.3, [CandidateShape(*one) for one in TIMED]

    def drafting(shape: CandidateShape) -> float:
        return steps[1] + (shape.depth - 1) * steps[shape.top_k]

    costs = fit_costs(4.0, shapes, [rest + drafting(one) for one in shapes], [1 + 0.02 * one.nodes for one in shapes])
    assert costs.rest == pytest.approx(rest) and costs.step == pytest.approx(steps)
    for one in predict(costs, dict.fromkeys(shapes, 2.0)):
        assert one["verify"] == pytest.approx(1 + 0.02 * one["nodes"])
        assert one["drafting"] == pytest.approx(drafting(CandidateShape(one["top_k"], one["depth"], one["nodes"])))


def test_no_step_costs_less_than_nothing() -> None:
    chains = [CandidateShape(1, depth, depth) for depth in (1, 2, 3)]
    assert fit_costs(1.0, chains, [4.0, 3.0, 2.0], [1.0] * 3).step == {1: 0.0}


def best(slope: float, step: float, alpha: float, gain: float = 0.0) -> str:
    """The fastest where a node costs ``slope``, and guesses are right with ``alpha``, more of them with more nodes."""
    costs = Costs(1.0, {n: 1 + slope * (n - 1) for n in (1, 49)}, {1: step, 8: step}, 0.05)
    lengths = {}
    for shape in (CandidateShape(*numbers) for numbers in CANDIDATES):
        hit = 1 - (1 - alpha) ** (1 + gain * (shape.nodes - shape.depth) / shape.depth)
        lengths[shape] = sum(hit**k for k in range(shape.depth + 1))
    found = predict(costs, lengths)
    speeds = [one["speedup"] for one in found]
    assert speeds == sorted(speeds, reverse=True) and len(found) == len(lengths)
    return str(found[0]["shape"])


def test_the_optimum_is_found() -> None:
    assert best(0.0, 0.0, 0.9) == "chain:depth=7"  # all is free: the deepest, and of equals the smallest
    assert best(0.5, 0.1, 0.5) == "chain:depth=1"  # every node costs half a pass
    by_hand = {d: sum(0.7**k for k in range(d + 1)) / (1 + 0.02 * d + 0.1 * d + 0.05) for d in range(1, 8)}
    assert best(0.02, 0.1, 0.7) == f"chain:depth={max(by_hand, key=by_hand.__getitem__)}"
    assert "nodes=48" in best(0.0, 0.1, 0.5, gain=1.0)  # verification is free, steps are not: a bushy tree


@pytest.fixture
def arguments(
    target_directory: Path, drafter_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    monkeypatch.setattr(tune, "TIMED", ((1, 1, 1), (1, 3, 3), (4, 2, 11)))
    monkeypatch.setattr(tune, "CANDIDATES", ((1, 1, 1), (1, 3, 3), (2, 3, 6), (4, 3, 11)))
    (tmp_path / "p.txt").write_text(f"def add(a, b):\ndef add_3(\n{'def ' * 300}\n")
    return [
        "tune", "--target", str(target_directory), "--drafter", str(drafter_directory),
        "--prompts", str(tmp_path / "p.txt"), "--max_new_tokens", "6", "--batch_sizes", "2", "1", "--repeats", "1",
        "--compile", "false", "--out", str(tmp_path / "out"),
    ]  # fmt: skip


def test_it_recommends_checks_and_writes(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(arguments) == 0
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {"tune.json", "report.md"}
    found = json.loads((out / "tune.json").read_text())
    assert [batch["batch"] for batch in found["batches"]] == [1, 2]
    for batch in found["batches"]:
        first, trial = batch["predictions"][0], batch["trial"]
        assert first["speedup"] == pytest.approx(
            first["acceptance_length"] / (first["verify"] + first["drafting"] + first["rest"])
        )
        assert trial["acceptance_length"] == pytest.approx(first["acceptance_length"]) and trial["measured"] > 0
        assert batch["recommended"] == (first["shape"] if first["speedup"] > 1 else None)
    assert found["prompts_used"] == 2 and "positions" in found["skipped"][0]["reason"]
    report, told = (out / "report.md").read_text(), capsys.readouterr().out
    assert "line-3 was left out" in report
    assert all("Drafting does not pay from batch size: " in text for text in (report, told))
    assert main(arguments) == 2 and "exists already" in capsys.readouterr().err
    fit = tune.fit_costs
    monkeypatch.setattr(tune, "fit_costs", lambda *args: fit(*args)._replace(rest=99.0))
    assert main([*arguments[:-1], str(tmp_path / "slow"), "--batch_sizes", "2"]) == 0
    told = capsys.readouterr().out
    assert "Batch size 2: plain decoding" in told and "does not pay from batch size: 2" in told


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--batch_sizes", "4", "0"], "batch_sizes [4, 0] must be numbers from 1 up"),
        (["--max_new_tokens", "1"], "max_new_tokens 1 at least 2"),
        (["--max_new_tokens", "999"], "none of 3 can be decoded"),
        (["--limit", "0"], "limit"),
        (["--drafter", "nowhere"], "nowhere"),
        (["--out", "/dev/null/x"], "/dev/null/x"),
        ([], "no pass to tune for"),
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
