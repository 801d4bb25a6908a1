"""Where normalisation stands: a table of named sites, each RMSNorm or identity.

Legend: B batch, T nodes, N aux layers, H hidden.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from specdec.nn.attention import NormHeads
from specdec.nn.norm import RMSNorm

if TYPE_CHECKING:
    from specdec.drafter.config import DrafterConfig, DrafterSpec


class NormEach(nn.ModuleList):
    """EAGLE-3.1's ``fc_norm``: an RMSNorm of its own for every captured state."""

    def forward(self, aux_BTNH: Tensor) -> Tensor:
        """(B, T, N, H) to the same."""
        return torch.stack([norm(x) for norm, x in zip(self, aux_BTNH.unbind(2), strict=True)], dim=2)


class NormConcat(RMSNorm):
    """One RMSNorm over all captured states together (``norm_before_fc``)."""

    def forward(self, aux_BTNH: Tensor) -> Tensor:
        """(B, T, N, H) to the same."""
        return super().forward(aux_BTNH.flatten(2)).view_as(aux_BTNH)


class RawResidual(nn.Module):
    """The residual path starts at the feature as it came (EAGLE-3)."""

    def forward(self, raw_BTH: Tensor, normed_BTH: Tensor) -> Tensor:
        """The raw feature."""
        return raw_BTH


class NormedResidual(nn.Module):
    """The residual path starts at the normalised feature (``norm_before_residual``)."""

    def forward(self, raw_BTH: Tensor, normed_BTH: Tensor) -> Tensor:
        """The normalised feature."""
        return normed_BTH


@dataclass(frozen=True)
class Norms:
    """The normalisation axis.

    Args:
        aux: on the target's states before fusion: none, one for ``each`` (``fc_norm``), or one over the ``concat``
            (``norm_before_fc``).
        embed: on the token embedding.
        hidden: on the feature, where it enters the block.
        input: on the block's input after a narrow entry has merged embedding and feature.
        residual: where the residual path starts, the ``raw`` or the ``normed`` feature.
        output: before the head.
        query_key: on the queries and keys of every head in every layer, before they are rotated (Qwen3,
            https://arxiv.org/abs/2505.09388).
    """

    aux: Literal["none", "each", "concat"] = "none"
    embed: bool = True
    hidden: bool = True
    input: bool = False
    residual: Literal["raw", "normed"] = "raw"
    output: bool = True
    query_key: bool = False

    def __post_init__(self) -> None:
        if self.aux not in ("none", "each", "concat"):
            raise ValueError(f"norms.aux must be none, each or concat, not {self.aux!r}")
        if self.residual not in ("raw", "normed"):
            raise ValueError(f"norms.residual must be raw or normed, not {self.residual!r}")

    def check(self, config: "DrafterConfig | DrafterSpec") -> None:
        """Raise ValueError for a placement that has no meaning with the other axes."""
        if self.aux != "none" and not config.fusion.mixes:
            raise ValueError(
                f"norms.aux={self.aux} normalises states before they are mixed; fusion "
                f"{type(config.fusion).__name__} mixes nothing: use fusion Concat or WeightedSum, or norms.aux=none"
            )
        if self.residual == "normed" and not self.hidden:
            raise ValueError("norms.residual=normed needs norms.hidden=true: there is no normalised feature without it")

    def build(self, config: "DrafterConfig") -> "NormTable":
        """Every site outside the layers as a module."""
        return NormTable(self, config)

    def build_heads(self, config: "DrafterConfig") -> nn.Module:
        """The norm on the heads of one layer, or the identity."""
        if not self.query_key:
            return nn.Identity()
        q_norm, k_norm = (RMSNorm(config.head_dim, config.rms_norm_eps) for _ in range(2))
        return NormHeads(q_norm, k_norm, config.num_attention_heads, config.num_key_value_heads)


class NormTable(nn.Module):
    """Every site outside the layers as a module; an unused one is the identity."""

    def __init__(self, norms: Norms, config: "DrafterConfig") -> None:
        super().__init__()

        def site(used: bool) -> nn.Module:
            return RMSNorm(config.hidden_size, config.rms_norm_eps) if used else nn.Identity()

        n, width, eps = len(config.aux_layers), config.target_hidden_size, config.rms_norm_eps
        self.aux: nn.Module
        match norms.aux:
            case "none":
                self.aux = nn.Identity()
            case "each":
                self.aux = NormEach(RMSNorm(width, eps) for _ in range(n))
            case "concat":
                self.aux = NormConcat(n * width, eps)
        self.embed, self.hidden, self.input = site(norms.embed), site(norms.hidden), site(norms.input)
        self.output = site(norms.output)
        self.residual = NormedResidual() if norms.residual == "normed" else RawResidual()
