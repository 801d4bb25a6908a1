"""A drafter in the layout of Kimi K2.6's: EAGLE-3.1 with multi-head latent attention, in several files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.diagnostics.anchors import AnsweredText
from specdec.diagnostics.parity_compare import compare_drafting
from specdec.drafter import MLA, PostNorm
from specdec.export import NotServable, export_drafter, import_drafter
from tests.export.made import same_state
from tests.tiny import HIDDEN, VOCAB, tiny_target

H, D, HEADS, Q, KV, PLAIN, TURNED, VALUES = HIDDEN, 40, 4, 10, 256, 6, 64, 5
CONFIG = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "vocab_size": VOCAB, "hidden_size": H,
    "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
    "q_lora_rank": Q, "kv_lora_rank": KV, "qk_nope_head_dim": PLAIN, "qk_rope_head_dim": TURNED, "v_head_dim": VALUES,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 512, "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
    "draft_vocab_size": D, "fc_norm": True, "norm_output": True, "tie_word_embeddings": False,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True},
}  # fmt: skip


def tensors(q_rank: int) -> dict[str, Tensor]:
    """Every name that vLLM's class loads."""
    torch.manual_seed(3)
    queries = {
        "q_a_proj": (q_rank, 2 * H),
        "q_a_layernorm": (q_rank,),
        "q_b_proj": (HEADS * (PLAIN + TURNED), q_rank),
    }
    attention: dict[str, tuple[int, ...]] = {
        **(queries if q_rank else {"q_proj": (HEADS * (PLAIN + TURNED), 2 * H)}),
        "kv_a_proj_with_mqa": (KV + TURNED, 2 * H), "kv_a_layernorm": (KV,),
        "kv_b_proj": (HEADS * (PLAIN + VALUES), KV), "o_proj": (H, HEADS * VALUES),
    }  # fmt: skip
    layer: dict[str, tuple[int, ...]] = {
        f"self_attn.{name}": shape for name, shape in attention.items()
    }
    layer |= {"mlp.gate_proj": (48, H), "mlp.up_proj": (48, H), "mlp.down_proj": (H, 48)}
    layer |= dict.fromkeys(("input_layernorm", "hidden_norm", "post_attention_layernorm"), (H,))
    shapes = {f"midlayer.{name}": shape for name, shape in layer.items()}
    shapes |= {
        "fc": (H, 3 * H),
        "norm": (H,),
        "lm_head": (D, H),
        **{f"fc_norm.{n}": (H,) for n in range(3)},
    }
    made = {
        f"{name}.weight": torch.randn(shape) * (len(shape) > 1 or 0.3)
        for name, shape in shapes.items()
    }
    ids_D = torch.randperm(VOCAB)[:D].sort().values
    members_V = torch.zeros(VOCAB, dtype=torch.bool)
    members_V[ids_D] = True
    return made | {"d2t": ids_D - torch.arange(D), "t2d": members_V}


@pytest.mark.parametrize("q_rank", [Q, 0])
def test_every_tensor_has_its_place(q_rank: int, tmp_path: Path) -> None:
    """By the reference of vLLM's class, which shares no code with the drafter: it reads the same files."""
    folder, target = tmp_path / "kimi", tiny_target(dtype=torch.float32)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"q_lora_rank": q_rank or None}))
    parts = sorted(tensors(q_rank).items())
    for number, part in enumerate((parts[::2], parts[1::2]), 1):
        save_file(dict(part), folder / f"model-{number:05}-of-00002.safetensors")
    drafter = import_drafter(folder, target)
    assert drafter.config.attention == MLA(q_rank, KV, PLAIN, TURNED, VALUES)
    assert (drafter.config.aux_layers, drafter.config.recurrence) == ((2, 3, 4), PostNorm())
    assert (drafter.config.head_dim, drafter.config.num_key_value_heads) == (PLAIN + TURNED, HEADS)
    if not q_rank:
        with pytest.raises(NotServable, match="q_lora_rank 0"):
            export_drafter(drafter, target, tmp_path / "again")
        return
    export_drafter(drafter, target, tmp_path / "again")
    assert same_state(import_drafter(tmp_path / "again", target), drafter)
    text = AnsweredText("", torch.randint(VOCAB, (60,)).tolist(), 20)
    found = compare_drafting(target, drafter, [text, text], 4, tmp_path / "again")
    assert found.equal and found.not_compared is None, found
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    for key in (
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
    ):
        assert config[key] == CONFIG[key]
    # as the engine would refuse or misread it
    (tmp_path / "again" / "config.json").write_text(json.dumps(config | {"norm_before_fc": True}))
    assert "norm_before_fc" in str(
        compare_drafting(target, drafter, [text, text], 4, tmp_path / "again").not_compared
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": "8"}, "kv_lora_rank is '8', wanted a whole number"),
        ({"kv_lora_rank": None}, r"attention \(MLA\) it lacks kv_lora_rank in config.json"),
        ({"kv_lora_rank": 0}, "kv_lora_rank must be at least 1"),
        ({"v_head_dim": 71}, "is wider than a key"),
        ({"qk_rope_head_dim": 3}, "qk_rope_head_dim must be even, not 3"),
        ({"qk_nope_head_dim": 7}, r"q_b_proj.weight is \[280, 10\], the config says \[284, 10\]"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    save_file(tensors(Q), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message) as caught:
        import_drafter(tmp_path, tiny_target(dtype=torch.float32))
    assert "\n" not in str(caught.value)


def test_sizes_without_tensors_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({k: v for k, v in CONFIG.items() if k != "kv_lora_rank"})
    )
    save_file(tensors(Q), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="it lacks kv_lora_rank"):
        import_drafter(tmp_path, tiny_target(dtype=torch.float32))
