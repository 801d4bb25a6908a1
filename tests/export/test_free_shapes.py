"""Heads and boundaries chosen freely: refused before training, or trained, written and read back equal."""

import dataclasses
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from specdec.data import Batch
from specdec.drafter import MLA, Drafter, DrafterSpec, Norms
from specdec.export import FORMATS, export_drafter, import_checkpoint, read_checkpoint, subject_of
from specdec.export.read import contradictions
from specdec.export.switches import lint
from specdec.target import Target
from specdec.training.building import check_shapes, config_for, new_drafter
from specdec.training.step import ObjectiveConfig, TrainStep, target_outputs
from tests.export.made import same_state
from tests.tiny import LAYERS, VOCAB, llama_config, tiny_target

TARGET = tiny_target(dtype=torch.float32)
NUMBERS = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])


def learns(drafter: Drafter, target: Target) -> None:
    """A step of training reaches every weight but the frozen ones."""
    ids = torch.arange(40)[None] % VOCAB
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids))
    objective = ObjectiveConfig(steps=2)
    outputs = target_outputs(target, drafter, batch, objective, False)
    TrainStep(drafter, objective)(batch, outputs, False).loss.backward()
    assert all(
        p.grad is not None and bool(p.grad.isfinite().all())
        for p in drafter.parameters()
        if p.requires_grad
    )


def comes_back(drafter: Drafter, target: Target, format: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        export_drafter(drafter, target, Path(place) / "made", format)
        back = import_checkpoint(read_checkpoint(Path(place) / "made"), target)
    assert not contradictions(drafter.config, back.config) and same_state(drafter, back)


@pytest.mark.slow
@given(
    heads=st.just("target") | NUMBERS,
    groups=st.just("target") | NUMBERS,
    width=st.just("target") | st.sampled_from([2, 5, 6, 10, 16, 34]),
    boundaries=st.just("default")
    | st.sets(st.integers(0, LAYERS), min_size=1, max_size=5).map(sorted),
    query_key=st.booleans(),
    hidden=st.sampled_from(["target", "target", 24, 40]),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_a_free_shape_is_refused_or_trained_and_comes_back(
    heads: object,
    groups: object,
    width: object,
    boundaries: object,
    query_key: bool,
    hidden: object,
) -> None:
    try:
        spec = DrafterSpec(
            norms=Norms("each", query_key=query_key), num_attention_heads=heads, num_key_value_heads=groups,
            head_dim=width, aux_layers=boundaries, hidden_size=hidden, draft_vocab_size=40,
        )  # fmt: skip
        config = config_for(spec, TARGET)
        check_shapes(config)
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert "set " in refusal and "\n" not in refusal
        return
    chosen = {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": width,
        "hidden_size": hidden,
    }
    assert all(getattr(config, name) == size for name, size in chosen.items() if size != "target")
    drafter = new_drafter(TARGET, spec, torch.ones(VOCAB, dtype=torch.int64))
    assert drafter.config == config and config_for(config.design(), TARGET) == config
    learns(drafter, TARGET)
    subject = subject_of(drafter.requires_grad_(False), TARGET)
    formats = [
        format for format in ("vllm", "sglang") if not any(lint(subject, FORMATS[format].engine))
    ]
    assert "vllm" in formats
    for format in formats:
        comes_back(drafter, TARGET, format)


@pytest.mark.parametrize(
    "spec", [DrafterSpec(num_attention_heads=16, num_key_value_heads=1, head_dim=10)]
)
def test_free_heads_are_speculators_too(spec: DrafterSpec) -> None:
    spec = dataclasses.replace(spec, draft_vocab_size=40)
    drafter = new_drafter(TARGET, spec, torch.ones(VOCAB, dtype=torch.int64)).requires_grad_(False)
    comes_back(drafter, TARGET, "speculators")


def test_latent_attention_refuses_heads_with_the_reason() -> None:
    with pytest.raises(
        ValueError,
        match=r"^head_dim 64 belongs to attention GQA: attention MLA has as many heads as",
    ):
        DrafterSpec(attention=MLA(10, 256, 6, 64, 5), head_dim=64)


def undivided(heads: int, groups: int) -> Target:
    """A target whose heads do not divide its width, which some families allow."""
    torch.manual_seed(0)
    sizes = {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": 8}
    return Target(
        Qwen3ForCausalLM(
            Qwen3Config(**{**llama_config().to_dict(), **sizes, "model_type": "qwen3"})
        )
    )


def test_a_width_that_the_heads_do_not_divide_is_refused_with_numbers_that_work() -> None:
    """GLM-4.5-Air's shape, smaller: transformers' LlamaConfig refuses it, and with it every engine."""
    target = undivided(12, 2)
    spec = DrafterSpec(draft_vocab_size=40)
    with pytest.raises(
        ValueError,
        match=r"hidden_size 32 is no multiple of num_attention_heads 12.*num_attention_heads to 8 or 4",
    ):
        check_shapes(config_for(spec, target))
    for way_out in ({"num_attention_heads": 8}, {"norms": Norms("each", query_key=True)}):
        mended = dataclasses.replace(spec, **way_out)
        check_shapes(config_for(mended, target))
        drafter = new_drafter(target, mended, torch.ones(VOCAB, dtype=torch.int64)).requires_grad_(
            False
        )
        comes_back(drafter, target, "vllm")
    odd = undivided(9, 3)
    with pytest.raises(
        ValueError, match=r"set model.drafter.num_attention_heads and num_key_value_heads to 8 or 4"
    ):
        check_shapes(config_for(spec, odd))
