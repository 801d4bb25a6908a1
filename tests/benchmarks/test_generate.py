"""The benchmark of ``generate`` with a drafter: real workers in small, and what a text that differs does."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import generate


@pytest.mark.slow
def test_texts_of_a_small_target_are_equal_and_a_report_is_written(
    target_directory: Path, drafter_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def add\nreturn a\na + b\n")
    out = tmp_path / "report.md"
    command = ["--target", str(target_directory), "--drafter", str(drafter_directory)]
    command += ["--prompts", str(prompts), "--count", "2", "--tokens", "6", "--threads", "1"]
    monkeypatch.setattr(
        sys, "argv", ["generate.py", *command, "--dtypes", "float32", "--out", str(out)]
    )
    assert generate.main() == 0
    text = out.read_text()
    assert "| generate, drafter | " in text and text.count("2 of 2 |") == 2
    figures = json.loads(out.with_suffix(".json").read_text())["float32"]
    assert figures["figures"]["generate, drafter"]["acceptance_length"] >= 1
    assert figures["partings"] == []


def answer(ids: list[int], seconds: float = 1.0) -> dict[str, Any]:
    times = {"seconds": seconds, "others": 0.0, "draft_seconds": 0.2, "verify_seconds": 0.5}
    return times | {"ids": ids, "accepted": [1, 0]}


def test_a_text_that_parts_is_counted_and_its_margin_told() -> None:
    plain = [answer([1, 2, 3, 4], 2.0), answer([5, 6, 7, 8], 2.0)]
    drafted = [answer([1, 2, 3, 4]), answer([5, 9, 7, 8])]
    parting = generate.parting_of(plain[1]["ids"], drafted[1]["ids"])
    assert parting == {"parting": [5], "tokens": [6, 9]}
    assert generate.parting_of([1, 2], [1, 2]) is None
    with pytest.raises(ValueError, match="one ended"):
        generate.parting_of([1, 2], [1, 2, 3])
    found = parting | {"margin": 0.3, "allowed": 0.05}
    lines, figures = generate.report({"generate": plain, "generate, drafter": drafted}, [found])
    assert figures["generate, drafter"]["equal"] == 1
    assert figures["generate, drafter"]["speedup"][0] == 2
    assert "1 of 1 are further apart" in " ".join(lines)


def test_a_margin_is_of_the_plain_models_logits(target_directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(target_directory)
    logits = model(torch.tensor([[3, 4, 5]])).logits[0, -1].detach()
    best, other = logits.topk(2).indices.tolist()
    found = generate.margin(model, [3, 4], [5], [best, other])
    expected = float(logits[best] - logits[other]) / max(1, float(logits.abs().max()))
    assert found["margin"] == pytest.approx(expected, rel=1e-4)
    assert generate.margin(model, [3, 4], [5], [best, best])["margin"] == 0
