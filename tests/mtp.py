"""Tiny random targets with a module of multi-token prediction (MTP), made of transformers' own parts.

Legend: B batch, T tokens, H hidden.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from specdec.target import Target
from tests.tiny import HIDDEN, VOCAB

BASE = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 4,
    "max_position_embeddings": 512, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "bos_token_id": None,
    "eos_token_id": None, "tie_word_embeddings": False,
    "experts_implementation": "eager",  # others lack float64
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
    "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "deepseek_v3": (DeepseekV3Config, {
        "num_hidden_layers": 2, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
        "kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
        "first_k_dense_replace": 1, "rope_parameters": YARN,
    }),
    "glm4_moe": (Glm4MoeConfig, {
        "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8, "n_routed_experts": 4, "use_qk_norm": True,
        "attention_bias": True, "num_nextn_predict_layers": 1,
    }),
    "glm4_moe_lite": (Glm4MoeLiteConfig, {
        "num_hidden_layers": 2, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
        "kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
        "mlp_layer_types": ["dense", "sparse"], "num_nextn_predict_layers": 1,
    }),
    "qwen3_5_text": (Qwen3_5TextConfig, {
        "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 16, "linear_key_head_dim": 8,
        "layer_types": ["linear_attention"] * 2 + ["full_attention"], "linear_value_head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    }),
    "qwen3_next": (Qwen3NextConfig, {
        "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "linear_key_head_dim": 8,
        "shared_expert_intermediate_size": 16, "layer_types": ["linear_attention"] * 2 + ["full_attention"],
        "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    }),
}  # fmt: skip
FAMILIES = tuple(CONFIGS)
# whose module is one layer more of the target's
NUMBERED = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
UNREAD = 5  # a token whose embedding is zero
NEXTN = {"enorm": "enorm", "hnorm": "hnorm", "fc": "eh_proj", "norm": "shared_head.norm"}
MTP = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "fc": "fc", "norm": "norm"}


def rotary_tables(rotary: Any, x_BTH: Tensor, positions_BT: Tensor) -> Any:
    """A family's own cosines and sines; those with sections get a position for each, as transformers 5.17 needs."""
    sections = hasattr(rotary, "mrope_section")
    return rotary(x_BTH, positions_BT.expand(3, -1, -1) if sections else positions_BT)


class Module(nn.Module):
    """A module as the papers and engines have it: two norms, a projection, the target's kind of layer, a norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        whole = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").model
        self.block, self.norm, self.rotary = whole.layers[-1], whole.norm, [whole.rotary_emb]
        H = config.hidden_size
        self.enorm, self.hnorm = (type(whole.norm)(H, eps=config.rms_norm_eps) for _ in range(2))
        self.fc = nn.Linear(2 * H, H, bias=False)
        for value in (*self.parameters(), *self.buffers()):
            value.data.normal_(0, 0.5)
            value.data += 0.1 * (value.ndim == 1)

    def forward(self, embedded_BTH: Tensor, hidden_BTH: Tensor) -> Tensor:
        """The state before the last norm, (B, T, H), of a text from its first token on."""
        x_BTH = self.fc(torch.cat([self.enorm(embedded_BTH), self.hnorm(hidden_BTH)], -1))
        T = x_BTH.shape[1]
        hidden_TT = torch.ones(T, T, dtype=torch.bool).triu(1)
        mask = torch.zeros(T, T, dtype=x_BTH.dtype).masked_fill(hidden_TT, float("-inf"))[
            None, None
        ]
        tables = rotary_tables(self.rotary[0], x_BTH, torch.arange(T)[None])
        made: Tensor = self.block(x_BTH, attention_mask=mask, position_embeddings=tables)
        return made

    def published(self, family: str, layers: int) -> Iterator[tuple[str, Tensor]]:
        """The tensors as checkpoints have them."""
        prefix = f"model.layers.{layers}." if family in NUMBERED else "mtp."
        for part, name in (NEXTN if family in NUMBERED else MTP).items():
            yield f"{prefix}{name}.weight", getattr(self, part).weight.data
        prefix += "layers.0." * (family not in NUMBERED)
        for name, value in self.block.state_dict().items():
            if name == "mlp.experts.gate_up_proj":
                for e, both in enumerate(value):
                    for part, half in zip(("gate", "up"), both.chunk(2), strict=True):
                        yield f"{prefix}mlp.experts.{e}.{part}_proj.weight", half
            elif name == "mlp.experts.down_proj":
                for e, one in enumerate(value):
                    yield f"{prefix}mlp.experts.{e}.down_proj.weight", one
            else:
                yield f"{prefix}{name}", value


def made(
    family: str, directory: Path, dtype: torch.dtype = torch.float64, scale: float = 1, **sizes: Any
) -> tuple[Target, Module]:
    """A target in memory and its module; both lie in ``directory``, in shards unless the family is GLM.

    Args:
        scale: of the target's matrices, for texts that do not run in circles.
    """
    torch.manual_seed(3)
    kind, own = CONFIGS[family]
    config = kind(**BASE | own | sizes)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # greedy choices are no ties
        model.model.embed_tokens.weight[UNREAD] = 0
        for value in model.model.layers.parameters():
            value.mul_(scale if value.ndim > 1 else 1)
    module = Module(config).to(dtype).requires_grad_(False)
    sharded = family != "glm4_moe"
    model.save_pretrained(directory, max_shard_size="40KB" if sharded else "5GB")
    tensors = {
        name: value.contiguous().clone()
        for name, value in module.published(family, config.num_hidden_layers)
    }
    if family in NUMBERED:  # copies that nobody reads
        beside = {"embed_tokens": model.model.embed_tokens, "shared_head.head": model.lm_head}
        place = f"model.layers.{config.num_hidden_layers}"
        tensors |= {
            f"{place}.{name}.weight": part.weight.detach().clone() for name, part in beside.items()
        }
    for name in [name for name in tensors if name.endswith("e_score_correction_bias")]:
        # as it is published
        tensors[name] = tensors[name].to(torch.promote_types(dtype, torch.float32))
    if not sharded:
        file = directory / "model.safetensors"
        save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
        return Target(model, source=str(directory)), module
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    shards = sorted({*index["weight_map"].values()})
    assert len(shards) > 1
    for n, name in enumerate(tensors):  # among the target's own, in two shards
        index["weight_map"][name] = shards[-1 - n % 2]
    for shard in shards[-2:]:
        mine = {
            name: value for name, value in tensors.items() if index["weight_map"][name] == shard
        }
        save_file(load_file(directory / shard) | mine, directory / shard, metadata={"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return Target(model, source=str(directory)), module
