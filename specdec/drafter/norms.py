"""Where normalization happens: a table of named sites, each an RMSNorm, the identity or a norm of the user's own.

Legend: B batch, T nodes, N aux layers, H hidden.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from specdec.nn.layers import NormHeads, RMSNorm

if TYPE_CHECKING:
    from specdec.drafter.config import DrafterConfig, DrafterSpec


class Norm:
    """Base of a user's own norm, given in place of ``true`` at any site of :class:`Norms`: a frozen spec."""

    def build(self, config: "DrafterConfig", width: int) -> nn.Module:
        """A module from (..., width) to the same, of the same dtype."""
        raise TypeError(f"{type(self).__name__} must build a module")


@dataclass(frozen=True)
class Norms:
    """The normalization axis. At a site ``true`` is an RMSNorm, ``false`` nothing, a :class:`Norm` what it builds.

    Args:
        aux: on the target's states before fusion: ``none``, one for ``each`` (``fc_norm``), one over the ``concat``
            (``norm_before_fc``), or your own norm for each.
        embed: on the token embedding.
        hidden: on the feature, where it enters the block.
        input: on the block's input after a narrow entry has merged embedding and feature.
        residual: where the residual path starts, the ``raw`` or the ``normed`` feature.
        output: before the head.
        query_key: on the queries and keys of every head in every layer, before they are rotated (Qwen3,
            https://arxiv.org/abs/2505.09388).
    """

    aux: Literal["none", "each", "concat"] | Norm = "none"
    embed: bool | Norm = True
    hidden: bool | Norm = True
    input: bool | Norm = False
    residual: Literal["raw", "normed"] = "raw"
    output: bool | Norm = True
    query_key: bool | Norm = False

    def __post_init__(self) -> None:
        if self.aux not in ("none", "each", "concat") and not isinstance(self.aux, Norm):
            raise ValueError(f"norms.aux must be none, each, concat or a Norm, not {self.aux!r}")
        if self.residual not in ("raw", "normed"):
            raise ValueError(f"norms.residual must be raw or normed, not {self.residual!r}")
        for site in ("embed", "hidden", "input", "output", "query_key"):
            if not isinstance(value := getattr(self, site), bool | Norm):
                raise ValueError(f"norms.{site} must be true, false or a Norm, not {value!r}")

    def check(self, config: "DrafterConfig | DrafterSpec") -> None:
        """Raise ValueError for a placement that has no meaning with the other axes."""
        if self.aux != "none" and not config.fusion.mixes:
            raise ValueError(
                f"norms.aux={self.aux} normalizes states before they are mixed; fusion "
                f"{type(config.fusion).__name__} mixes nothing: use fusion Concat or ScalarMix, or norms.aux=none"
            )
        if self.residual == "normed" and not self.hidden:
            raise ValueError(
                "norms.residual=normed needs norms.hidden=true: there is no normalized feature without it"
            )

    def build(self, config: "DrafterConfig") -> "NormTable":
        """Every site outside the layers as a module."""
        return NormTable(self, config)

    def build_heads(self, config: "DrafterConfig") -> nn.Module:
        """The norm on the heads of one layer, or the identity."""
        if not self.query_key:
            return nn.Identity()
        q_norm, k_norm = (_site(self.query_key, config, config.head_dim) for _ in range(2))
        return NormHeads(q_norm, k_norm, config.num_attention_heads, config.num_key_value_heads)


class NormTable(nn.Module):
    """Every site outside the layers as a module; an unused one is the identity."""

    def __init__(self, norms: Norms, config: "DrafterConfig") -> None:
        super().__init__()
        states = len(config.aux_layers)
        width = config.target_hidden_size
        self.aux: nn.Module
        if norms.aux == "none":
            self.aux = nn.Identity()
        elif norms.aux == "concat":
            self.aux = NormConcat(states * width, config.rms_norm_eps)
        else:
            state_norm = norms.aux if isinstance(norms.aux, Norm) else True
            self.aux = NormEach(_site(state_norm, config, width) for _ in range(states))
        self.embed, self.hidden, self.input, self.output = (
            _site(norm, config, config.hidden_size)
            for norm in (norms.embed, norms.hidden, norms.input, norms.output)
        )


def _site(norm: bool | Norm, config: "DrafterConfig", width: int) -> nn.Module:
    if isinstance(norm, Norm):
        return norm.build(config, width)
    return RMSNorm(width, config.rms_norm_eps) if norm else nn.Identity()


class NormEach(nn.ModuleList):
    """EAGLE-3.1's ``fc_norm``: a separate norm for every captured state."""

    def forward(self, aux_BTNH: Tensor) -> Tensor:
        return torch.stack(
            [norm(x) for norm, x in zip(self, aux_BTNH.unbind(2), strict=True)], dim=2
        )


class NormConcat(RMSNorm):
    """One RMSNorm over all captured states together (``norm_before_fc``)."""

    def forward(self, aux_BTNH: Tensor) -> Tensor:
        return super().forward(aux_BTNH.flatten(2)).view_as(aux_BTNH)
