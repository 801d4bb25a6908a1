"""The reference of the engine: it stands alone, and turns as transformers does."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from specdec.diagnostics import (
    parity_files,
    parity_gguf,
    parity_quantized,
    parity_reference,
    parity_settings,
)
from specdec.diagnostics.parity_reference import rotate
from specdec.diagnostics.parity_settings import Misread, read_settings, rotary
from tests.export.test_round_trip import ROPES

RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 512,
    "eagle_aux_hidden_state_layer_ids": [4, 2, 3],
}


def test_it_imports_nothing_of_the_drafter() -> None:
    files = parity_files, parity_gguf, parity_quantized, parity_reference, parity_settings
    imported: set[str] = set()
    for module in files:
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0 and node.module is not None
                imported.add(node.module)
    imported -= {module.__name__ for module in files}
    # the module's own folder, and the message of a package that is missing
    imported -= {"specdec.diagnostics", "specdec.utils.extras"}
    others = {name.split(".")[0] for name in imported}
    assert others == {
        "collections",
        "gguf",
        "json",
        "math",
        "pathlib",
        "re",
        "safetensors",
        "torch",
        "transformers",
        "typing",
    }


@pytest.mark.parametrize(
    "rope", [{"rope_type": "default", "rope_theta": 5e5}, *ROPES[1:]], ids=lambda x: x["rope_type"]
)
def test_frequencies_are_transformers_own(rope: dict[str, Any]) -> None:
    raw = {"max_position_embeddings": 512, "rope_parameters": rope}
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, head_dim=12, **raw)
    theirs = LlamaRotaryEmbedding(config)
    ours = rotary(raw, 12)
    assert torch.equal(ours[0], theirs.inv_freq) and ours[1] == theirs.attention_scaling
    x, positions = torch.randn(3, 5, 12), torch.tensor([0, 1, 7, 8, 300])
    cos, sin = theirs(x, positions[None])
    wanted, _ = apply_rotary_pos_emb(x[None], x[None], cos, sin)
    torch.testing.assert_close(rotate(x, positions, ours), wanted[0], rtol=1e-6, atol=1e-6)


def test_both_spellings_of_a_rope_and_which_wins() -> None:
    old = rotary({"rope_theta": 5e5}, 12)
    assert torch.equal(
        old[0], rotary({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 12)[0]
    )
    both = {"rope_theta": 3.0, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert torch.equal(old[0], rotary(both, 12)[0])
    scaled = {
        "rope_theta": 5e5,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "max_position_embeddings": 64,
    }
    assert torch.equal(rotary(scaled, 12)[0], old[0] / 2)
    assert len(rotary({"rope_theta": 5e5, "partial_rotary_factor": 0.5}, 12)[0]) == 3
    x, positions = torch.randn(1, 2, 12), torch.tensor([1, 2])
    assert torch.equal(
        rotate(x, positions, rotary({"rope_theta": 5e5, "partial_rotary_factor": 0.5}, 12))[
            ..., 6:
        ],
        x[..., 6:],
    )


def test_what_an_engine_assumes_of_absent_keys() -> None:
    read = read_settings(RAW, "eagle3")
    assert read.aux_ids == (2, 3, 4)  # sorted, whatever the file says
    assert (read.drafts, read.target_width, read.head, read.logit_scale) == (61, 32, 8, 1.0)
    switches = (read.norm_before_residual, read.norm_before_fc, read.fc_norm, read.norm_output)
    assert not any(switches) and not read.head_norms and read.windows == (None,)
    nested = {"eagle_config": {"norm_before_fc": True}, "norm_before_fc": False}
    assert read_settings(RAW | nested, "eagle3").norm_before_fc  # the nested one wins
    assert read_settings(
        RAW | {"layer_types": ["sliding_attention"], "sliding_window": 16}, "eagle3"
    ).windows == (16,)
    qwen3 = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
    assert read_settings(RAW | qwen3, "eagle3").head_norms


def test_eagle_one_knows_no_states_and_no_vocabulary_of_its_own() -> None:
    read = read_settings(
        RAW | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 40}, "eagle"
    )
    assert read.aux_ids == () and read.drafts == 61
    with pytest.raises(Misread, match="name no class"):
        read_settings(RAW | {"architectures": ["Qwen3ForCausalLM"]}, "eagle")


def test_the_speculators_format_has_defaults_of_its_own() -> None:
    layer = {
        key: value for key, value in RAW.items() if not key.startswith(("architectures", "eagle_"))
    }
    top = {
        "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
        "speculators_config": {},
        "transformer_layer_config": layer,
    }
    assert read_settings(top, "eagle3").norm_before_residual
    assert not read_settings(top | {"norm_before_residual": False}, "eagle3").norm_before_residual
    with pytest.raises(Misread, match="a model_type at the top"):
        read_settings(top | {"model_type": "llama"}, "eagle3")
    four = top | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4], "num_aux_hidden_states": 4}
    with pytest.raises(Misread, match="fc is made for 3"):
        read_settings(four, "eagle3")  # the top-level number is not handed on
    four["transformer_layer_config"] = layer | {"num_aux_hidden_states": 4}
    assert read_settings(four, "eagle3").aux_ids == (1, 2, 3, 4)
