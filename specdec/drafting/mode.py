"""The interface of every way in which the drafts of a target pass are made.

A recurrence says how its drafter drafts (:meth:`specdec.drafting.chained.Recurrence.drafting`). Whoever trains,
decodes, exports or measures asks that :class:`DraftingMode`, and never what kind of recurrence it is; only the tables
of what engines know list recurrences by name. One file holds both halves of a way, training's and decoding's: what is
trained must be what is decoded.

A *slot* is a place of a text, with the feature and the token there; an *anchor* is a slot at which drafting begins; a
*node* is what passes through the drafter's layers, one for each token that a step reads; a *row* is a node's place in
the cache of decoding.

Legend: B batch, T tokens, N aux layers, H hidden, W what the entry reads of a token, K unroll steps or frontier nodes,
M newly committed tokens, Q drafted nodes, D draft vocabulary, A anchors.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from specdec.drafting.branches import Branches, Chains
from specdec.drafting.slots import KeptSlots
from specdec.nn.backend import widened
from specdec.nn.cache import StaticCache
from specdec.nn.unroll import UnrollKernel
from specdec.nn.view import View

if TYPE_CHECKING:
    from specdec.drafter import Drafter, DrafterConfig

SMALLEST_KEPT_SHARE = 0.2
"""A step keeps this share of the slots at least, unless step 0 keeps less."""


class Step(NamedTuple):
    """What one step of the drafter yields for every node."""

    h_BTH: Tensor  # the feature handed to the next step, if one reads it
    normed_BTH: Tensor  # what the head reads: `Drafter.logits(normed)`


class Frontier(NamedTuple):
    """What the drafter says at K nodes: the next features, and the next token's logits."""

    h_BKH: Tensor
    logits_BKD: Tensor  # float32 at least
    # what a drafter's confidence head says of the draft that follows; of nodes whose token before is known
    confidence_BK: Tensor | None = None

    @classmethod
    def of(cls, drafter: "Drafter", step: Step) -> "Frontier":
        """Return a step's features, with the head's logits."""
        logits_BKD = drafter.logits(step.normed_BTH)
        return cls(step.h_BTH, widened(logits_BKD))

    def confidences(self) -> Tensor:
        """Return the confidence in the draft of every node, (B, K): the confidence head's, if there is one, and else
        the largest probability of the draft's distribution at temperature 1."""
        if self.confidence_BK is not None:
            return self.confidence_BK
        return self.logits_BKD.log_softmax(-1).amax(-1).exp()

    def first(self) -> "Frontier":
        """Return what the drafter says at the first node."""
        confidence = self.confidence_BK
        return Frontier(
            self.h_BKH[:, :1],
            self.logits_BKD[:, :1],
            None if confidence is None else confidence[:, :1],
        )


Expand = Callable[[Tensor, Tensor, Tensor, Tensor], Frontier]
"""(ids_BK, h_BKH, seen_BKQ, depth_BQ) -> Frontier: one level of drafting; see View.append for the last two."""


class DrafterMemory:
    """A drafter and its key-value cache, with room for B sequences and the drafts behind each.

    Args:
        depth: drafts of a pass.
        capacity: key slots of a sequence.
    """

    def __init__(self, drafter: "Drafter", depth: int, capacity: int, batch: int) -> None:
        config = drafter.config
        weight = drafter.lm_head.weight
        self.drafter = drafter
        self.depth = depth
        self.capacity = capacity
        self.cache = StaticCache(
            config.num_layers,
            config.num_key_value_heads,
            capacity,
            config.head_dim,
            weight.dtype,
            weight.device,
            batch,
        )

    def append(
        self, length_B: Tensor, ids_BK: Tensor, h_BKH: Tensor, seen_BKQ: Tensor, depth_BQ: Tensor
    ) -> Frontier:
        """Run K nodes behind the committed rows; see :meth:`specdec.nn.view.View.append` for the last two."""
        view = View.append(length_B, seen_BKQ, depth_BQ, self.capacity, self.cache)
        return Frontier.of(self.drafter, self.drafter.step(ids_BK, h_BKH, view))


class UnrollTask(NamedTuple):
    """What training unrolls; :meth:`specdec.drafter.Drafter.unroll` says what each is."""

    ids_BT: Tensor
    aux_BTNH: Tensor
    documents_BT: Tensor
    steps: int
    kernel: UnrollKernel
    recompute: bool
    kept_slots: Sequence[KeptSlots | None]


class AnchorDrafting(NamedTuple):
    """What drafting at A anchors of one text starts from; see :mod:`specdec.diagnostics.anchors`."""

    anchor_A: Tensor  # int64, the positions of the last committed tokens
    text_rows: int  # rows of the text in the drafter's cache
    root_1A: Tensor  # int64, the tokens at the anchors
    feature_1AH: Tensor  # the true features before them
    given_AK: Tensor | None  # int64, tokens that later steps read instead of their drafts
    on_step: Callable[[int], object]  # called after each step, with its number


class DraftingMode:
    """Base of the ways: frozen, without state."""

    one_call: ClassVar[bool] = False
    """Whether one call of the drafter makes all drafts of a pass, so that no step reads another's output."""
    engine_method: ClassVar[str | None] = None
    """The name that engines have for it; None where the entry decides between ``eagle`` and ``eagle3``."""
    generation: ClassVar[str | None] = None
    """The name of the published generation; None where other parts decide."""
    summary: str = ""
    """How it drafts, as a line of an import's report; empty for a chain."""
    fixed_drafts: int = 0
    """Drafts that every pass makes, no more and no fewer; 0 where a pass makes as many as are asked of it."""
    embedding_gathers: ClassVar[int] = 1
    """How often a training step reads the embedding table, which FSDP2 gathers for each."""
    has_confidence: bool = False
    """Whether the drafter has a head that estimates whether its drafts are accepted."""

    def check_depth(self, depth: int) -> None:
        """Raise ValueError if a pass cannot draft ``depth`` tokens."""
        if 0 < self.fixed_drafts < depth:
            raise ValueError(
                f"{depth} drafts are asked of a block that makes {self.fixed_drafts}: give a depth of "
                f"{self.fixed_drafts} or less, as --shape chain:depth={self.fixed_drafts}"
            )

    def check_training(self, recurrence: str, steps: int) -> None:
        """Raise ValueError if it cannot be trained with this many unroll steps.

        Args:
            recurrence: the name to call it by.
        """

    def check_recompute(self) -> None:
        """Raise ValueError if steps cannot be computed again one by one in the backward pass."""

    # ---- the head ----

    extra_width: int = 0
    """Columns that follow the state in what the head reads."""

    def head_weights(self, drafter: "Drafter") -> list[Tensor]:
        """Return the matrices, (D, width) each, that training multiplies the columns of the steps' ``normed_BTH`` with,
        one after another, to get draft logits, the sum of the products."""
        return [drafter.lm_head.weight]

    def logits(self, drafter: "Drafter", normed: Tensor) -> Tensor:
        """Return the draft logits (..., D) of what :meth:`unroll` yields, (..., width)."""
        return drafter.lm_head(normed)

    def confidence_logits(self, drafter: "Drafter", normed: Tensor) -> Tensor:
        """Return the logits (...) of the chance that each draft is accepted, of what :meth:`unroll` yields, in float32
        or wider."""
        raise TypeError(f"{type(self).__name__} has no confidence head")

    # ---- training ----

    def unroll(self, drafter: "Drafter", task: UnrollTask) -> Iterator[Step]:
        """Yield the drafter's steps 0 to ``steps - 1`` at every anchor of a batch at once."""
        raise TypeError(f"{type(self).__name__} must say how it is unrolled")

    def shares(self, keep: float, steps: int) -> list[float]:
        """Return the share of the slots that each step learns at, where slots are drawn.

        What one step leaves out is in no later one either (conditional drop, https://arxiv.org/abs/2504.18583).
        """
        smallest = min(SMALLEST_KEPT_SHARE, keep)
        return [max(keep**k, smallest) for k in range(steps)]

    def kept_slots(self, trained_KBT: Tensor) -> list[KeptSlots | None]:
        """Return the slots that each step must compute where later steps leave out more: its own and later ones'."""
        return [KeptSlots.of(trained_KBT[k:]) for k in range(len(trained_KBT))]

    def drafted_nodes(self, shares: Sequence[float]) -> float:
        """Return the nodes that pass through the layers in a training step, for each token of the text."""
        return sum(shares)

    def activation_bytes(
        self, config: "DrafterConfig", number_bytes: int, B: int, T: int, shares: Sequence[float], recompute: bool
    ) -> int:  # fmt: skip
        """Return the bytes that the unroll keeps for the backward pass, the fusion aside.

        Args:
            number_bytes: of a number in the dtype of the products.
            shares: of the slots, for each of K steps.
        """
        raise TypeError(f"{type(self).__name__} must say what its unroll keeps")

    # ---- decoding ----

    def extra_rows(self, depth: int) -> int:
        """Return the cache rows that run together with newly committed ones, for ``depth`` drafts of a pass."""
        return 0

    def prefill(
        self, memory: DrafterMemory, cache: StaticCache, ids_1M: Tensor, h_1MH: Tensor
    ) -> None:
        """Fill one sequence's cache with the first M tokens that have a feature before them."""
        raise TypeError(f"{type(self).__name__} must say how a prompt is read")

    def start(
        self, memory: DrafterMemory, length_B: Tensor, ids_BM: Tensor, h_BMH: Tensor, count_B: Tensor
    ) -> Frontier:  # fmt: skip
        """Commit tokens with true features, and say what follows the last of them.

        Args:
            length_B: int64, the rows committed so far.
            ids_BM: int64, the token that follows each feature; the last that counts is the next root.
            h_BMH: the features.
            count_B: int64, how many of the M count; the rest is padding, whose rows are free again.

        Returns:
            K = 1 node; of a way that makes all drafts in one call, a node for each level, of which the logits of later
            levels may lack what :meth:`expand` adds.
        """
        raise TypeError(f"{type(self).__name__} must say how a pass starts")

    def expand(self, memory: DrafterMemory, start: Frontier, length_B: Tensor) -> Expand:
        """Return what makes each further level of a proposal, after ``start``."""
        raise TypeError(f"{type(self).__name__} must say how a level is drafted")

    # ---- diagnostics ----

    def draft_at_anchors(self, memory: DrafterMemory, task: AnchorDrafting) -> Chains:
        """Draft ``memory.depth`` tokens greedily at every anchor of a text that the cache holds."""
        raise TypeError(f"{type(self).__name__} must say how it drafts at given places")

    def nodes_of_step(self, step: int, anchors: int) -> slice:
        """Return which nodes of the drafter's last call are those of a step at this many anchors."""
        return slice(None)

    def learned_states(self, drafter: "Drafter") -> Tensor | None:
        """Return the learned states that later steps read in place of the target's, if there are any."""
        return None


def levels_of(start: Frontier) -> Expand:
    """Return an :data:`Expand` for levels that one call has made: all nodes of a level have the same to say."""

    def expand(ids_BK: Tensor, h_BKH: Tensor, seen_BKQ: Tensor, depth_BQ: Tensor) -> Frontier:
        next_1 = depth_BQ.flatten()[-1:] + 1  # the level behind the last node's
        nodes = ids_BK.shape[1]
        h_B1H = start.h_BKH.index_select(1, next_1)
        logits_B1D = start.logits_BKD.index_select(1, next_1)
        return Frontier(h_B1H.expand(-1, nodes, -1), logits_B1D.expand(-1, nodes, -1))

    return expand


def branches_of(task: AnchorDrafting, first_row_A: Tensor) -> tuple[Branches, Tensor]:
    """Return who sees whom among chains at rows of a text, and the rows that every chain sees, int64 (1,).

    Args:
        first_row_A: int64, the row of the text whose place a chain's first node takes.
    """
    shared = int(first_row_A.min())
    branches = Branches(task.text_rows - shared, first_row_A - shared)
    return branches, torch.full_like(task.root_1A[0, :1], shared)


def attention_numbers(config: "DrafterConfig") -> tuple[int, int]:
    """Return the widths of a layer's queries, and of its keys (those of its values too), all heads together."""
    return (
        config.num_attention_heads * config.head_dim,
        config.num_key_value_heads * config.head_dim,
    )


def linear_inputs(part: Any, config: "DrafterConfig") -> list[int]:
    """Return the input width of every linear layer that a part builds."""
    with torch.device("meta"):
        modules = part.build(config).modules()
    return [module.in_features for module in modules if isinstance(module, nn.Linear)]
