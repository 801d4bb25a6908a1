"""How a layer's input becomes queries, keys and values.

Legend: h query heads, g key heads, d head width.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from torch import nn

from specdec.nn.latent import LatentAttention
from specdec.nn.layers import Attention, GroupedAttention
from specdec.nn.parts import Part
from specdec.nn.rope import rope_scale
from specdec.utils.numbers import Heads, Whole, Width, check_numbers

if TYPE_CHECKING:
    from specdec.drafter.config import DrafterConfig


class HeadSizes(NamedTuple):
    """Heads of a drafter, as the cache keeps them."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


class AttentionKind(Part):
    """Base of the attention axis: a frozen dataclass that builds a layer's attention."""

    fixed_heads: ClassVar[str] = ""
    """Why a design may not choose the number and width of heads; nothing where it may."""

    def of_target(self, hf_config: Any) -> Self:
        """This kind for a target, of whose text model this is the transformers config."""
        return self

    def heads(self, hf_config: Any) -> HeadSizes:
        """Return the sizes of a drafter for such a target, where its design does not choose its own."""
        raise TypeError(f"{type(self).__name__} must say what heads it has")

    def projections(self, config: "DrafterConfig") -> dict[str, int]:
        """The matrices that read the layer's input, by their published names, and how wide each is, in the order that
        they have in one."""
        raise TypeError(f"{type(self).__name__} must say what it projects to")

    def rotated(self, config: "DrafterConfig") -> int:
        """Channels of a head that positions may rotate."""
        return config.head_dim

    def kept(self, config: "DrafterConfig") -> int:
        """Numbers of a token that the backward pass needs of a layer, in addition to queries, keys, values and their
        sum."""
        return 0

    def build_decoder(self, config: "DrafterConfig") -> nn.Module | None:
        """Return what replaces a whole decoder layer (attention, norm and feed-forward); None for the usual one."""
        return None

    def build_layer(self, config: "DrafterConfig", index: int) -> Attention:
        """The attention of layer ``index``."""
        raise TypeError(f"{type(self).__name__} must build an attention")


@dataclass(frozen=True)
class GQA(AttentionKind):
    """Grouped queries (https://arxiv.org/abs/2305.13245), with heads as the target's or as chosen: EAGLE-1 to 3.1."""

    def heads(self, hf_config: Any) -> HeadSizes:
        h = hf_config.num_attention_heads
        g = getattr(hf_config, "num_key_value_heads", None) or h
        return HeadSizes(h, g, getattr(hf_config, "head_dim", None) or hf_config.hidden_size // h)

    def projections(self, config: "DrafterConfig") -> dict[str, int]:
        queries, keys = (
            n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads)
        )
        return {"q_proj": queries, "k_proj": keys, "v_proj": keys}

    def build_layer(self, config: "DrafterConfig", index: int) -> Attention:
        h = config.num_attention_heads
        g = config.num_key_value_heads
        norm = config.norms.build_heads(config)
        biases = bool(config.attention_bias), config.attention_bias is True
        return GroupedAttention(config.hidden_size, h, g, config.head_dim, index, norm, *biases)


@dataclass(frozen=True)
class MLA(AttentionKind):
    """Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434): the drafters of Kimi K2.

    As many heads as the target. A head's key has its own part and a rotated part that all heads share. Keys and values
    are cached as heads, not as the latent that they are made of.

    Args:
        q_lora_rank: width of the queries' latent; 0 for queries straight from the input.
        kv_lora_rank: width of the latent of keys and values.
        qk_nope_head_dim: channels of a head that positions do not rotate.
        qk_rope_head_dim: channels that they do, in adjacent pairs.
        v_head_dim: width of a head's values, at most that of its keys.
    """

    fixed_heads: ClassVar[str] = (
        "has as many heads as the target, whose widths are attention.qk_nope_head_dim, qk_rope_head_dim and v_head_dim"
    )

    q_lora_rank: Whole = 1536
    kv_lora_rank: Width = 512
    qk_nope_head_dim: Heads = 128
    qk_rope_head_dim: Heads = 64
    v_head_dim: Heads = 128

    def __post_init__(self) -> None:
        check_numbers(MLA, vars(self), "attention.")
        if self.qk_rope_head_dim % 2:
            raise ValueError(
                f"attention.qk_rope_head_dim must be even, not {self.qk_rope_head_dim}: channels are paired"
            )
        if self.v_head_dim > self.qk_nope_head_dim + self.qk_rope_head_dim:
            raise ValueError(f"attention.v_head_dim {self.v_head_dim} is wider than a key")

    def check(self, config: Any) -> None:
        """No norms or biases on heads, which the layout has no place for; and heads of these very sizes."""
        for name, used in (
            ("norms.query_key", config.norms.query_key),
            ("attention_bias", config.attention_bias),
        ):
            if used:
                raise ValueError(
                    f"{name} belongs to attention GQA: MLA has norms on its latents, and no bias"
                )
        if not hasattr(config, "target_hidden_size"):  # a design without a target
            return
        sizes = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        if sizes != (wanted := self.heads(config)):
            raise ValueError(
                f"heads, key heads and head_dim are {sizes}, of attention MLA they are {tuple(wanted)}"
            )
        if config.rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(
                "attention MLA rotates all of qk_rope_head_dim channels, and the rope says partial_rotary_factor: "
                "give --model.drafter.rope_theta for a separate rope"
            )

    def heads(self, hf_config: Any) -> HeadSizes:
        h = hf_config.num_attention_heads
        return HeadSizes(h, h, self.qk_nope_head_dim + self.qk_rope_head_dim)

    def projections(self, config: "DrafterConfig") -> dict[str, int]:
        queries = {"q_a_proj": self.q_lora_rank}
        if not self.q_lora_rank:
            queries = {"q_proj": config.num_attention_heads * config.head_dim}
        return {**queries, "kv_a_proj_with_mqa": self.kv_lora_rank + self.qk_rope_head_dim}

    def rotated(self, config: "DrafterConfig") -> int:
        return self.qk_rope_head_dim

    def kept(self, config: "DrafterConfig") -> int:
        """Both latents, as they are and normed, and the narrow sum that o_proj reads."""
        return (
            2 * (self.q_lora_rank + self.kv_lora_rank)
            + config.num_attention_heads * self.v_head_dim
        )

    def build_layer(self, config: "DrafterConfig", index: int) -> Attention:
        sizes = (
            self.q_lora_rank,
            self.kv_lora_rank,
            self.qk_nope_head_dim,
            self.qk_rope_head_dim,
            self.v_head_dim,
        )
        scale = rope_scale(config.rope)
        return LatentAttention(
            config.hidden_size,
            config.num_attention_heads,
            *sizes,
            index,
            config.rms_norm_eps,
            scale,
        )
