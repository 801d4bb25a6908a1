"""How the token embedding meets the feature at the drafter's first layer.

Legend: B batch, T nodes, H hidden, W what the first layer's attention projects its input to.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from torch import Tensor, nn

from specdec.nn.parts import Part

if TYPE_CHECKING:
    from specdec.drafter.config import DrafterConfig, DrafterSpec
    from specdec.drafter.norms import NormTable


class Entered(NamedTuple):
    """What the first layer receives."""

    attn_input_BTH: Tensor
    # added to the projected queries, keys and values, W wide together; None for nothing
    qkv_bias_BTW: Tensor | None
    # where the residual path starts
    residual_BTH: Tensor
    # nodes of which every layer makes further keys and values, before those of the T nodes
    context_BCH: Tensor | None = None


class EntryModule(nn.Module):
    """Base of what an entry builds. Reading the token is a separate step: training does it once for all steps."""

    def read(self, e_BTH: Tensor) -> Tensor:
        """Return what the block needs of the normalized embedding, (B, T, anything).

        A row may depend on its own token alone: training computes each once and shifts it from step to step.
        """
        raise TypeError(f"{type(self).__name__} must say what it reads of a token")

    def forward(self, read: Tensor, f_BTH: Tensor, h_BTH: Tensor, norms: "NormTable") -> Entered:
        """``read`` from :meth:`read`, ``f`` the normalized feature, ``h`` the feature as it came."""
        raise TypeError(f"{type(self).__name__} must say what the first layer receives")


class Entry(Part):
    """Base of the entry axis: it builds an :class:`EntryModule`."""

    context: ClassVar[bool] = False
    """Whether features are no input of the first layer but keys and values of every layer, at separate nodes."""


@dataclass(frozen=True)
class Wide(Entry):
    """EAGLE-3 (https://arxiv.org/abs/2503.01840), as its code has it: q, k and v read ``[e; f]``, 2H channels."""

    def check(self, config: "DrafterConfig | DrafterSpec") -> None:
        """The input norms of a wide entry are those on its two halves."""
        if config.norms.input:
            raise ValueError(
                "norms.input belongs to entry Narrow; entry Wide is normalized by norms.embed and .hidden"
            )

    def build(self, config: "DrafterConfig") -> EntryModule:
        return WideEntry(config)


class WideEntry(EntryModule):
    """Embedding and feature side by side: a separate matrix takes the embedding into queries, keys and values."""

    def __init__(self, config: "DrafterConfig") -> None:
        super().__init__()
        projected = sum(config.attention.projections(config).values())
        self.token_qkv_proj = nn.Linear(config.hidden_size, projected, bias=False)
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
        """The residual path starts at the projection, so it cannot start at the normalized feature."""
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


@dataclass(frozen=True)
class KVInjection(Entry):
    """DFlash (https://arxiv.org/abs/2602.06036): every layer makes keys and values of the features, which stand where
    their tokens do; the drafted nodes start from their embeddings."""

    context: ClassVar[bool] = True

    def check(self, config: "DrafterConfig | DrafterSpec") -> None:
        """The drafts are a block, and each layer has its norm."""
        if not config.drafting.fixed_drafts:
            raise ValueError(
                f"entry KVInjection reads nothing that recurrence {type(config.recurrence).__name__} hands on: it "
                "needs recurrence MaskBlock"
            )
        required = {
            "norms.input=false": not config.norms.input,
            "norms.residual=raw": config.norms.residual == "raw",
            "attention_window=full": config.attention_window == "full",
        }
        missing = [setting for setting, holds in required.items() if not holds]
        if missing:
            raise ValueError(
                f"entry KVInjection has a norm before every layer, and no window: set {', '.join(missing)}"
            )

    def build(self, config: "DrafterConfig") -> EntryModule:
        return InjectionEntry()


class InjectionEntry(EntryModule):
    """Features of C nodes and embeddings of T others, as they are."""

    def read(self, e_BTH: Tensor) -> Tensor:
        """The embedding, (B, T, H)."""
        return e_BTH

    def forward(self, read: Tensor, f_BTH: Tensor, h_BTH: Tensor, norms: "NormTable") -> Entered:
        """Features, (B, C, H), are the context of the drafted nodes, which start at their embeddings, (B, T, H)."""
        return Entered(read, None, read, f_BTH)
