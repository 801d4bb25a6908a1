"""``specdec compare``, from the directories to the text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.cli import main
from specdec.evaluation.comparison import compare
from specdec.evaluation.record import Answer, write_answers
from tests.evaluation.made import clustered

ONE, TWO = clustered(np.random.default_rng(0), 12, better=0.1)
SETTINGS = {
    "source": "x", "dtype": "float32", "max_new_tokens": 64, "prompts": ["a.jsonl"], "prompts_sha256": "1",
    "torch_threads": 2,
}  # fmt: skip
Make = Callable[..., str]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """An evaluation's directory."""

    def made(name: str, growths: dict[str, list[Answer]], target: str = "t", **changes: Any) -> str:
        out = tmp_path / name
        out.mkdir()
        results = [{"growth": growth} for growth in growths]
        metrics = {"results": results, "target": {"fingerprint": target}, "settings": SETTINGS | changes}
        (out / "metrics.json").write_text(json.dumps(metrics))
        write_answers(out / "answers.jsonl", list(growths), list(growths.values()))
        return str(out)

    return made


def test_two_runs(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    a = make("a", {"chain of 5": ONE, "only A's": ONE})
    b = make("b", {"chain of 5": TWO}, source="y", prompts=["b.jsonl"], torch_threads=9)
    assert main(["compare", a, b]) == 0
    shown, found = capsys.readouterr().out, compare(ONE, TWO)
    assert f"A {found.a:.3f}, B {found.b:.3f}" in shown and "chain of 5, 12 prompts" in shown
    assert f"+{found.difference.mean:.3f} [+{found.difference.low:.3f}, +{found.difference.high:.3f}]" in shown
    assert f"p = {found.p_value:.2g}" in shown and "only A's" not in shown
    assert f"{found.prompts_needed(0.1)} to see a difference of 0.1 (power 0.8, alpha 0.05)" in shown
    assert main(["compare", b, a, "--json", "--detect", "0.3"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["comparisons"]
    assert row["difference"]["mean"] == pytest.approx(-found.difference.mean)
    assert row["prompts_needed"] == found.prompts_needed(0.3) < found.prompts_needed(0.1)


@pytest.mark.parametrize("names", [["chain of 5", "tree of 12 (depth 5, top 4)"], ["chain:depth=5", "tree"]])
def test_two_growths_of_one_run(make: Make, capsys: pytest.CaptureFixture[str], names: list[str]) -> None:
    run = make("a", {"chain of 5": ONE, "tree of 12 (depth 5, top 4)": TWO})
    assert main(["compare", run, run, "--json", "--growth", *names]) == 0
    (row,) = json.loads(capsys.readouterr().out)["comparisons"]
    assert (row["growth_a"], row["growth_b"]) == ("chain of 5", "tree of 12 (depth 5, top 4)")
    assert row["p_value"] == compare(ONE, TWO).p_value


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"target": "u"}, "differ in their target"),
        ({"max_new_tokens": 128}, "differ in max_new_tokens: 64 and 128"),
        ({"temperature": 1.0}, "differ in temperature: None and 1.0"),
        ({"thinking": False}, "differ in thinking: None and False"),
        ({"prompts_sha256": "2"}, "differ in their prompts' texts"),
        ({"growths": {"chain": TWO[:-1]}, "prompts_sha256": "2"}, "differ in their prompts: 1 are in one only: 11"),
        ({"growths": {"chain": [*TWO, TWO[0]]}}, "differ in the turns"),
        ({"growths": {"tree": TWO}}, "share no growth (chain and tree)"),
        ({"growths": {}}, "it holds no result"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    make: Make, capsys: pytest.CaptureFixture[str], other: dict[str, Any], message: str
) -> None:
    runs = [make("a", {"chain": ONE}), make("b", **{"growths": {"chain": TWO}} | other)]
    assert main(["compare", *runs]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--growth", "bush"], "growth 'bush'"),
        (["--growth", "chain:depth=3"], "was not evaluated with chain of 3; it has chain of 5"),
        (["--growth", "a", "b", "c"], "not 3"),
        (["--detect", "0"], "detect is 0"),
        (["--detect", "much"], "detect"),
    ],
)
def test_wrong_arguments_are_one_line(
    make: Make, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    run = make("a", {"chain of 5": ONE})
    assert main(["compare", run, run, *more]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_what_is_no_evaluation_is_refused(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make("a", {"chain": ONE})
    Path(run, "answers.jsonl").unlink()
    assert main(["compare", run, run]) == 2
    assert "answers.jsonl: no such file" in capsys.readouterr().err
    Path(run, "metrics.json").write_text("{}")
    assert main(["compare", run, run]) == 2
    assert "not of specdec evaluate, for want of 'results'" in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "nowhere"), run]) == 2
    assert "no such file" in capsys.readouterr().err
