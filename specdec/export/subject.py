"""The pair of a drafter and its target, as far as engines differ in it."""

from typing import NamedTuple

from specdec.drafter import MLA, DrafterConfig, LastLayer, Wide
from specdec.export.engine_targets import (
    ROPE_CHANGED,
    SCALED_EMBEDDINGS,
    THROUGH_TRANSFORMERS,
    target_flags,
)

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"


class Subject(NamedTuple):
    """The properties of a drafter and its target that engines differ in."""

    config: DrafterConfig
    own_embedding: bool = False  # whether the token embedding is another than the target's
    # whether the head knows fewer tokens than the target's, or has other weights
    own_head: bool = False
    entry_bias: bool = False  # whether a narrow entry adds a bias that is not zero
    architecture: str = ""  # of the target, as its config.json names the class
    # see engine_targets: window_of_all_layers, heads_of_mixed
    target_window: int | None = None
    mixed_heads: tuple[int, int] | None = None

    @property
    def method(self) -> str:
        """The engines' name of the drafter's kind: ``eagle`` for EAGLE-1 and 2, ``eagle3`` for 3 to 3.1 and P-EAGLE."""
        if method := self.config.drafting.engine_method:
            return method
        wide = isinstance(self.config.entry, Wide)
        return "eagle" if isinstance(self.config.fusion, LastLayer) and not wide else "eagle3"

    @property
    def block(self) -> bool:
        """Whether a pass drafts a block of masks: method dflash or dspark."""
        return self.config.drafting.fixed_drafts > 0

    @property
    def fused(self) -> bool:
        """Whether it is a drafter of method eagle3 that reads the states at its boundaries, and not the last one."""
        return self.method == "eagle3" and self.config.fusion.mixes

    @property
    def parallel(self) -> bool:
        """Whether one call makes all drafts of a pass, which engines need to know for method eagle3."""
        return self.config.drafting.one_call and self.method == "eagle3"

    @property
    def narrowed(self) -> bool:
        """Whether vLLM would give the target's window to a drafter that attends to everything: its layers take what
        ``cache_config.sliding_window`` says if they name none, except MLA's."""
        sees_all = self.config.attention_window == "full" and type(self.config.attention) is not MLA
        return self.target_window is not None and sees_all

    @property
    def through_transformers(self) -> bool:
        """Whether vLLM runs the target through its Transformers backend for this drafter."""
        return (
            bool(self.architecture)
            and target_flags(self.architecture, self.method) == THROUGH_TRANSFORMERS
        )

    @property
    def spread(self) -> bool:
        """Whether vLLM may put the drafter's layers into several groups of its cache, which it does not draft with."""
        heads = self.config.num_key_value_heads, self.config.head_dim
        return self.config.num_layers > 1 and self.mixed_heads == heads

    @property
    def embedding_is_scaled(self) -> bool:
        """Whether vLLM would hand the drafter the target's embedding with a scale in it, and no norm takes that out."""
        shared = self.method != "eagle3" and not self.own_embedding
        return shared and self.architecture in SCALED_EMBEDDINGS and self.through_transformers

    @property
    def rope_is_changed(self) -> bool:
        """Whether vLLM's class of the target changes its rope, which a drafter with equal parameters is given too."""
        return self.architecture in ROPE_CHANGED

    @property
    def shared(self) -> tuple[str, ...]:
        """Names of the weights that are the target's and are left out of an export."""
        names = [] if self.own_embedding else [EMBEDDING]
        if self.method == "eagle" or (self.block and not self.own_head):
            names.append(HEAD)
        return tuple(names)
