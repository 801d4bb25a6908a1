"""Modules of multi-token prediction (MTP, https://arxiv.org/abs/2412.19437) in plain torch, by their checkpoints.

Legend: T rows of tokens, H hidden, V vocabulary, h heads, d head width, E experts.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from benchmarks.imports.forward import Said, halves, neighbours, yarn

# by model_type: how the tensors begin, where the layer's are, and which state goes on to the next step
# whether the normed state goes on
NUMBERED = {"deepseek_v3": True, "glm4_moe": False, "glm4_moe_lite": False}
NAMES = {
    True: {"embed": "enorm", "hidden": "hnorm", "fc": "eh_proj", "norm": "shared_head.norm"},
    False: {
        "embed": "pre_fc_norm_embedding",
        "hidden": "pre_fc_norm_hidden",
        "fc": "fc",
        "norm": "norm",
    },
}


class Module:
    """A module out of a checkpoint's directory, with the target's embedding and head."""

    def __init__(self, directory: Path, embedding_VH: Tensor, head_VH: Tensor) -> None:
        self.keys: dict[str, Any] = json.loads((directory / "config.json").read_text())
        self.kind = self.keys["model_type"]
        self.numbered = self.kind in NUMBERED
        prefix = f"model.layers.{self.keys['num_hidden_layers']}." if self.numbered else "mtp."
        tensors = {
            name: x
            for file in directory.glob("*.safetensors")
            for name, x in load_file(file).items()
        }
        self.w = {
            name.removeprefix(prefix): x.double()
            for name, x in tensors.items()
            if name.startswith(prefix)
        }
        self.at = "" if self.numbered else "layers.0."
        self.from_one = not self.numbered  # Qwen3-Next's norms count their weights from one
        self.embedding_VH, self.head_VH = embedding_VH.double(), head_VH.double()

    def norm(self, name: str, x: Tensor, from_one: bool | None = None) -> Tensor:
        weight = self.w[f"{name}.weight"] + (self.from_one if from_one is None else from_one)
        eps = self.keys.get("rms_norm_eps", 1e-6) if "a_layernorm" not in name else 1e-6
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def rows(self, tokens_T: Tensor, h_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's state and what the head reads of it, (T, H) both."""
        names = NAMES[self.numbered]
        e_TH = self.norm(names["embed"], self.embedding_VH[tokens_T])
        x_TH = self.linear(names["fc"], torch.cat([e_TH, self.norm(names["hidden"], h_TH)], 1))
        x_TH = x_TH + self.attention(self.norm(f"{self.at}input_layernorm", x_TH))
        x_TH = x_TH + self.feed_forward(self.norm(f"{self.at}post_attention_layernorm", x_TH))
        return x_TH, self.norm(names["norm"], x_TH)

    def said(self, tokens_T: Tensor, h_TH: Tensor, depth: int) -> Said:
        """What it says of a text, and in a chain after it."""
        raw_TH, normed_TH = self.rows(tokens_T, h_TH)
        first_TV = normed_TH @ self.head_VH.T
        chain = [first_TV[-1]]
        for _ in range(depth - 1):
            fed_TH = normed_TH if NUMBERED.get(self.kind, True) else raw_TH
            tokens_T, h_TH = (
                torch.cat([tokens_T, chain[-1].argmax()[None]]),
                torch.cat([h_TH, fed_TH[-1:]]),
            )
            raw_TH, normed_TH = self.rows(tokens_T, h_TH)
            chain.append(normed_TH[-1] @ self.head_VH.T)
        return Said(first_TV, torch.stack(chain))

    # --- attention ---------------------------------------------------------------------------------------------------

    def attention(self, x_TH: Tensor) -> Tensor:
        at, gate = f"{self.at}self_attn.", None
        if "kv_lora_rank" in self.keys:
            q, k, v, scale = self.latent(at, x_TH)
        else:
            q, k, v, gate = self.grouped(at, x_TH)
            scale = q.shape[-1] ** -0.5
        scores_hTT = torch.einsum("thd,shd->hts", q, k) * scale
        later_TT = torch.ones(len(x_TH), len(x_TH), dtype=torch.bool).triu(1)
        mixed = torch.einsum(
            "hts,shd->thd", scores_hTT.masked_fill(later_TT, -torch.inf).softmax(-1), v
        ).flatten(1)
        return self.linear(f"{at}o_proj", mixed if gate is None else mixed * gate.sigmoid())

    def grouped(self, at: str, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """With norms on heads; Qwen3-Next's queries come with a gate for each channel of the sum."""
        h, d = self.keys["num_attention_heads"], self.keys["head_dim"]
        q = self.linear(f"{at}q_proj", x_TH).unflatten(1, (h, -1))
        k, v = (self.linear(f"{at}{name}_proj", x_TH).unflatten(1, (-1, d)) for name in "kv")
        gate = None if self.numbered else q[..., d:].flatten(1)
        q, k = self.norm(f"{at}q_norm", q[..., :d]), self.norm(f"{at}k_norm", k)
        block = self.keys["rope_parameters"]
        width = int(d * block.get("partial_rotary_factor", 1.0))
        cos, sin = tables(block, width, len(x_TH))
        q, k = (torch.cat([halves(x[..., :width], cos, sin), x[..., width:]], -1) for x in (q, k))
        share = h // k.shape[1]
        return q, k.repeat_interleave(share, 1), v.repeat_interleave(share, 1), gate

    def latent(self, at: str, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
        """Of multi-head latent attention, whose rotated channels are pairs of neighbours."""
        h, kv = self.keys["num_attention_heads"], self.keys["kv_lora_rank"]
        plain, turned = self.keys["qk_nope_head_dim"], self.keys["qk_rope_head_dim"]
        q = self.linear(
            f"{at}q_b_proj", self.norm(f"{at}q_a_layernorm", self.linear(f"{at}q_a_proj", x_TH))
        )
        q, both = q.unflatten(1, (h, -1)), self.linear(f"{at}kv_a_proj_with_mqa", x_TH)
        spread = self.linear(
            f"{at}kv_b_proj", self.norm(f"{at}kv_a_layernorm", both[:, :kv])
        ).unflatten(1, (h, -1))
        block = self.keys["rope_parameters"]
        cos, sin = tables(block, turned, len(x_TH))
        q = torch.cat([q[..., :plain], neighbours(q[..., plain:], cos, sin)], -1)
        shared = neighbours(both[:, None, kv:], cos, sin).expand(-1, h, -1)
        scale = (plain + turned) ** -0.5
        if block["rope_type"] == "yarn":
            stretch = (
                torch.tensor(block["factor"], dtype=torch.float64).log()
                * 0.1
                * block["mscale_all_dim"]
                + 1
            )
            scale *= float(stretch) ** 2
        return q, torch.cat([spread[..., :plain], shared], -1), spread[..., plain:], scale

    # --- feed-forward ------------------------------------------------------------------------------------------------

    def mlp(self, at: str, x: Tensor) -> Tensor:
        return self.linear(
            f"{at}down_proj",
            F.silu(self.linear(f"{at}gate_proj", x)) * self.linear(f"{at}up_proj", x),
        )

    def feed_forward(self, x_TH: Tensor) -> Tensor:
        """Dense, or experts beside one that sees every token."""
        at = f"{self.at}mlp."
        if f"{at}gate.weight" not in self.w:
            return self.mlp(at, x_TH)
        scores_TE = self.linear(f"{at}gate", x_TH)
        if self.numbered:
            share_TE, extra_TH = (
                self.sigmoid_shares(scores_TE),
                self.mlp(f"{at}shared_experts.", x_TH),
            )
        else:
            share_TE = _greatest(scores_TE.softmax(-1), scores_TE, self.keys["num_experts_per_tok"])
            share_TE = share_TE / share_TE.sum(-1, keepdim=True)
            extra_TH = self.linear(f"{at}shared_expert_gate", x_TH).sigmoid() * self.mlp(
                f"{at}shared_expert.", x_TH
            )
        experts = [
            self.mlp(f"{at}experts.{e}.", x_TH) * share_TE[:, e, None]
            for e in range(share_TE.shape[1])
        ]
        return torch.stack(experts).sum(0) + extra_TH

    def sigmoid_shares(self, scores_TE: Tensor) -> Tensor:
        """DeepSeek-V3's: the best groups of experts, the best experts in them, chosen with a bias that has no share."""
        groups, most_groups = self.keys["n_group"], self.keys["topk_group"]
        share_TE = scores_TE.sigmoid()
        wanted_TE = share_TE + self.w[f"{self.at}mlp.gate.e_score_correction_bias"]
        by_group = wanted_TE.unflatten(1, (groups, -1))
        best = by_group.topk(2, -1).values.sum(-1)
        allowed = _greatest(torch.ones_like(best), best, most_groups).bool()
        wanted_TE = by_group.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
        share_TE = _greatest(share_TE, wanted_TE, self.keys["num_experts_per_tok"])
        if self.keys.get("norm_topk_prob", True):
            share_TE = share_TE / share_TE.sum(-1, keepdim=True)
        return share_TE * self.keys["routed_scaling_factor"]


def _greatest(values: Tensor, by: Tensor, count: int) -> Tensor:
    """Zero but at the ``count`` greatest ``by``."""
    return torch.zeros_like(values).scatter(-1, by.topk(count, -1).indices, 1.0) * values


def tables(block: Mapping[str, Any], width: int, rows: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the default rope or yarn, (T, width / 2), angles in single precision."""
    inverse = 1.0 / block["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    factor = 1.0
    if block["rope_type"] == "yarn":
        inverse, factor = yarn(inverse, block, block["rope_theta"], width)
    angles = torch.arange(rows, dtype=torch.float32)[:, None] * inverse
    return angles.cos().double() * factor, angles.sin().double() * factor


REFUSED = {  # by a class, a tensor of its module's
    "MiMoForCausalLM": "model.mtp_layers.0.input_proj.weight",
    "Qwen3_5MoeForConditionalGeneration": "mtp.fc.weight",
    "Ernie4_5_MoeForCausalLM": "model.mtp_block.0.mlp.up_proj.weight",
    "ExaoneMoEForCausalLM": "mtp.fc.weight",
}
PUBLISHED = {  # by model_type, whose checkpoints have such a module
    "deepseek_v3": "deepseek-ai/DeepSeek-V3", "glm4_moe": "zai-org/GLM-4.5", "glm4_moe_lite": "zai-org/GLM-4.7-Flash",
    "qwen3_next": "Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3_5_text": "Qwen/Qwen3.5 (dense)",
}  # fmt: skip
