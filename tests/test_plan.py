"""``specdec plan``: what it works out from configs alone, beside what a run has."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.cli import main
from specdec.drafter import load_drafter
from specdec.fit import run
from specdec.target.loading import skeleton

COMMON = {
    "model.drafter.draft_vocab_size": 200, "model.ttt_steps": 3, "data": "TextData", "data.seq_len": 32,
    "data.batch_size": 2, "trainer.accelerator": "cpu",
}  # fmt: skip


@pytest.fixture
def base(target_directory: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of a run, as for specdec fit."""
    monkeypatch.setattr(sys, "argv", ["specdec"])
    given = COMMON | {"model.target.source": target_directory, "data.train": text_file, "data.val": text_file}
    return [f"--{name}={value}" for name, value in given.items()]


def told(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["plan", "--json", *args]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_run_is_what_was_planned(
    base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Parameters are the saved drafter's, memory what the run estimated."""
    caplog.set_level(logging.INFO, logger="specdec")
    out, flags = tmp_path / "run", {"max_steps": 1, "log_every_n_steps": 1, "limit_val_batches": 0}
    assert run("fit", [*base, *(f"--trainer.{name}={value}" for name, value in flags.items()), f"--out={out}"]) == 0
    estimated = next(r.getMessage() for r in caplog.records if r.getMessage().startswith("estimated memory"))
    plan, drafter = told(capsys, "--world=1", *base), load_drafter(out / "drafter")
    frozen = drafter.embed_tokens.weight.numel()
    assert plan["drafter_frozen_parameters"] == frozen
    assert plan["drafter_trainable_parameters"] == sum(p.numel() for p in drafter.parameters()) - frozen
    assert estimated.startswith(f"estimated memory: {plan['memory_bytes_per_process']['total'] / 1e6:,.0f} MB")
    assert plan["tokens_per_step"] == 64 and plan["steps_per_epoch"] == -(-plan["train_rows"] // 2)


def test_shards_of_many_processes(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    one = told(capsys, "--world=1", *base)
    for strategy in ("ddp", "fsdp2"):
        more = ("--trainer.accumulate_grad_batches=3", f"--trainer.strategy={strategy}")
        four = told(capsys, "--world=4", *base, *more)
        assert four["tokens_per_step"] == 4 * 3 * one["tokens_per_step"]
        parts, whole = four["memory_bytes_per_process"], one["memory_bytes_per_process"]
        shards = 4 if strategy == "fsdp2" else 1
        for part in ("weights", "gradients", "optimizer"):
            assert parts[part] == whole[part] // shards
        assert parts["activations"] == whole["activations"] and parts["exchange"] > whole["exchange"] == 0


def test_a_config_without_weights_is_enough(
    base: list[str], target_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of an 8B model too: nothing is drawn, nothing is loaded."""
    large = tmp_path / "large"
    large.mkdir()
    config = json.loads((target_directory / "config.json").read_text())
    config |= {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "head_dim": 128,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    }  # fmt: skip
    (large / "config.json").write_text(json.dumps(config))
    assert {p.device.type for p in skeleton(str(large), None, False).parameters()} == {"meta"}
    more = [f"--model.target.source={large}", "--model.target.dtype=bfloat16", "--model.drafter.draft_vocab_size=32000"]
    plan = told(capsys, "--world=8", *base, *more)
    assert plan["target_parameters"] == 8_030_261_248
    assert plan["memory_bytes_per_process"]["target"] == 2 * 8_030_261_248
    assert isinstance(plan["train_rows"], str) and plan["steps_per_epoch"] is None  # it has no tokenizer


def test_short_names_of_precisions_are_lightnings(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    planned = {}
    for name in ("bf16", "bf16-mixed", "16", "16-mixed", "32", "32-true", "64", "64-true", "bf16-true"):
        args = ("--world=2", *base, f"--trainer.precision={name}")
        planned[name] = told(capsys, *args)["memory_bytes_per_process"]
    for short, full in (("bf16", "bf16-mixed"), ("16", "16-mixed"), ("32", "32-true"), ("64", "64-true")):
        assert planned[short] == planned[full]
    assert len({str(planned[name]) for name in ("bf16", "32", "64", "bf16-true")}) == 4


def test_what_it_cannot_say_is_one_line(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for args, message in (
        (["--world=0"], "--world"),
        (["--world=2", "--trainer.strategy=deepspeed"], "set auto, ddp, ddp_fork, fsdp2"),
        (["--world=2", "--trainer.max_step=3"], "max_step"),
        (["--world=2", "--trainer.precision=transformer-engine"], "trainer.precision=transformer-engine: plan knows"),
    ):
        assert main(["plan", *base, *args]) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]


def test_the_table(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--world=2", *base]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["processes", "2"] and "memory of a process, MB: total" in lines[-1]
