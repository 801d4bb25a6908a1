"""What the layouts mean, in plain torch: written from the papers and the engines' contracts, without specdec's code.

EAGLE-1 https://arxiv.org/abs/2401.15077, EAGLE-3 https://arxiv.org/abs/2503.01840, EAGLE-3.1
https://arxiv.org/abs/2605.09992, P-EAGLE https://arxiv.org/abs/2602.01469, DFlash https://arxiv.org/abs/2602.06036, MLA
https://arxiv.org/abs/2405.04434.

Legend: T rows of tokens, H hidden, N states, V vocabulary, D draft vocabulary, h heads, g groups of keys, d head width.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.imports.collection import Layout, flat

IDS = "eagle_aux_hidden_state_layer_ids"


class Said(NamedTuple):
    """What a drafter says, in the target's vocabulary; tokens that it lacks have minus infinity."""

    first_TV: (
        Tensor  # at every row, from the target's own states; of a block drafter its masks alone
    )
    chain_KV: Tensor  # of each draft of a chain, one after another


class Published:
    """A checkpoint and what its target lends it.

    Args:
        config: the keys of ``config.json``.
        tensors: by their published names.
        embedding_VH, head_VH: the target's.
        layers: L, of the target.
    """

    def __init__(
        self, layout: Layout, config: Mapping[str, Any], tensors: Mapping[str, Tensor], embedding_VH: Tensor,
        head_VH: Tensor,
    ) -> None:  # fmt: skip
        self.layout, self.nested, self.keys = (
            layout,
            "speculators_model_type" in config,
            flat(dict(config)),
        )
        self.w = {
            _plain(name): value.double()
            for name, value in tensors.items()
            if name not in ("d2t", "t2d")
        }
        self.eps = self.keys.get("rms_norm_eps", 1e-6)
        self.layers = len({name.split(".")[1] for name in self.w if name.startswith("layers.")})
        self.embedding_VH = self.w.get("embed_tokens.weight", embedding_VH.double())
        tied = self.keys.get("tie_word_embeddings") and "block" not in layout.extra
        self.head_DH = self.w.get("lm_head.weight", self.embedding_VH if tied else head_VH.double())
        if "narrow" in layout.extra or "block" in layout.extra:
            self.head_DH = self.w.get("lm_head.weight", head_VH.double())
        offsets = tensors.get("d2t", torch.zeros(len(self.head_DH), dtype=torch.int64))
        self.ids_D = torch.arange(len(offsets)) + offsets
        self.eagle = self.keys.get("eagle_config") or {}

    # --- which states -----------------------------------------------------------------------------------------------

    def boundaries(self) -> list[int]:
        """Layers applied before each state that ``fc`` reads, ascending; none where it reads the last state."""
        block, last = self.keys.get("dflash_config") or {}, self.layout.target_layers
        if "narrow" in self.layout.extra or self.eagle.get("use_aux_hidden_state") is False:
            return []
        if self.layout.aux_layers:
            return sorted(self.layout.aux_layers)
        if "target_layer_ids" in block:
            return sorted(i + 1 for i in block["target_layer_ids"])
        named = self.keys.get("aux_hidden_state_layer_ids") or self.keys.get(IDS)
        if named:
            return sorted(named)
        outputs = self.eagle.get(IDS)
        if outputs:  # of layers, unless one is the number of layers itself
            return sorted(outputs if max(outputs) == last else [i + 1 for i in outputs])
        return [2, last // 2, last - 3]

    def features(self, states_LTH: Tensor, final_TH: Tensor) -> Tensor:
        """What the first layer reads of the target, (T, H)."""
        chosen = self.boundaries()
        return self.fused(torch.stack([states_LTH[b] for b in chosen], 1)) if chosen else final_TH

    def fused(self, states_TNH: Tensor) -> Tensor:
        """Norms on the states, if there are any, and ``fc``."""
        if self.keys.get("fc_norm"):
            parts = [
                self.norm(f"fc_norm.{n}", states_TNH[:, n]) for n in range(states_TNH.shape[1])
            ]
            states_TNH = torch.stack(parts, 1)
        wide_TN = states_TNH.flatten(1)
        if self.eagle.get("norm_before_fc", self.keys.get("norm_before_fc")):
            wide_TN = self.norm("input_norm", wide_TN)
        return wide_TN @ self.w["fc.weight"].T

    # --- a layer ----------------------------------------------------------------------------------------------------

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.w[f"{name}.weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w.get(
            f"{name}.bias", torch.zeros((), dtype=torch.float64)
        )

    def mlp(self, at: str, x: Tensor) -> Tensor:
        gated = torch.nn.functional.silu(self.linear(f"{at}.mlp.gate_proj", x)) * self.linear(
            f"{at}.mlp.up_proj", x
        )
        return self.linear(f"{at}.mlp.down_proj", gated)

    def attention(self, at: str, x_TX: Tensor, context_CX: Tensor | None = None) -> Tensor:
        """Causal, within a window if there is one; of a block, all see all and the context before them."""
        at = f"{at}.self_attn"
        if self.keys.get("kv_lora_rank"):
            q, k, v, scale = self.latent(at, x_TX)
        else:
            q, k, v, scale = self.grouped(at, x_TX, context_CX)
        scores_hTS = torch.einsum("thd,shd->hts", q, k) * scale
        rows, columns = scores_hTS.shape[1:]
        if context_CX is None:
            behind_TS = torch.arange(rows)[:, None] - torch.arange(columns)
            sliding = "sliding_attention" in (self.keys.get("layer_types") or ())
            most = self.keys["sliding_window"] if sliding else columns
            scores_hTS = scores_hTS.masked_fill((behind_TS < 0) | (behind_TS >= most), -torch.inf)
        mixed_THD = torch.einsum("hts,shd->thd", scores_hTS.softmax(-1), v)
        return self.linear(f"{at}.o_proj", mixed_THD.flatten(1))

    def grouped(
        self, at: str, x_TX: Tensor, context_CX: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        """Queries, keys and values with a key for every query head, (T, h, d) each."""
        h = self.keys["num_attention_heads"]
        all_SX = x_TX if context_CX is None else torch.cat([context_CX, x_TX])
        q_Thd = self.linear(f"{at}.q_proj", x_TX).unflatten(1, (h, -1))
        d = q_Thd.shape[-1]
        k_Sgd, v_Sgd = (
            self.linear(f"{at}.{name}_proj", all_SX).unflatten(1, (-1, d)) for name in "kv"
        )
        if f"{at}.q_norm.weight" in self.w:
            q_Thd, k_Sgd = self.norm(f"{at}.q_norm", q_Thd), self.norm(f"{at}.k_norm", k_Sgd)
        cos, sin = self.rope(d, len(all_SX))
        q_Thd = halves(q_Thd, cos[-len(x_TX) :], sin[-len(x_TX) :])
        k_Shd = halves(k_Sgd, cos, sin).repeat_interleave(h // k_Sgd.shape[1], 1)
        return q_Thd, k_Shd, v_Sgd.repeat_interleave(h // v_Sgd.shape[1], 1), d**-0.5

    def latent(self, at: str, x_TX: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
        """Of multi-head latent attention, whose rotated channels are pairs of neighbours."""
        h, kv = self.keys["num_attention_heads"], self.keys["kv_lora_rank"]
        plain, turned = self.keys["qk_nope_head_dim"], self.keys["qk_rope_head_dim"]
        low = self.norm(f"{at}.q_a_layernorm", self.linear(f"{at}.q_a_proj", x_TX))
        q_Thd = self.linear(f"{at}.q_b_proj", low).unflatten(1, (h, -1))
        both = self.linear(f"{at}.kv_a_proj_with_mqa", x_TX)
        spread = self.linear(
            f"{at}.kv_b_proj", self.norm(f"{at}.kv_a_layernorm", both[:, :kv])
        ).unflatten(1, (h, -1))
        cos, sin = self.rope(turned, len(x_TX))
        shared = neighbours(both[:, None, kv:], cos, sin).expand(-1, h, -1)
        q = torch.cat([q_Thd[..., :plain], neighbours(q_Thd[..., plain:], cos, sin)], -1)
        k = torch.cat([spread[..., :plain], shared], -1)
        block = self.keys.get("rope_scaling") or {}
        stretch = 1.0
        if (block.get("type") or block.get("rope_type")) == "yarn":
            stretch = (0.1 * block.get("mscale_all_dim", 0) * math.log(block["factor"]) + 1) ** 2
        return q, k, spread[..., plain:], (plain + turned) ** -0.5 * stretch

    # --- rope -------------------------------------------------------------------------------------------------------

    def rope(self, width: int, rows: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine, (T, width / 2): angles in single precision, as published models have them."""
        block = self.keys.get("rope_parameters") or self.keys.get("rope_scaling") or {}
        theta = float(block.get("rope_theta") or self.keys.get("rope_theta") or 10000.0)
        kind = block.get("rope_type") or block.get("type") or "default"
        inverse = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
        factor = 1.0
        if kind == "llama3":
            inverse = _llama3(inverse, block)
        elif kind == "yarn":
            inverse, factor = yarn(inverse, block, theta, width)
        elif kind == "linear":
            inverse = inverse / block["factor"]
        angles = torch.arange(rows, dtype=torch.float32)[:, None] * inverse
        return angles.cos().double() * factor, angles.sin().double() * factor

    # --- the drafter ------------------------------------------------------------------------------------------------

    def rows(self, tokens_T: Tensor, h_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's state and what the head reads of it, (T, H) both: row t holds feature t and the token after it."""
        e_TH = self.embedding_VH[tokens_T]
        if "narrow" in self.layout.extra:
            x_TH = self.linear("fc", torch.cat([e_TH, h_TH], 1))
            middle_TH = x_TH + self.attention("layers.0", x_TH)
        else:
            normed_TH = self.norm("layers.0.hidden_norm", h_TH)
            both = torch.cat([self.norm("layers.0.input_layernorm", e_TH), normed_TH], 1)
            residual_TH = normed_TH if self.keys.get("norm_before_residual") else h_TH
            middle_TH = residual_TH + self.attention("layers.0", both)
        out_TH = middle_TH + self.mlp(
            "layers.0", self.norm("layers.0.post_attention_layernorm", middle_TH)
        )
        for i in range(1, self.layers):
            out_TH = self.further(f"layers.{i}", out_TH)
        return out_TH, out_TH if "narrow" in self.layout.extra else self.norm("norm", out_TH)

    def further(self, at: str, x_TH: Tensor, context_CH: Tensor | None = None) -> Tensor:
        """A plain layer with a norm before its attention."""
        x_TH = x_TH + self.attention(at, self.norm(f"{at}.input_layernorm", x_TH), context_CH)
        return x_TH + self.mlp(at, self.norm(f"{at}.post_attention_layernorm", x_TH))

    def spread(self, normed: Tensor) -> Tensor:
        """Logits over the target's vocabulary."""
        full = torch.full(
            (*normed.shape[:-1], len(self.embedding_VH)), -torch.inf, dtype=torch.float64
        )
        full[..., self.ids_D] = normed @ self.head_DH.T
        return full

    def said(self, tokens_T: Tensor, states_LTH: Tensor, final_TH: Tensor, depth: int) -> Said:
        """What it says of a text whose tokens after each state are ``tokens_T``."""
        h_TH = self.features(states_LTH.double(), final_TH.double())
        if "block" in self.layout.extra:
            return self.block(tokens_T, h_TH)
        raw_TH, normed_TH = self.rows(tokens_T, h_TH)
        first_TV = self.spread(normed_TH)
        chain = [first_TV[-1]]
        for _ in range(depth - 1):
            if "mask_hidden" in self.layout.extra:
                states = self.w["mask_hidden"].reshape(1, len(self.boundaries()), -1)
                token, fed_1H = torch.tensor([self.keys["mask_token_id"]]), self.fused(states)
            else:
                token = chain[-1].argmax()[None]
                fed_1H = (normed_TH if self.keys.get("norm_output") else raw_TH)[-1:]
            tokens_T, h_TH = torch.cat([tokens_T, token]), torch.cat([h_TH, fed_1H])
            raw_TH, normed_TH = self.rows(tokens_T, h_TH)
            chain.append(self.spread(normed_TH[-1]))
        return Said(first_TV, torch.stack(chain))

    def block(self, tokens_T: Tensor, h_TH: Tensor) -> Said:
        """DFlash: the last token and a mask for every draft, over the features of all before."""
        masks = self.keys["block_size"] - 1
        token = self.keys.get("mask_token_id") or self.keys["dflash_config"]["mask_token_id"]
        context_TH = self.norm("hidden_norm", h_TH)
        x_KH = self.embedding_VH[torch.cat([tokens_T[-1:], torch.full((masks,), token)])]
        for i in range(self.layers):
            x_KH = self.further(f"layers.{i}", x_KH, context_TH)
        said = self.spread(self.norm("norm", x_KH))[1:]
        return Said(said, said)


def _plain(name: str) -> str:
    """A tensor's name without root, the first layer's as ``layers.0``."""
    return re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel i with channel i + width / 2."""
    low, high = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel 2 i with channel 2 i + 1."""
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


def _llama3(inverse: Tensor, block: Mapping[str, Any]) -> Tensor:
    """Llama 3.1's: long wavelengths are stretched, short ones kept, those between mixed."""
    low, high, old = (
        block["low_freq_factor"],
        block["high_freq_factor"],
        block["original_max_position_embeddings"],
    )
    turns = old * inverse / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - share) * inverse / block["factor"] + share * inverse


def yarn(
    inverse: Tensor, block: Mapping[str, Any], theta: float, width: int
) -> tuple[Tensor, float]:
    """https://arxiv.org/abs/2309.00071, with the factor that cosine and sine are multiplied by."""
    factor, old = block["factor"], block["original_max_position_embeddings"]

    def channel(turns: float) -> float:
        return width * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(block.get("beta_fast") or 32), channel(block.get("beta_slow") or 1)
    if block.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(
        0, 1
    )
    mscale, every = block.get("mscale"), block.get("mscale_all_dim")
    grown = [0.1 * m * math.log(factor) + 1 for m in (mscale or 1, every or 1)]
    return inverse / factor * ramp + inverse * (1 - ramp), grown[0] / grown[
        1
    ] if mscale and every else grown[0]
