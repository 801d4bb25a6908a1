"""The whole chain for a target with recurrent layers: trained, cached, evaluated, diagnosed, exported."""

import csv
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from specdec.cli import main
from tests.short_run import short_run

STEPS = 3


@pytest.fixture
def hybrid(tmp_path: Path, target_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small random Qwen3.5 with another target's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(target_directory)
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, tie_word_embeddings=False,
        linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"] * 2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # greedy choices are no ties
    model.save_pretrained(tmp_path / "hybrid")
    tokenizer.save_pretrained(tmp_path / "hybrid")
    monkeypatch.setattr(sys, "argv", ["specdec"])
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hybrid"


def losses(out: Path) -> list[float]:
    with next(out.glob("csv/*/metrics.csv")).open() as stream:
        return [float(row["train/loss"]) for row in csv.DictReader(stream) if row.get("train/loss")]


@pytest.mark.slow
def test_from_text_to_an_export(hybrid: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = Path("text.txt")
    text.write_text("".join(f"def add_{n}(a, b):\n    return a + {n} * b\n\n\n" for n in range(60)))
    run = short_run(
        hybrid, text, trainer__max_steps=STEPS, trainer__log_every_n_steps=1, acceptance__max_new_tokens=8,
        acceptance__count=2, model__drafter__aux_layers="[1, 2, 4]",
    )  # fmt: skip
    assert main(["fit", *run, "--out", "fitted"]) == 0
    assert (
        main(["cache", *run[: run.index("--trainer.max_steps")], *run[-2:], "--out", "features"])
        == 0
    )
    cached = ["--model.features", "Cached", "--model.features.directory", "features"]
    assert main(["fit", *run, *cached, "--out", "again"]) == 0
    assert (
        losses(Path("fitted")) == pytest.approx(losses(Path("again")), abs=1e-6)
        and len(losses(Path("again"))) == STEPS
    )
    Path("prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"def add_{n}("}) + "\n" for n in range(2))
    )
    of = ["--target", str(hybrid), "--drafter", "fitted/drafter", "--prompts", "prompts.jsonl"]
    decoding = [*of, "--max_new_tokens", "10", "--shape", "chain:depth=2"]
    assert (
        main(
            [
                "evaluate",
                *decoding,
                "--compile",
                "false",
                "--batch_size",
                "2",
                "--certify",
                "40",
                "--out",
                "evaluated",
            ]
        )
        == 0
    )
    found = json.loads(Path("evaluated/metrics.json").read_text())["results"][0]
    assert (
        found["identical_outputs"] == 2
        and json.loads(Path("evaluated/certificate.json").read_text())["holds"]
    )
    assert main(["drift", *of, "--depths", "3", "--max_new_tokens", "8", "--out", "drift"]) == 0
    assert main(["export", *of[:4], "--out", "served"]) == 0
    assert "the target has recurrent layers, whose state an engine must put back" in caplog.text
    assert (
        main(["parity", *of, "--max_new_tokens", "8", "--depth", "3", "--exported", "served"]) == 0
    )
