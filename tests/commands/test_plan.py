"""``specdec plan``: what it works out from configs alone, beside what a run has."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.cli import main
from specdec.commands.fit import run_fit
from specdec.commands.plan_costs import drafter_flops, target_flops
from specdec.data import Batch
from specdec.drafter import Drafter, DrafterConfig, DrafterSpec, load_drafter
from specdec.features import FeatureSource
from specdec.nn.unroll import Dense
from specdec.nn.view import View
from specdec.target import Target, TargetOutput
from specdec.target.loading import skeleton
from specdec.training.step import ObjectiveConfig, TrainStep, target_outputs
from tests.target.zoo import make

COMMON = {
    "model.drafter.draft_vocab_size": 200, "model.ttt_steps": 3, "data": "TextData", "data.seq_len": 32,
    "data.batch_size": 2, "trainer.accelerator": "cpu",
}  # fmt: skip


@pytest.fixture
def base(target_directory: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of a run, as for specdec fit."""
    monkeypatch.setattr(sys, "argv", ["specdec"])
    given = COMMON | {
        "model.target.source": target_directory,
        "data.train": text_file,
        "data.val": text_file,
    }
    return [f"--{name}={value}" for name, value in given.items()]


def told(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["plan", "--json", *args]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_run_is_what_was_planned(
    base: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Parameters are the saved drafter's, memory what the run estimated."""
    caplog.set_level(logging.INFO, logger="specdec")
    out, flags = tmp_path / "run", {"max_steps": 1, "log_every_n_steps": 1, "limit_val_batches": 0}
    assert (
        run_fit(
            "fit",
            [
                *base,
                *(f"--trainer.{name}={value}" for name, value in flags.items()),
                f"--out={out}",
            ],
        )
        == 0
    )
    estimated = next(
        r.getMessage() for r in caplog.records if r.getMessage().startswith("estimated memory")
    )
    plan, drafter = told(capsys, "--world=1", *base), load_drafter(out / "drafter")
    frozen = drafter.embed_tokens.weight.numel()
    assert plan["drafter_frozen_parameters"] == frozen
    assert (
        plan["drafter_trainable_parameters"]
        == sum(p.numel() for p in drafter.parameters()) - frozen
    )
    assert estimated.startswith(
        f"estimated memory: {plan['memory_bytes_per_process']['total'] / 1e6:,.0f} MB"
    )
    checkpoint = (out / "checkpoints" / "last.ckpt").stat().st_size
    assert plan["disk_bytes"]["checkpoint"] == pytest.approx(
        checkpoint, rel=0.15
    )  # a tenth of so small a file is text
    weights = (out / "drafter" / "model.safetensors").stat().st_size
    assert plan["disk_bytes"]["drafters"] == pytest.approx(2 * weights, rel=0.1)
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
        assert (
            parts["activations"] == whole["activations"]
            and parts["exchange"] > whole["exchange"] == 0
        )
        gradients = 4 * four["drafter_trainable_parameters"]
        # gathered and summed for each of three batches
        weights = gradients + 4 * four["drafter_frozen_parameters"]
        assert one["exchanged_bytes_per_step"] == 0
        wanted = 3 * 3 / 4 * (weights + gradients) if strategy == "fsdp2" else 2 * 3 / 4 * gradients
        assert four["exchanged_bytes_per_step"] == wanted
        two_nodes = told(capsys, "--world=4", *base, *more, "--trainer.num_nodes=2")[
            "exchanged_bytes_per_step"
        ]
        assert two_nodes == (
            3 * (1 / 2 * (weights + gradients) + gradients / 2) if strategy == "fsdp2" else wanted
        )


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
    more = [
        f"--model.target.source={large}",
        "--model.target.dtype=bfloat16",
        "--model.drafter.draft_vocab_size=32000",
    ]
    plan = told(capsys, "--world=8", *base, *more)
    assert plan["target_parameters"] == 8_030_261_248
    assert plan["memory_bytes_per_process"]["target"] == 2 * 8_030_261_248
    # it has no tokenizer
    assert isinstance(plan["train_rows"], str) and plan["steps_per_epoch"] is None


def test_short_names_of_precisions_are_lightnings(
    base: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    planned = {}
    for name in (
        "bf16",
        "bf16-mixed",
        "16",
        "16-mixed",
        "32",
        "32-true",
        "64",
        "64-true",
        "bf16-true",
    ):
        args = ("--world=2", *base, f"--trainer.precision={name}")
        planned[name] = told(capsys, *args)["memory_bytes_per_process"]
    for short, full in (
        ("bf16", "bf16-mixed"),
        ("16", "16-mixed"),
        ("32", "32-true"),
        ("64", "64-true"),
    ):
        assert planned[short] == planned[full]
    assert len({str(planned[name]) for name in ("bf16", "32", "64", "bf16-true")}) == 4


def test_what_it_cannot_say_is_one_line(
    base: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for args, message in (
        (["--world=0"], "--world"),
        (["--budget_hours=10"], "--budget_hours needs --device"),
        (["--device=h100", "--budget_hours=0"], "--budget_hours must be a positive number"),
        (["--trainer.devices=auto"], "trainer.devices=auto depends on the machine: give --world N"),
        (["--world=2", "--trainer.strategy=deepspeed"], "set auto, ddp, ddp_fork, fsdp2"),
        (["--world=2", "--trainer.max_step=3"], "max_step"),
        (
            ["--world=1", "--trainer.num_nodes=2"],
            "--world=1 cannot be shared evenly by trainer.num_nodes=2",
        ),
        (
            ["--world=2", "--trainer.precision=transformer-engine"],
            "trainer.precision=transformer-engine: plan knows",
        ),
    ):
        assert main(["plan", *base, *args]) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]


K2 = {  # Kimi-K2's sizes
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 163840, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 64,
    "num_key_value_heads": 64, "n_routed_experts": 384, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 1, "topk_group": 1, "tie_word_embeddings": False,
}  # fmt: skip


def test_a_trillion_parameters_on_many_devices(
    base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its published sizes are 1.04 trillion parameters, of which a token meets 32 billion."""
    (tmp_path / "config.json").write_text(json.dumps(K2))
    given = [f"--model.target.source={tmp_path}", "--model.target.dtype=bfloat16", "--data.seq_len=4096",
             "--data.batch_size=8", "--trainer.precision=bf16-mixed"]  # fmt: skip
    device = ["--world=128", "--device=h200", "--target_bits=8"]
    plan = told(capsys, *device, *base, *given)
    assert plan["target_parameters"] == pytest.approx(1.03e12, rel=0.01)
    # with attention, without its head
    assert plan["flops_per_token"]["target"] / 2 == pytest.approx(33e9, rel=0.05)
    found = plan["on_devices"]
    assert (
        not found["on_the_fly"]["fits"]
        and found["streamed"]["fits"]
        and found["cached"]["disk_bytes"] is None
    )
    assert found["streamed"]["devices_of_a_producer"] == 16  # a terabyte, 120 GB on each
    rate, each = (
        found["streamed"]["tokens_per_second"],
        0.35 * 989e12 / plan["flops_per_token"]["target"],
    )
    # no more than are needed
    assert 0 <= found["streamed"]["devices_of_producers"] - rate / each < 16
    assert found["streamed"]["step_seconds"] < found["on_the_fly"]["step_seconds"]
    float8 = ["--model.features=Streamed", "--model.features.dtype=float8_e4m3fn"]
    small = told(capsys, *device, *base, *given, *float8)
    assert plan["feature_bytes_per_token"] == 4 * 7168 * 2 and small[
        "feature_bytes_per_token"
    ] == 4 * (7168 + 4)
    # the target in the step is whole, still
    parts = told(capsys, *device, *base, *given, "--model.target.parts=true")
    assert (
        parts["on_devices"]["on_the_fly"]["memory_bytes"]
        == found["on_the_fly"]["memory_bytes"]
        > 2e12
    )
    share = small["on_devices"]["streamed"]["network_share"] / found["streamed"]["network_share"]
    assert share == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_a_token_meets_some_of_the_experts(family: str) -> None:
    """Two of four."""
    model = make(family)
    text = model.config.get_text_config()
    chosen, all_of_them = text.num_experts_per_tok, 4
    routed = sum(
        p.numel()
        for n, p in model.named_parameters()
        if ".experts." in n and not n.endswith("bias")
    )
    one, T = target_flops(model, 8), 8
    text.num_experts_per_tok = all_of_them
    assert target_flops(model, T) - one == pytest.approx(2 * routed * (1 - chosen / all_of_them))


@pytest.mark.parametrize("recompute", [False, True])
def test_operations_are_those_that_torch_counts(recompute: bool) -> None:
    """A training step and the target's forward, so wide that attention, whose unseen pairs torch counts, is little."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    target, T = (
        Target(LlamaForCausalLM(LlamaConfig(vocab_size=512, num_key_value_heads=2, **sizes))),
        64,
    )
    spec = DrafterSpec(draft_vocab_size=200, aux_layers=[1, 2, 4])
    config = DrafterConfig.for_target(
        spec,
        target.config,
        vocab_size=target.vocab_size,
        num_target_layers=target.num_layers,
        identity={},
    )
    drafter = Drafter(config, torch.arange(200))
    drafter.embed_tokens.requires_grad_(False)
    objective = ObjectiveConfig(steps=3, kernel=Dense(), in_vocab=False, recompute=recompute)
    ids_BT = torch.randint(0, target.vocab_size, (2, T))
    batch = Batch(ids_BT, torch.ones_like(ids_BT, dtype=torch.bool), torch.zeros_like(ids_BT))
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        given = target.forward(ids_BT, View.packed(batch.documents_BT), config.aux_layers, False)
    teacher = target_outputs(target, drafter, batch, objective, False, Given(given))
    with FlopCounterMode(display=False) as step:
        TrainStep(drafter, objective)(batch, teacher, measure=False).loss.backward()
    ours = target_flops(target.model, T), sum(drafter_flops(config, objective, True, T).values())
    for planned, counter in zip(ours, (forward, step), strict=True):
        assert planned == pytest.approx(counter.get_total_flops() / ids_BT.numel(), rel=0.15)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--device=abacus"], "abacus"),
        (["--device=h100", "--efficiency=0"], "--efficiency must be above 0 and at most 1"),
        (["--device=h100", "--network=-1"], "--network a positive number"),
        (["--device=h100", "--target_bits=3"], "--target_bits"),
    ],
)
def test_devices_that_are_none(
    given: list[str], message: str, base: list[str], capsys: Any
) -> None:
    assert main(["plan", "--world=2", *given, *base]) == 2
    assert message in capsys.readouterr().err


class Given(FeatureSource):
    """Features that were worked out before."""

    def __init__(self, made: TargetOutput) -> None:
        self.made = made

    def __call__(self, *_: Any) -> TargetOutput:
        return self.made
