"""The verdict of ``specdec plan``: hours, GPU-hours, disk, whether the run fits, and what a budget buys."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.cli import main
from specdec.commands.plan_costs import Device, bought, disk_bytes, on_devices, run_on_device
from specdec.commands.plan_report import plan_report
from specdec.training.memory import Precision

GB = 10**9
MEMORY = {
    "weights": 4 * GB, "gradients": 2 * GB, "optimizer": 4 * GB, "target": 16 * GB, "target_states": 1 * GB,
    "activations": 18 * GB, "loss": 3 * GB, "exchange": 0, "total": 48 * GB,
}  # fmt: skip


def run_figures(**changes: Any) -> dict[str, Any]:
    """A run of 1,000 steps on two devices of 1e14 operations a second, whose cost is easy to compute by hand.

    A process has 10,000 tokens of a step. They take 10,000 * (1e10 + 3e10) / 1e14 = 4 s for the drafter and the
    target's head, 10,000 * 6e10 / 1e14 = 6 s for the target, and 1e9 / 1e9 = 1 s on the network: 11 s.
    """
    figures: dict[str, Any] = {
        "processes": 2, "strategy": "ddp",
        "drafter_trainable_parameters": 10**9, "drafter_frozen_parameters": 5 * 10**8, "target_parameters": 8 * GB,
        "seq_len": 1000, "batch_size": 10, "rows_per_step": 20, "tokens_per_step": 20_000,
        "train_rows": 10_000, "steps_per_epoch": 500, "steps": 1000, "tokens": 20_000_000,
        "flops_per_token": {"target": 6e10, "target_head": 1e10, "drafter": 3e10}, "exchanged_bytes_per_step": 1e9,
        "products": {"target": "bfloat16", "drafter": "bfloat16"},
        "feature_source": "on_the_fly", "feature_bytes_per_token": 32_000, "memory_bytes_with_parts": 34 * GB,
        "memory_bytes_with_target": 48 * GB, "memory_bytes_per_process": MEMORY,
    }  # fmt: skip
    figures |= changes
    return figures | {"disk_bytes": disk_bytes(figures, Precision(), 1, 2, None)}


def on_device(figures: dict[str, Any], memory: float = 80e9) -> dict[str, Any]:
    device = Device(memory, 1e14, 2e13)
    figures |= {"device": "h100", "efficiency": 0.35}
    figures["on_devices"] = on_devices(figures, device, network=1e9, target_bytes=2)
    figures["on_device"] = run_on_device(figures, device)
    return figures


def verdict(figures: dict[str, Any]) -> str:
    return " ".join(plan_report(figures).partition("Verdict\n")[2].split())


def test_hours_memory_and_disk_by_hand() -> None:
    """1,000 steps of 11 s on two devices are 3.06 h and 6.11 GPU-hours; 4/3 of 48 GB are 64 GB."""
    figures = on_device(run_figures())
    run = figures["on_device"]
    assert run["step_seconds"] == pytest.approx(11)
    assert run["seconds"] == pytest.approx(11_000)
    assert run["device_hours"] == pytest.approx(22_000 / 3600)
    assert run["memory_bytes_peak"] == pytest.approx(64e9) and run["fits"]
    # 1.5e9 weights of 4 bytes, two moments of 4 bytes for 1e9 of them
    assert figures["disk_bytes"] == {
        "checkpoint": 14 * GB, "checkpoints": 28 * GB, "drafters": 12 * GB, "feature_cache": 0, "total": 40 * GB,
    }  # fmt: skip
    text = verdict(figures)
    assert (
        "1,000 steps take 3.06 h on 2 h100 devices, 6.11 GPU-hours, at 35% of the h100's peak in bfloat16"
        in text
    )
    assert "a device needs up to 64.0 GB of the 80.0 GB of the h100: it FITS." in text
    assert "the run takes 40.0 GB for checkpoints and drafters" in text
    assert "the target's forward pass takes 55% of the time" in text


def test_float32_takes_its_own_peak_and_the_verdict_says_what_to_set() -> None:
    """A fifth of the speed: 5 * 4 s for drafter and head, 5 * 6 s for the target, and 1 s on the network."""
    figures = on_device(run_figures(products={"target": "float32", "drafter": "float32"}), 60e9)
    assert figures["on_device"]["step_seconds"] == pytest.approx(51)
    text = verdict(figures)
    assert "at 35% of the h100's peak in float32" in text
    bits = "set --trainer.precision bf16-mixed and --model.target.dtype bfloat16"
    assert f"A GPU computes faster in 16 bits: {bits}." in text
    assert f"To make it fit, {bits}; in float32, set --data.batch_size 8" in text
    # the head is the target's, the drafter alone is trained in 16 bits
    mixed = on_device(run_figures(products={"target": "float32", "drafter": "bfloat16"}))
    assert mixed["on_device"]["step_seconds"] == pytest.approx(3 + 5 + 30 + 1)
    assert "faster in 16 bits: set --model.target.dtype bfloat16." in verdict(mixed)


def test_a_budget_buys_steps_by_hand() -> None:
    """A step of 11 s on two devices is 22 GPU-seconds: ten GPU-hours are 1,636 steps, 3.27 epochs of 500."""
    figures = on_device(run_figures())
    figures["budget"] = bought(figures, 10)
    assert figures["budget"] == {
        "device_hours": 10, "steps": 1636, "tokens": 32_720_000, "epochs": pytest.approx(3.272),
    }  # fmt: skip
    assert (
        "10 GPU-hours buy 1,636 steps, 32.7 million tokens, 3.27 epochs: --trainer.max_steps 1636"
        in verdict(figures)
    )


def test_producers_count_in_the_gpu_hours() -> None:
    """Without the target a step takes 5 s: 4,000 tokens a second, of 6e10 operations each, are 2.4 devices."""
    figures = on_device(run_figures(feature_source="streamed"))
    assert figures["on_devices"]["streamed"]["devices_of_producers"] == 3
    assert figures["on_device"]["devices"] == 5
    assert figures["on_device"]["device_hours"] == pytest.approx(5 * 5000 / 3600)


@pytest.mark.parametrize(
    ("memory", "parts", "remedy"),
    [
        # a forward pass may take 3/4 of 60 GB, 45; 26 are fixed, and 19 hold 8 rows of 2.2 GB
        (60e9, {}, "set --data.batch_size 8 (now 10) and raise --trainer.accumulate_grad_batches"),
        (36e9, {}, "set --model.recompute true, a smaller --data.seq_len"),
        (24e9, {}, "keep the target's layers off the trainer: --model.features Cached"),
        (24e9, {"target": 2 * GB, "optimizer": 18 * GB}, "use --trainer.strategy fsdp2"),
    ],
)
def test_what_to_change_when_it_does_not_fit(
    memory: float, parts: dict[str, int], remedy: str
) -> None:
    figures = on_device(run_figures(memory_bytes_per_process=MEMORY | parts), memory)
    text = verdict(figures)
    assert "it DOES NOT FIT. To make it fit, " in text
    assert remedy in text


def test_what_is_not_known_is_said_with_what_to_pass() -> None:
    figures = run_figures(steps=None, tokens=None, steps_per_epoch=None, train_rows="no tokenizer")
    text = verdict(figures)
    assert "Data: its length is unknown (no tokenizer)." in text
    assert "Time: unknown. Pass --device, one of a100, h100" in text
    assert "Memory: a device needs up to 64.0 GB" in text
    assert "Disk: the run takes 40.0 GB" in text
    assert "Set trainer.max_steps to get the hours of the run." in verdict(on_device(figures))


def test_the_disk_of_a_feature_cache(tmp_path: Path) -> None:
    """One that exists is measured; else 10,000 rows of 1,000 tokens of 32,000 bytes are 320 GB."""
    figures = run_figures(feature_source="cached")
    cache = tmp_path / "cache"
    planned = disk_bytes(figures, Precision(), 1, 1, str(cache))
    assert planned["feature_cache"] == 320 * GB and planned["total"] == (28 + 6 + 320) * GB
    cache.mkdir()
    (cache / "features").write_bytes(bytes(1000))
    assert disk_bytes(figures, Precision(), 1, 1, str(cache))["feature_cache"] == 1000
    figures["train_rows"] = "no tokenizer"
    figures["disk_bytes"] = disk_bytes(figures, Precision(), 1, 1, str(tmp_path / "none"))
    assert figures["disk_bytes"]["total"] is None
    assert "is unknown without the length of the data" in verdict(figures)


def test_sections_and_json_of_a_real_config(
    target_directory: Path,
    text_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without --world the processes are those of trainer.devices; JSON has raw numbers."""
    monkeypatch.setattr(sys, "argv", ["specdec"])
    options = {
        "model.target.source": target_directory, "model.drafter.draft_vocab_size": 200, "data": "TextData",
        "data.train": text_file, "data.val": text_file, "data.seq_len": 32, "data.batch_size": 2,
        "trainer.devices": 2, "trainer.max_steps": 50, "trainer.max_epochs": 1, "checkpoint.every_n_train_steps": 5,
        "checkpoint.save_top_k": 3,
    }  # fmt: skip
    arguments = ["plan", "--device=h100", "--budget_hours=1"]
    arguments += [f"--{name}={value}" for name, value in options.items()]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    titles = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert titles == ["Model", "Run", "Memory per device", "Time", "Network", "Disk", "Verdict"]
    assert "it FITS" in text and "GPU-hours buy" in text
    assert main([*arguments, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["processes"] == 2
    assert figures["steps"] == min(50, figures["steps_per_epoch"])
    disk = figures["disk_bytes"]
    assert disk["checkpoints"] == (min(3, figures["steps"] // 5) + 1) * disk["checkpoint"]
    assert figures["on_device"]["seconds"] == pytest.approx(
        figures["steps"] * figures["on_devices"]["on_the_fly"]["step_seconds"]
    )
