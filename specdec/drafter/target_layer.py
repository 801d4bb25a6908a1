"""The target's own decoder layer in the drafter, as transformers has it: that of multi-token prediction (MTP,
https://arxiv.org/abs/2412.19437), whose modules come with their targets.

Legend: B batch, T nodes, M some of them, H hidden, h query heads, g key heads, d head width.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.drafter.attention import GQA, AttentionKind, HeadSizes
from specdec.drafter.entry import Entered, Narrow
from specdec.drafter.norms import Norm
from specdec.nn.cache import attend
from specdec.nn.rope import ROPE_FAULTS, rope_parameters
from specdec.nn.view import View

if TYPE_CHECKING:
    from specdec.drafter.config import DrafterConfig

# families whose layer, run as here, was compared with transformers' own
COMPARED = (
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_5_text",
    "qwen3_next",
)
OURS = "specdec_view"  # what a config says in place of sdpa, and of grouped_mm
# of a config, what says nothing of a layer, or what is to be run
_LEFT_OUT = {
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "transformers_version",
}


@dataclass(frozen=True)
class TargetLayer(AttentionKind):
    """One whole decoder layer of the target's family, with its input norm and its feed-forward, experts included.

    Args:
        hf_config: the target's text config of one such layer, as transformers writes it; nothing in a design, which
            takes the target's.
    """

    fixed_heads: ClassVar[str] = "is the target's layer, with its heads"

    hf_config: dict[str, Any] = field(default_factory=dict)

    def of_target(self, hf_config: Any) -> Self:
        """Return it with the config of one attention layer, with experts where the family has any."""
        settings = {
            k: v
            for k, v in hf_config.to_diff_dict().items()
            if k not in _LEFT_OUT and not k.startswith("_")
        }
        settings |= {
            "model_type": hf_config.model_type,
            "num_hidden_layers": 1,
            "vocab_size": 1,
            "pad_token_id": None,
        }
        of_one = {
            "layer_types": ["full_attention"],
            "first_k_dense_replace": 0,
            "mlp_layer_types": ["sparse"],
        }
        settings |= {
            key: value for key, value in of_one.items() if getattr(hf_config, key, None) is not None
        }
        return type(self)(json.loads(json.dumps(settings)))

    def check(self, config: Any) -> None:
        """An entry that makes one state, and nothing in addition to what the layer has itself."""
        if not isinstance(config.entry, Narrow):
            raise ValueError("attention TargetLayer reads one state: use entry Narrow")
        norms = config.norms
        for name, used in (("norms.input", norms.input), ("norms.query_key", norms.query_key),
                           ("attention_bias", config.attention_bias)):  # fmt: skip
            if used:
                raise ValueError(
                    f"{name}: with attention TargetLayer the layer has its own, or none: set it to false"
                )
        if config.num_layers != 1:
            raise ValueError(
                f"attention TargetLayer is one layer: num_layers is {config.num_layers}"
            )
        if hasattr(config, "target_hidden_size"):  # no design without a target
            hf = self.text_config()
            layer_sizes = {name: getattr(hf, name) for name in ("hidden_size", "intermediate_size")}
            layer_sizes |= self.heads(hf)._asdict()
            for name, value in layer_sizes.items():
                if getattr(config, name) != value:
                    raise ValueError(
                        f"{name} {getattr(config, name)}: the target's layer has {value}"
                    )
            if dict(config.rope) != rope_parameters(hf):
                raise ValueError(
                    f"rope {dict(config.rope)}: the target's layer has {rope_parameters(hf)}"
                )

    def text_config(self) -> Any:
        """The transformers config; ValueError if there is no such family, or it does not take what is written."""
        from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

        if (kind := self.hf_config.get("model_type")) not in CONFIG_MAPPING:
            raise ValueError(
                f"attention TargetLayer: transformers has no model_type {kind!r:.60}, as hf_config says"
            )
        if self.hf_config.get("num_hidden_layers") != 1 or not _LEFT_OUT.isdisjoint(self.hf_config):
            raise ValueError(
                "attention TargetLayer: hf_config must be of one layer, and say nothing of code or dtypes"
            )
        if kind not in COMPARED:
            raise ValueError(
                f"attention TargetLayer: a layer of {kind} may be more than attention, norms and feed-forward are here "
                f"(capped scores, sinks, another rope): it is for targets of {', '.join(COMPARED)}"
            )
        config = _explained(CONFIG_MAPPING[kind].from_dict, self.hf_config)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:  # others may look for parts on the Hub
            raise ValueError(f"attention TargetLayer: a {kind} model is no causal language model")
        return config

    def model(self) -> Any:
        """The family's decoder, of this one layer and one token; ValueError if the config makes none."""
        from transformers import AttentionInterface, AutoModel
        from transformers.integrations.moe import ExpertsInterface

        AttentionInterface.register(OURS, _attention)
        ExpertsInterface.register(OURS, _experts)
        config = self.text_config()
        ours = {"attn_implementation": OURS, "experts_implementation": OURS}
        return _explained(AutoModel.from_config, config, trust_remote_code=False, **ours)

    def heads(self, hf_config: Any) -> HeadSizes:
        """Return the heads whose keys and values are cached; in latent attention (MLA) those it expands to."""
        if getattr(hf_config, "kv_lora_rank", None) is None:
            return GQA().heads(hf_config)
        h = hf_config.num_attention_heads
        return HeadSizes(h, h, hf_config.qk_nope_head_dim + hf_config.qk_rope_head_dim)

    def projections(self, config: "DrafterConfig") -> dict[str, int]:
        """None that an entry could add to."""
        return {}

    def rotated(self, config: "DrafterConfig") -> int:
        return self.hf_config.get("qk_rope_head_dim") or config.head_dim

    def kept(self, config: "DrafterConfig") -> int:
        """Return how much more transformers' norms and feed-forward keep than ours; under autocast a fifth more."""
        return 5 * config.hidden_size + 2 * config.intermediate_size

    def build_decoder(self, config: "DrafterConfig") -> nn.Module:
        return BorrowedLayer(self.model().layers[0])


def _explained(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return make(*args, **kwargs)
    except (*ROPE_FAULTS, OSError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"attention TargetLayer: hf_config makes no layer: {reason:.200}"
        ) from error


class BorrowedLayer(nn.Module):
    """A decoder layer of transformers, which attends by the view that it is given."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, entered: Entered, view: View, rope: tuple[Tensor, Tensor]) -> Tensor:
        """The residual stream after the layer, (B, T, H), or of the nodes that the view asks for."""
        x_BTH = entered.residual_BTH
        cos, sin = (table[:, 0].to(x_BTH.dtype) for table in rope)
        out_BTH: Tensor = self.block(
            x_BTH, attention_mask=None, position_embeddings=(cos, sin), view=view
        )
        return (
            out_BTH
            if view.wanted_BM is None
            else out_BTH.take_along_dim(view.wanted_BM[..., None], dim=1)
        )


def _attention(
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    *,
    scaling: float,
    view: View,
    **_: Any,
) -> tuple[Tensor, None]:
    """(B, h, T, d) and twice (B, g, T, d) to (B, T, h, d); values may be narrower, also in what comes out.

    Neither cache nor kernels know of that, nor of another scale than theirs.
    """
    d = query.shape[-1]
    narrow = value.shape[-1]
    q = query * (scaling * d**0.5)
    v = F.pad(value, (0, d - narrow))
    if view.cache is None:
        out = attend(q, key, v, view.visibility)
    else:
        out = view.cache.attend(0, q, key, v, view.visibility, view.slots_BT)
    return out[..., :narrow].transpose(1, 2), None


def _experts(module: nn.Module, x: Tensor, *routes: Tensor) -> Tensor:
    """Run the experts as transformers does, in one product; one by one in float64, which torch's product lacks."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    one_by_one = type(module).forward.__wrapped__  # type: ignore[attr-defined]  # what transformers' choice is wrapped around
    output: Tensor = (one_by_one if x.dtype == torch.float64 else grouped_mm_experts_forward)(
        module, x, *routes
    )
    return output


@dataclass(frozen=True)
class TargetNorm(Norm):
    """The norm that the target has on its states, such as Qwen3-Next's, whose weights count from one."""

    def build(self, config: "DrafterConfig", width: int) -> nn.Module:
        if not isinstance(config.attention, TargetLayer):
            raise ValueError(
                "norms: TargetNorm goes with attention TargetLayer, which knows the target's family"
            )
        with torch.device("meta"):
            kind = type(config.attention.model().norm)
        return kind(width, eps=config.rms_norm_eps)
