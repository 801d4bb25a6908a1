"""Where models keep their parts, what cannot be driven, and what a family does after its head."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MambaConfig,
    MambaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from specdec.target import Target
from specdec.target.model_parts import model_parts, rope_limit
from tests.target.zoo import GEMMA, LAYERS, SIZES, VOCAB, WIDTH, WINDOW, make

T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "vocab_size": 96}
FALCON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}


REFUSED = {
    "encoder-decoder": lambda: T5ForConditionalGeneration(T5Config(**T5)),
    "Mamba.*takes no position_ids": lambda: MambaForCausalLM(
        MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=96)
    ),
    "recurrent state, and no layer_types": lambda: RwkvForCausalLM(
        RwkvConfig(hidden_size=32, num_hidden_layers=2, vocab_size=96)
    ),
    "attention is chunked": lambda: Llama4ForCausalLM(Llama4TextConfig(**SIZES, num_local_experts=2)),
    "ALiBi": lambda: FalconForCausalLM(FalconConfig(**FALCON, alibi=True)),
    "takes no position_ids": lambda: BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=96)),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_families_that_a_tree_cannot_drive(reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Target(REFUSED[reason]())


def test_attention_that_takes_no_mask_is_refused() -> None:
    model = make("llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2', which takes no tree mask"):
        Target(model)


def test_an_attention_cap_that_sdpa_leaves_out_is_refused() -> None:
    model = make("gemma2")
    model.config._attn_implementation_internal = "sdpa"
    with pytest.raises(ValueError, match="attn_implementation='eager'"):
        Target(model)


def test_bidirectional_attention_is_refused() -> None:
    model = make("gemma3_text")
    model.config.use_bidirectional_attention = True
    with pytest.raises(ValueError, match="bidirectional"):
        Target(model)


def test_a_quantized_head_is_refused() -> None:
    model = make("llama")
    model.lm_head = torch.nn.Identity()
    with pytest.raises(ValueError, match="linear, unquantized output head, found Identity"):
        Target(model)


@pytest.mark.parametrize(
    ("family", "windows"),
    [
        ("llama", (None,) * LAYERS),
        ("mistral", (WINDOW,) * LAYERS),
        ("gemma3_wrapper", (WINDOW, None) * (LAYERS // 2)),
        ("qwen2_windows_above", (None, None, WINDOW, WINDOW)),
    ],
)
def test_windows(family: str, windows: tuple[int | None, ...]) -> None:
    parts = model_parts(make(family))
    assert (
        tuple(parts.config.sliding_window if sliding else None for sliding in parts.sliding)
        == windows
    )


def test_parts_of_a_wrapper_are_the_text_models() -> None:
    anatomy = model_parts(make("gemma3_wrapper"))
    assert (
        anatomy.config.model_type == "gemma3_text"
        and anatomy.config.sliding_window == GEMMA["sliding_window"]
    )
    assert len(anatomy.layers) == LAYERS


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, None),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, None),
        ({"rope_type": "dynamic", "factor": 2.0}, 128),
        ({"rope_type": "longrope", "original_max_position_embeddings": 64}, 64),
        (
            {
                "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 48},
                "other": {},
            },
            48,
        ),
    ],
)
def test_rope_limit(rope: dict, limit: int | None) -> None:
    config = make("llama").config
    config.rope_parameters = rope
    assert rope_limit(config) == limit


@pytest.mark.parametrize(
    ("family", "after"),
    [
        ("granite", lambda logits: logits / 3.0),
        ("hyperclovax", lambda logits: logits * 3.0),
        ("gemma2", lambda logits: 3.0 * torch.tanh(logits / 3.0)),
        ("cohere2", lambda logits: logits * 0.3),
    ],
)
def test_what_the_family_does_after_the_head(
    family: str, after: Callable[[Tensor], Tensor]
) -> None:
    model = make(family)
    head = model.get_output_embeddings()
    state_1TH = torch.randn(1, 3, WIDTH, dtype=torch.float64)
    logits_1TV = Target(model).logits(state_1TH)
    torch.testing.assert_close(logits_1TV, after(state_1TH @ head.weight.T))


def test_rows_keep_their_bias() -> None:
    model = make("phi")
    head = model.get_output_embeddings()
    state_1TH, rows_D = (
        torch.randn(1, 3, WIDTH, dtype=torch.float64),
        torch.tensor([7, 7, VOCAB - 1]),
    )
    logits_1TD = Target(model).logits(state_1TH, rows_D)
    torch.testing.assert_close(logits_1TD, state_1TH @ head.weight[rows_D].T + head.bias[rows_D])


def test_a_head_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    monkeypatch.setattr(model, "get_output_embeddings", lambda: nn.Linear(2, 2))
    with pytest.raises(ValueError, match="not its own direct parts"):
        model_parts(model)
