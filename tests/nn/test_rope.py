"""Our rotary tables against the ones that transformers' own modules compute."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Gemma3TextConfig,
    Glm4Config,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
    StableLmConfig,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.glm4.modeling_glm4 import Glm4RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.stablelm.modeling_stablelm import StableLmRotaryEmbedding

from specdec.nn.rope import Rope, apply_rope, frequencies, rope_parameters

SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 5e4,
}
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 5e5,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.0, 2.0, 3.0, 5.0, 8.0, 13.0],
}  # fmt: skip


def llama(head_dim: int = 16, **rope: Any) -> Callable[[], tuple[PretrainedConfig, nn.Module]]:
    def make() -> tuple[PretrainedConfig, nn.Module]:
        config = LlamaConfig(**SIZES, head_dim=head_dim, rope_parameters=dict(rope))
        return config, LlamaRotaryEmbedding(config)

    return make


def family(
    config: type[PretrainedConfig], module: type[nn.Module], **values: Any
) -> Callable[[], tuple[PretrainedConfig, nn.Module]]:
    def make() -> tuple[PretrainedConfig, nn.Module]:
        made = config(**{**SIZES, **values})
        return made, module(made)

    return make


CASES: dict[str, Callable[[], tuple[PretrainedConfig, nn.Module]]] = {
    "llama": llama(rope_type="default", rope_theta=1e4),
    "theta": llama(rope_type="default", rope_theta=5e5),
    "head_dim": llama(24, rope_type="default", rope_theta=1e4),
    "linear": llama(rope_type="linear", factor=3.0, rope_theta=1e4),
    "dynamic": llama(rope_type="dynamic", factor=3.0, rope_theta=1e4),
    "yarn": llama(**YARN),
    "yarn_attention_factor": llama(**YARN, attention_factor=1.5),
    "yarn_mscale": llama(**YARN, mscale=1.0, mscale_all_dim=0.5),
    "yarn_betas_untruncated": llama(**YARN, beta_fast=16.0, beta_slow=2.0, truncate=False),
    "llama3": llama(**LLAMA3),
    "phi3": family(Phi3Config, Phi3RotaryEmbedding),
    "phi3_partial": family(Phi3Config, Phi3RotaryEmbedding, partial_rotary_factor=0.75),
    "longrope_short": family(
        Phi3Config,
        Phi3RotaryEmbedding,
        rope_parameters=dict(LONG),
        original_max_position_embeddings=128,
    ),
    "longrope_long": family(
        Phi3Config,
        Phi3RotaryEmbedding,
        rope_parameters=dict(LONG),
        original_max_position_embeddings=32,
    ),
    "glm4": family(Glm4Config, Glm4RotaryEmbedding, head_dim=16),
    "stablelm": family(StableLmConfig, StableLmRotaryEmbedding),
    "qwen3": family(Qwen3Config, Qwen3RotaryEmbedding, head_dim=32),
}


def tables(config: Any, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    flat = json.loads(json.dumps(rope_parameters(config)))  # as a drafter's config stores it
    return Rope(flat, head_dim, config.max_position_embeddings).tables(positions_BT)


@pytest.mark.parametrize("case", CASES)
def test_tables_equal_transformers_own(case: str) -> None:
    config, module = CASES[case]()
    positions = torch.stack([torch.arange(128), torch.arange(128).flip(0)])
    want = module(torch.zeros(1), positions)
    for got, own in zip(tables(config, positions), want, strict=True):
        assert got.dtype == torch.float32 and got.shape == (2, 1, 128, own.shape[-1])
        torch.testing.assert_close(got[:, 0], own, rtol=0, atol=1e-6)


def test_the_cases_differ() -> None:
    """Were two kinds alike here, one of them could be mistaken for the other unseen."""
    # as llama: the first has no scaling, the second none within the trained length
    same = ("phi3", "dynamic")
    made = [tables(CASES[name]()[0], torch.arange(128)[None]) for name in CASES if name not in same]
    for i, (cos, _) in enumerate(made):
        assert all(
            cos.shape != other.shape or not torch.allclose(cos, other) for other, _ in made[:i]
        )


def test_gemma3_takes_the_full_attention_block() -> None:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = Gemma3TextConfig(**SIZES, num_hidden_layers=6, head_dim=16, rope_parameters=rope)
    positions = torch.arange(128)[None]
    module = Gemma3RotaryEmbedding(config)
    full, sliding = (
        module(torch.zeros(1), positions, kind) for kind in ("full_attention", "sliding_attention")
    )
    for got, own, other in zip(tables(config, positions), full, sliding, strict=True):
        torch.testing.assert_close(got[:, 0], own, rtol=0, atol=1e-6)
        assert not torch.allclose(got[:, 0], other)


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
@pytest.mark.parametrize(
    "rope", [LLAMA3, YARN, {"rope_type": "linear", "factor": 3.0, "rope_theta": 2e4}], ids=str
)
def test_the_older_spelling_means_the_same(spelling: str, rope: dict[str, Any]) -> None:
    scaling = {key: value for key, value in rope.items() if key not in ("rope_type", "rope_theta")}
    old = SimpleNamespace(
        **SIZES,
        head_dim=16,
        rope_theta=rope["rope_theta"],
        rope_scaling={**scaling, spelling: rope["rope_type"]},
    )
    new, _ = llama(**rope)()
    assert rope_parameters(old) == {**rope, "rope_theta": float(rope["rope_theta"])}
    for a, b in zip(
        tables(old, torch.arange(128)[None]), tables(new, torch.arange(128)[None]), strict=True
    ):
        assert torch.equal(a, b)


def test_length_dependent_kinds_are_frozen() -> None:
    """A short sequence turns as a long one does: what is cached stays right."""
    for name in ("longrope_long", "dynamic"):
        config = CASES[name]()[0]
        short, long = (
            tables(config, torch.arange(8)[None])[0],
            tables(config, torch.arange(128)[None])[0],
        )
        assert torch.equal(short, long[:, :, :8])


def test_models_without_rotary_positions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"GPT2Config.*no rope_theta"):
        rope_parameters(GPT2Config())


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            {"rope_type": "spiral", "rope_theta": 1e4},
            "unknown rope_type 'spiral'; known: default, .*yarn",
        ),
        ({"rope_type": "linear", "rope_theta": 1e4}, "not complete for rope_type 'linear'.*factor"),
        (
            {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0},
            "not complete for rope_type 'llama3'",
        ),
        ({"rope_type": "longrope", "rope_theta": 1e4}, "not complete for rope_type 'longrope'"),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 0}, "gives no finite frequencies"),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0}, "gives no finite frequencies"),
        (
            {"rope_type": "linear", "rope_theta": 1e4, "factor": float("nan")},
            "gives no finite frequencies",
        ),
        ({"rope_type": ["default"], "rope_theta": 1e4}, r"unknown rope_type \['default'\]"),
        (
            {"rope_type": "default", "rope_theta": 0},
            "rope_theta must be a number above 0 and at most .*, not 0",
        ),
        ({"rope_type": "default", "rope_theta": "1e4"}, "rope_theta must be a number above 0"),
        (
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1e9},
            "above 0 and at most 1, not 1000",
        ),
        (
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.01},
            "no finite frequencies for heads",
        ),
    ],
    ids=str,
)
def test_blocks_that_cannot_be_used_are_refused(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        frequencies(rope, 16, 128)
    assert "\n" not in str(caught.value)


def test_turn_is_transformers_rotation() -> None:
    _, module = CASES["llama"]()
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 5, 16), torch.randn(2, 1, 5, 16)
    positions = torch.randint(0, 100, (2, 5))
    cos, sin = module(q, positions)
    ours = Rope({"rope_type": "default", "rope_theta": 1e4}, 16, 128).tables(positions)
    for got, want in zip(
        (apply_rope(q, *ours), apply_rope(k, *ours)),
        apply_rotary_pos_emb(q, k, cos, sin),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_turn_leaves_the_rest_and_the_dtype() -> None:
    rope = Rope({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, 16, 128)
    x = torch.randn(1, 2, 5, 16, dtype=torch.float64)
    turned = apply_rope(x, *rope.tables(torch.arange(5)[None] + 1))
    assert turned.dtype == torch.float64
    assert torch.equal(turned[..., 8:], x[..., 8:]) and not bool(
        (turned[..., :8] == x[..., :8]).any()
    )
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=0)
    assert apply_rope(x.bfloat16(), *rope.tables(torch.arange(5)[None])).dtype == torch.bfloat16


@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_turning_by_the_negative_sine_is_the_way_back_and_the_gradient(partial: float) -> None:
    """A rotation's transpose is its inverse; where tables carry a factor, its square remains."""
    rope = Rope(
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": partial}, 16, 128
    )
    rope.factor = 1.5
    cos, sin = rope.tables(torch.arange(5)[None] + 1)
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(1, 2, 5, 16, dtype=torch.float64, generator=generator) for _ in range(2))
    width, back = cos.shape[-1], apply_rope(apply_rope(x, cos, sin), cos, -sin)
    assert width == 16 * partial
    # float32 tables
    torch.testing.assert_close(back[..., :width], 1.5**2 * x[..., :width], rtol=0, atol=1e-6)
    assert torch.equal(back[..., width:], x[..., width:])
    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad((apply_rope(leaf, cos, sin) * grad).sum(), leaf)
    torch.testing.assert_close(apply_rope(grad, cos, -sin), wanted, rtol=0, atol=1e-15)


def test_a_cast_module_keeps_its_frequencies() -> None:
    """``drafter.to(bfloat16)`` must not round the angles: at position 1000 they would be off by radians."""
    rope = Rope({"rope_type": "default", "rope_theta": 1e4}, 16, 128)
    before = rope.tables(torch.arange(128)[None])
    after = rope.to(torch.bfloat16).tables(torch.arange(128)[None])
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_rope_type_has_precedence_over_type() -> None:
    """As in transformers; Qwen2-VL carries both, ``type: mrope`` and ``rope_type: default``."""
    block = {"type": "mrope", "rope_type": "default", "rope_theta": 1e6}
    assert rope_parameters(SimpleNamespace(rope_parameters=block))["rope_type"] == "default"
