"""The axes of a drafter's design: fusion, entry, norms and recurrence. Each part is a frozen spec that builds a module.

Legend: B batch, T nodes, N aux layers, H hidden, W = (query heads + 2 key heads) x head width.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from specdec.drafter.parts import Part
from specdec.nn.layers import NormHeads, RMSNorm

if TYPE_CHECKING:
    from specdec.drafter.config import DrafterConfig, DrafterSpec


# Fusion: how the target's hidden states become the drafter's feature


class Fusion(Part):
    """Base of the fusion axis: its module goes from (B, T, N, H_target) to (B, T, H)."""

    final_norm: ClassVar[bool] = False
    """Whether the state at the last boundary is asked for after the target's final norm."""
    mixes: ClassVar[bool] = True
    """Whether a learned projection stands between the target's states and the drafter's width."""

    def default_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """Boundaries tapped when the user names none: EAGLE-3's 2, L // 2 and L - 3 (https://arxiv.org/abs/2503.01840).

        Raises:
            ValueError: the target is too shallow for three that increase.
        """
        layers = (2, num_target_layers // 2, num_target_layers - 3)
        if not 0 <= layers[0] < layers[1] < layers[2]:
            raise ValueError(
                f"a target of {num_target_layers} layers is too shallow for EAGLE-3's boundaries 2, L//2 and L-3 "
                f"(they would be {list(layers)}): set aux_layers"
            )
        return layers


@dataclass(frozen=True)
class LastLayer(Fusion):
    """EAGLE-1's feature (https://arxiv.org/abs/2401.15077): the target's last state after its final norm, as it is."""

    final_norm: ClassVar[bool] = True
    mixes: ClassVar[bool] = False

    def default_layers(self, num_target_layers: int) -> tuple[int, ...]:
        return (num_target_layers,)

    def check(self, config: "DrafterConfig") -> None:
        """One state, of the drafter's own width."""
        if config.aux_layers != (config.num_target_layers,):
            raise ValueError(
                f"fusion LastLayer taps boundary {config.num_target_layers} alone, not {list(config.aux_layers)}"
            )
        if config.hidden_size != config.target_hidden_size:
            raise ValueError(
                f"fusion LastLayer keeps the target's width {config.target_hidden_size}; hidden_size "
                f"{config.hidden_size} needs a projection: use fusion Concat"
            )

    def build(self, config: "DrafterConfig") -> nn.Module:
        return nn.Flatten(2)


@dataclass(frozen=True)
class Concat(Fusion):
    """EAGLE-3's fusion (https://arxiv.org/abs/2503.01840): low, middle and high states through one linear layer."""

    def build(self, config: "DrafterConfig") -> nn.Module:
        """One linear layer without bias, for one state too."""
        fc = nn.Linear(len(config.aux_layers) * config.target_hidden_size, config.hidden_size, bias=False)
        return nn.Sequential(OrderedDict(flatten=nn.Flatten(2), fc=fc))


@dataclass(frozen=True)
class ScalarMix(Fusion):
    """One weight per state, softmax-normalised as in ELMo (https://arxiv.org/abs/1802.05365), then one linear layer.

    The projection has the size that fusion Concat gives a single state, however many states there are.
    """

    def build(self, config: "DrafterConfig") -> nn.Module:
        """N scores and one linear layer without bias, for one state too."""
        return ScalarMixFusion(len(config.aux_layers), config.target_hidden_size, config.hidden_size)


class ScalarMixFusion(nn.Module):
    """Weigh the states, add them, and project the sum to the drafter's width."""

    def __init__(self, states: int, width_in: int, width: int) -> None:
        super().__init__()
        self.scores_N = nn.Parameter(torch.zeros(states))  # equal weights at the start
        self.fc = nn.Linear(width_in, width, bias=False)

    def forward(self, aux_BTNH: Tensor) -> Tensor:
        """(B, T, N, H_target) to (B, T, H)."""
        weights_N = self.scores_N.softmax(0, dtype=torch.promote_types(self.scores_N.dtype, torch.float32))
        return self.fc((aux_BTNH * weights_N.to(aux_BTNH.dtype)[:, None]).sum(2))


# Entry: how the token embedding meets the feature at the drafter's first layer


class Entered(NamedTuple):
    """What the first layer receives."""

    block_BTH: Tensor  # the attention's input
    beside_BTW: Tensor | None  # what goes into its queries, keys and values beside that; W their width together
    residual_BTH: Tensor  # where the residual path starts


class EntryModule(nn.Module):
    """Base of what an entry builds. Reading the token is a step of its own: training does it once for all steps."""

    def read(self, e_BTH: Tensor) -> Tensor:
        """What the block needs of the normalised embedding, (B, T, anything): of each token by itself, and without
        chance, since compiled decoding looks it up."""
        raise TypeError(f"{type(self).__name__} must say what it reads of a token")

    def forward(self, read: Tensor, f_BTH: Tensor, h_BTH: Tensor, norms: "NormTable") -> Entered:
        """``read`` from :meth:`read`, ``f`` the normalised feature, ``h`` the feature as it came."""
        raise TypeError(f"{type(self).__name__} must say what the first layer receives")


class Entry(Part):
    """Base of the entry axis: it builds an :class:`EntryModule`."""


@dataclass(frozen=True)
class Wide(Entry):
    """EAGLE-3 (https://arxiv.org/abs/2503.01840), as its code has it: q, k and v read ``[e; f]``, 2H channels."""

    def check(self, config: "DrafterConfig | DrafterSpec") -> None:
        """The input norms of a wide entry are those on its two halves."""
        if config.norms.input:
            raise ValueError("norms.input belongs to entry Narrow; entry Wide is normalised by norms.embed and .hidden")

    def build(self, config: "DrafterConfig") -> EntryModule:
        return WideEntry(config)


class WideEntry(EntryModule):
    """Embedding and feature side by side: a matrix of its own takes the embedding into queries, keys and values."""

    def __init__(self, config: "DrafterConfig") -> None:
        super().__init__()
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        self.token_qkv_proj = nn.Linear(config.hidden_size, heads * config.head_dim, bias=False)
        self.normed_residual = config.norms.residual == "normed"

    def read(self, e_BTH: Tensor) -> Tensor:
        """The embedding's share of queries, keys and values, (B, T, W)."""
        return self.token_qkv_proj(e_BTH)

    def forward(self, read: Tensor, f_BTH: Tensor, h_BTH: Tensor, norms: "NormTable") -> Entered:
        """The feature goes through the attention's own matrix."""
        return Entered(f_BTH, read, f_BTH if self.normed_residual else h_BTH)


@dataclass(frozen=True)
class Narrow(Entry):
    """EAGLE-1 (https://arxiv.org/abs/2401.15077): ``fc([e; f])`` from 2H to H, with a bias in the published code.

    The authors' drafters of LLaMA 3 have none, nor does the class in vLLM that serves EAGLE-1.
    """

    bias: bool = True

    def check(self, config: "DrafterConfig | DrafterSpec") -> None:
        """The residual path starts at the projection, so it cannot start at the normalised feature."""
        if config.norms.residual != "raw":
            raise ValueError(
                "norms.residual=normed belongs to entry Wide; after entry Narrow the residual starts at its projection"
            )

    def build(self, config: "DrafterConfig") -> EntryModule:
        return NarrowEntry(config.hidden_size, self.bias)


class NarrowEntry(EntryModule):
    """Project embedding and feature to one width before the block."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.token_fc = nn.Linear(width, width, bias=False)
        self.feature_fc = nn.Linear(width, width, bias=bias)

    def read(self, e_BTH: Tensor) -> Tensor:
        """The embedding's share of the projection, (B, T, H)."""
        return self.token_fc(e_BTH)

    def forward(self, read: Tensor, f_BTH: Tensor, h_BTH: Tensor, norms: "NormTable") -> Entered:
        """Both shares together are the block's input and the start of the residual path."""
        merged_BTH = read + self.feature_fc(f_BTH)
        return Entered(norms.input(merged_BTH), None, merged_BTH)


# Norms: a table of named sites, each an RMSNorm, the identity or a norm of the user's own


class Norm:
    """Base of a user's own norm, given in place of ``true`` at any site of :class:`Norms`: a frozen spec."""

    def build(self, config: "DrafterConfig", width: int) -> nn.Module:
        """A module from (..., width) to the same, of the same dtype."""
        raise TypeError(f"{type(self).__name__} must build a module")


@dataclass(frozen=True)
class Norms:
    """The normalisation axis. At a site ``true`` is an RMSNorm, ``false`` nothing, a :class:`Norm` what it builds.

    Args:
        aux: on the target's states before fusion: ``none``, one for ``each`` (``fc_norm``), one over the ``concat``
            (``norm_before_fc``), or a norm of one's own for each.
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
                f"norms.aux={self.aux} normalises states before they are mixed; fusion "
                f"{type(config.fusion).__name__} mixes nothing: use fusion Concat or ScalarMix, or norms.aux=none"
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
        q_norm, k_norm = (_site(self.query_key, config, config.head_dim) for _ in range(2))
        return NormHeads(q_norm, k_norm, config.num_attention_heads, config.num_key_value_heads)


class NormTable(nn.Module):
    """Every site outside the layers as a module; an unused one is the identity."""

    def __init__(self, norms: Norms, config: "DrafterConfig") -> None:
        super().__init__()
        states, width = len(config.aux_layers), config.target_hidden_size
        self.aux: nn.Module
        if norms.aux == "none":
            self.aux = nn.Identity()
        elif norms.aux == "concat":
            self.aux = NormConcat(states * width, config.rms_norm_eps)
        else:
            each = norms.aux if isinstance(norms.aux, Norm) else True
            self.aux = NormEach(_site(each, config, width) for _ in range(states))
        self.embed, self.hidden, self.input, self.output = (
            _site(norm, config, config.hidden_size) for norm in (norms.embed, norms.hidden, norms.input, norms.output)
        )


def _site(norm: bool | Norm, config: "DrafterConfig", width: int) -> nn.Module:
    if isinstance(norm, Norm):
        return norm.build(config, width)
    return RMSNorm(width, config.rms_norm_eps) if norm else nn.Identity()


class NormEach(nn.ModuleList):
    """EAGLE-3.1's ``fc_norm``: a norm of its own for every captured state."""

    def forward(self, aux_BTNH: Tensor) -> Tensor:
        return torch.stack([norm(x) for norm, x in zip(self, aux_BTNH.unbind(2), strict=True)], dim=2)


class NormConcat(RMSNorm):
    """One RMSNorm over all captured states together (``norm_before_fc``)."""

    def forward(self, aux_BTNH: Tensor) -> Tensor:
        return super().forward(aux_BTNH.flatten(2)).view_as(aux_BTNH)


# Recurrence: what a drafting step hands to the next one


class Recurrence(Part):
    """Base of the recurrence axis: its module takes ``(out, normed)`` and returns the next feature.

    The logits are always the head of the normed state; a recurrence only chooses what returns.
    """


@dataclass(frozen=True)
class PreNorm(Recurrence):
    """EAGLE-1 to 3: feed the un-normalised output back (https://arxiv.org/abs/2503.01840)."""

    def build(self, config: "DrafterConfig") -> nn.Module:
        return FeedRaw()


class FeedRaw(nn.Module):
    def forward(self, raw_BTH: Tensor, normed_BTH: Tensor) -> Tensor:
        return raw_BTH


@dataclass(frozen=True)
class PostNorm(Recurrence):
    """EAGLE-3.1's ``norm_output``: feed back what the head sees (https://arxiv.org/abs/2605.09992)."""

    def check(self, config: "DrafterConfig | DrafterSpec") -> None:
        if not config.norms.output:
            raise ValueError("recurrence PostNorm needs norms.output=true: there is no norm to feed back from")

    def build(self, config: "DrafterConfig") -> nn.Module:
        return FeedNormed()


class FeedNormed(nn.Module):
    def forward(self, raw_BTH: Tensor, normed_BTH: Tensor) -> Tensor:
        return normed_BTH
