"""The benchmarks' own parts: what they share, and what their reports say of made-up figures."""

import argparse
import ast
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import decode, equal_rows, harness, train_step
from benchmarks.training import recipe

ECHO = """
import sys; sys.path.insert(0, {root!r})
from benchmarks import harness
harness.serve(lambda job: ({{"hello": job["name"]}}, lambda asked: harness.timed(lambda: asked + 1)))
"""


def test_what_benchmarks_import_of_the_package_is_there() -> None:
    # many import where they run, in a process of their own, which no test starts
    for path in sorted((harness.ROOT / "benchmarks").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("specdec"):
                exec(compile(ast.Module([node], []), str(path), "exec"), {})


def test_worker_answers_and_its_last_words_are_told(tmp_path: Path) -> None:
    script = tmp_path / "echo.py"
    script.write_text(ECHO.format(root=str(harness.ROOT)))
    with harness.Worker(
        sys.executable, "echo", script, {"name": "x", "threads": 1}, tmp_path / "log"
    ) as worker:
        assert worker.about == {"hello": "x"}
        value, spent = worker.ask(4)
        assert value == 5
        assert spent["seconds"] >= 0
        with pytest.raises(ValueError, match="echo ended: TypeError"):
            worker.ask("text")


def test_no_result_names_a_folder_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["benchmarks/decode.py", "--vllm", str(Path.cwd() / "vllm" / "bin" / "python")]
    )
    assert harness.machine(2)["command"] == "python benchmarks/decode.py --vllm vllm/bin/python"


@pytest.mark.parametrize("mask", recipe.MASKS)
def test_rows_of_both_definitions_are_the_same(mask: str) -> None:
    size = recipe.WORKLOADS["T"]
    at = recipe.taught(size, mask)
    assert torch.equal(recipe.slot_mask(size, mask).nonzero()[:, 0] + 1, at)
    answers = recipe.answers(size, mask)
    assert bool((answers[at] & answers[at + 1]).all())
    assert len(at) == (size.tokens - 2 if mask == "all" else size.tokens // 2)


def measured(key: str, seconds: float, losses: list[float]) -> train_step.Measured:
    entry = next(entry for entry in train_step.ENTRIES if entry.key == key)
    step = {"seconds": seconds, "others": 0.0, "peak_mb": 200.0, "before_mb": 100.0}
    first = step | {"losses": losses}
    return train_step.Measured(entry, {"trainable": 5}, [first], [step, step], {"flops": 40}, {})


def test_training_ratio_and_its_refusal() -> None:
    ours, every = measured("specdec", 1.0, [2.0]), measured("specdec-every", 1.0, [3.0])
    peer = measured("speculators", 2.0, [3.0])
    lines, ratios = train_step.report([ours, every, peer], "float32", peak=100.0)
    assert ratios == {"time": 0.5, "growth": 1.0, "share_of_peak": 0.4}
    text = "\n".join(lines)
    assert "0.50 of the time" in text
    assert "| 40% |" in text and "| 20% |" in text  # 40 operations in one second, and in two
    other = measured("speculators", 2.0, [3.1])
    lines, ratios = train_step.report([ours, every, other], "float32", peak=None)
    assert ratios == {}
    assert "do not agree" in "\n".join(lines)


def test_decoding_ratio_has_its_interval_and_texts_are_compared() -> None:
    def answers(seconds: float, last: int = 3) -> list[dict]:
        return [
            {"ids": [1, 2, last], "passes": 1, "seconds": seconds, "others": 0.0} for _ in range(4)
        ]

    found = {"specdec": answers(1.0), "specdec-chain3": answers(0.5), "vllm": answers(2.0, last=4)}
    made = {"pass_bytes": 90, "draft_bytes": 20, "token_bytes": 1}
    options = argparse.Namespace(shape=[], tokens=3)
    lines, figures = decode.report(options, found, made, context=10.0, read_rate=400.0)
    assert figures["ratios"]["specdec / vllm"] == (2.0, 2.0, 2.0)
    text = "\n".join(lines)
    # a pass reads 90 + 3 * 20 + 10 bytes in half a second
    assert "| specdec-chain3 | chain:depth=3, compiled | 6.0 | 2.00 | 80% | 2.00 | 4 of 4 |" in text
    assert figures["shares_of_reading"]["specdec"] == 0.25
    assert "0 of 4" in text


def test_sums_of_steps_come_back_from_means_over_them() -> None:
    """And, reduced otherwise, are what that reduction of them is."""
    rows, decay = [7.0, 5.0, 3.0], equal_rows.DECAY
    # summed over each step's rows
    losses = torch.tensor([11.0, 13.0, 17.0], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([decay**k for k in range(3)], dtype=torch.float64)
    means: list[equal_rows.Step] = []
    for k in range(1, 4):
        loss = (losses * weights)[:k].sum() / sum(decay**j * n for j, n in enumerate(rows[:k]))
        means.append((loss.item(), {"w": torch.autograd.grad(loss, losses)[0]}))
    found = equal_rows.sums(means, rows)
    assert [value for value, _ in found] == pytest.approx([11.0, 13.0, 17.0])
    assert torch.allclose(
        torch.stack([gradient["w"] for _, gradient in found]), torch.eye(3, dtype=torch.float64)
    )
    by_step, gradient = equal_rows.reduced(found, [1 / n for n in rows])
    assert by_step == pytest.approx(11 / 7 + 0.8 * 13 / 5 + 0.64 * 17 / 3)
    same = equal_rows.compare((by_step, gradient), (by_step, gradient), means[-1])
    assert same["loss_difference"] == same["gradient_difference"] == 0
    assert same["loss_scale"] == pytest.approx(by_step / means[-1][0]) and same["equal_clip"] < 0.5
