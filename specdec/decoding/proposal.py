"""The drafter at work: its cache, the two ways rows enter it, and the base of the shapes that a proposal may have.

Legend: B sequences, M newly committed tokens, N aux layers, K frontier nodes, Q drafted nodes, H hidden, D draft
vocabulary.
"""

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from specdec.decoding.accept import Rule
from specdec.decoding.sampling import LIKELIEST, ChildSampling
from specdec.decoding.tree import DraftTree
from specdec.drafter import Drafter, DraftVocab, Step
from specdec.nn.cache import StaticCache
from specdec.nn.view import View


class Frontier(NamedTuple):
    """What the drafter says at K nodes: the next features, and the next token's logits."""

    h_BKH: Tensor
    logits_BKD: Tensor  # float32 at least

    @property
    def log_probs_BKD(self) -> Tensor:  # noqa: N802  shapes are part of names
        """The next token's log-probabilities."""
        return self.logits_BKD.log_softmax(-1)


Expand = Callable[[Tensor, Tensor, Tensor, Tensor], Frontier]
"""(ids_BK, h_BKH, seen_BKQ, depth_BQ) -> Frontier: one level of drafting; see View.append for the last two."""


@dataclass(frozen=True)
class DraftShape:
    """Base of the draft shapes: how many levels and how many nodes, root excluded, a proposal has, and how it grows."""

    depth: int = 5

    in_order: ClassVar[bool] = False
    """Whether every path is the first nodes of its tree, so that its keys lie where they belong already."""

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ValueError(f"shape: depth must be at least 1, not {self.depth}")

    @property
    def nodes_drafted(self) -> int:
        """Draft tokens per proposal, at most."""
        raise TypeError(f"{type(self).__name__} must say how many nodes it proposes")

    @property
    def slots(self) -> int:
        """Drafter cache slots that growing needs beyond the committed ones."""
        raise TypeError(f"{type(self).__name__} must say how many slots it needs")

    @property
    def name(self) -> str:
        """Short name for tables and plots."""
        raise TypeError(f"{type(self).__name__} must have a name")

    def describe(self) -> dict[str, Any]:
        """Its parameters, for reports."""
        return {"class": type(self).__name__, **asdict(self)}

    def check(self, draft_vocab_size: int) -> None:
        """Raise ValueError when the drafter cannot propose so."""

    def check_rule(self, rule: Rule) -> None:
        """Raise ValueError when the rule cannot judge what is proposed so."""

    def prepare(self, device: torch.device) -> None:
        """Make what no round changes, before any."""

    def grow(
        self, root_B: Tensor, start: Frontier, expand: Expand, vocab: DraftVocab, children: ChildSampling
    ) -> DraftTree:
        """The proposal after ``root_B``, given what the drafter says there, with K = 1."""
        raise TypeError(f"{type(self).__name__} must grow")


class Proposer:
    """A drafter, its cache and a shape, for B sequences.

    Row i of a sequence holds the pair of the target's true feature i and token i + 1.

    Args:
        longest: tokens of the longest sequence, drafts excluded.

    Attributes:
        capacity: key slots of a sequence: those tokens, and the drafts or the padding behind the new rows.
    """

    def __init__(self, drafter: Drafter, shape: DraftShape, longest: int, batch: int = 1) -> None:
        config, weight = drafter.config, drafter.lm_head.weight
        shape.check(config.draft_vocab_size)
        shape.prepare(weight.device)
        self.drafter, self.shape = drafter, shape
        self.capacity = longest + max(shape.slots, shape.depth)
        self.cache = StaticCache(
            config.num_layers, config.num_key_value_heads, self.capacity, config.head_dim, weight.dtype, weight.device,
            batch,
        )  # fmt: skip

    def prefill(self, b: int, ids_1M: Tensor, aux_1MNH: Tensor) -> None:
        """The first M tokens of sequence ``b`` that have a feature before them."""
        view = View.chain(torch.zeros_like(ids_1M[0, :1]), ids_1M.shape[1], self.capacity, self.cache.row(b))
        asked_11 = torch.zeros_like(ids_1M[:, :1])  # it runs for its keys, nobody reads its output
        self.drafter.step(ids_1M, self.drafter.fuse(aux_1MNH), view._replace(wanted_BM=asked_11))

    def extend(self, length_B: Tensor, ids_BM: Tensor, aux_BMNH: Tensor, count_B: Tensor) -> Frontier:
        """Commit tokens with the target's true features, over whatever had been guessed in their rows.

        Args:
            length_B: int64, the rows committed so far.
            ids_BM: the tokens that follow each feature; the last that counts is the next root.
            count_B: int64, how many of the M are meant; the rest is padding, whose rows are free again.
        """
        last_B1 = (count_B - 1).clamp_min(0)[:, None]
        view = View.chain(length_B, ids_BM.shape[1], self.capacity, self.cache)._replace(wanted_BM=last_B1)
        return self._frontier(self.drafter.step(ids_BM, self.drafter.fuse(aux_BMNH), view))

    def propose(
        self, length_B: Tensor, root_B: Tensor, start: Frontier, children: ChildSampling = LIKELIEST
    ) -> DraftTree:
        """Grow a proposal after the roots, from what :meth:`extend` returned.

        Args:
            length_B: int64, the rows committed by now.
        """
        expand = functools.partial(self.expand, length_B)
        return self.shape.grow(root_B, start, expand, self.drafter.vocab, children)

    def expand(self, length_B: Tensor, ids_BK: Tensor, h_BKH: Tensor, seen_BKQ: Tensor, depth_BQ: Tensor) -> Frontier:
        """One level of drafting, with the drafter's own features in place of the target's; see :data:`Expand`."""
        view = View.append(length_B, seen_BKQ, depth_BQ, self.capacity, self.cache)
        return self._frontier(self.drafter.step(ids_BK, h_BKH, view))

    def _frontier(self, step: Step) -> Frontier:
        logits_BKD = self.drafter.logits(step.normed_BTH)
        return Frontier(step.h_BTH, logits_BKD.to(torch.promote_types(logits_BKD.dtype, torch.float32)))
