"""The shape of the proposal: a chain, or EAGLE-2's dynamic tree.

Legend: B sequences, K frontier nodes, Q drafted nodes so far, C candidates, N tree nodes with the root, D draft
vocabulary, H width.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from specdec.decoding.children import Children
from specdec.decoding.draws import likeliest
from specdec.decoding.rules import Rule
from specdec.decoding.tree import DraftTree
from specdec.drafter import DraftVocab


class Frontier(NamedTuple):
    """What the drafter says at K nodes: the next features, and the next token's logits."""

    h_BKH: Tensor
    logits_BKD: Tensor  # float32 at least

    @property
    def log_probs_BKD(self) -> Tensor:  # noqa: N802  shapes are part of names
        """Their law's logarithm."""
        return self.logits_BKD.log_softmax(-1)


Expand = Callable[[Tensor, Tensor, Tensor, Tensor], Frontier]
"""(ids_BK, h_BKH, seen_BKQ, depth_BQ) -> Frontier: one level of drafting; see View.append for the last two."""


@dataclass(frozen=True)
class Growth:
    """Base of the growths: how many levels and how many nodes, root excluded, a proposal has."""

    depth: int = 5

    fixed: ClassVar[bool] = True
    """Whether every round has the same shape, so that growing can be compiled; else a round may have fewer nodes."""

    in_order: ClassVar[bool] = False
    """Whether every path is the first nodes of its tree, so that its keys lie where they belong already."""

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
        """Raise ValueError when the drafter cannot be grown so."""

    def check_rule(self, rule: Rule) -> None:
        """Raise ValueError when the rule cannot judge what is grown so."""

    def prepare(self, device: torch.device) -> None:
        """Make what no round changes, before any."""

    def grow(self, root_B: Tensor, start: Frontier, expand: Expand, vocab: DraftVocab, children: Children) -> DraftTree:
        """The proposal after ``root_B``, given what the drafter says there, with K = 1."""
        raise TypeError(f"{type(self).__name__} must grow")

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ValueError(f"growth: depth must be at least 1, not {self.depth}")


@dataclass(frozen=True)
class Chain(Growth):
    """One token after another; ``depth`` draft tokens."""

    in_order: ClassVar[bool] = True

    @property
    def nodes_drafted(self) -> int:
        return self.depth

    @property
    def slots(self) -> int:
        return self.depth - 1

    @property
    def name(self) -> str:
        return f"chain of {self.depth}"

    def over(self, chosen: Sequence[tuple[Tensor, Tensor]]) -> Tensor | None:
        """Which sequences stop before ``depth``, (B,) bool, or None: no chain does.

        Args:
            chosen: for every draft so far its log-probabilities (B, D) and id (B,).
        """
        return None

    def grow(self, root_B: Tensor, start: Frontier, expand: Expand, vocab: DraftVocab, children: Children) -> DraftTree:
        order = torch.arange(self.depth + 1, device=root_B.device)
        tokens, frontier, laws, chosen, overs = [root_B], start, [], [], []
        for level in range(self.depth):
            laws.append(children.law(frontier.logits_BKD))
            chosen.append((frontier.log_probs_BKD[:, 0], children.find(laws[-1], 1, level)[:, 0, 0]))
            tokens.append(vocab.to_target(chosen[-1][1]))
            if (over_B := self.over(chosen)) is not None:
                overs.append(over_B)
            if level + 1 == self.depth or (over_B is not None and bool(over_B.all())):
                break
            seen_1Q = torch.ones(1, level + 1, dtype=torch.bool, device=root_B.device)
            frontier = expand(tokens[-1][:, None], frontier.h_BKH, seen_1Q, order[: level + 1])
        order_N = order[: len(tokens)]
        parents_BN = (order_N - 1).clamp(min=0).expand(len(root_B), -1)
        if overs:  # what a sequence drafts after its end becomes padding
            ended_BN = torch.stack([torch.zeros_like(overs[0])] * 2 + overs[:-1], 1).cumsum(1) > 0
            parents_BN = torch.where(ended_BN, order_N, parents_BN)
        q_BND = torch.cat([*laws, torch.zeros_like(laws[0])], 1) if children.rule.sampled else None
        return DraftTree(torch.stack(tokens, 1), parents_BN, q_BND)


@dataclass(frozen=True)
class DynamicTree(Growth):
    """EAGLE-2's context-dependent tree (https://arxiv.org/abs/2406.16858).

    Every level expands the ``top_k`` nodes of highest value, the product of the drafter's probabilities along the
    path; at the end the ``nodes`` best candidates of all levels are kept. There, ties go to the shallower node, then to
    the earlier candidate, so that a kept node's parent is always kept. The published tree of 60 tokens, depth 6, top-10
    is ``nodes=59, depth=6, top_k=10``.
    """

    top_k: int = 4
    nodes: int = 12

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.top_k + (self.depth - 1) * self.top_k**2
        if self.top_k < 1 or not 1 <= self.nodes <= most:
            raise ValueError(
                f"growth: depth {self.depth} and top_k {self.top_k} make 1 to {most} candidates, not {self.nodes}"
            )

    @property
    def nodes_drafted(self) -> int:
        return self.nodes

    @property
    def slots(self) -> int:
        return self.top_k * (self.depth - 1)

    @property
    def name(self) -> str:
        return f"tree of {self.nodes} (depth {self.depth}, top {self.top_k})"

    def check(self, draft_vocab_size: int) -> None:
        if self.top_k > draft_vocab_size:
            raise ValueError(f"growth: top_k {self.top_k} is more than the draft vocabulary of {draft_vocab_size}")

    def check_rule(self, rule: Rule) -> None:
        if rule.sampled:
            raise ValueError(
                f"growth: {self.name} keeps the drafts it likes best, which no rule for drawn drafts allows: "
                "use a chain or a static tree, or the rule one_hot"
            )

    def grow(self, root_B: Tensor, start: Frontier, expand: Expand, vocab: DraftVocab, children: Children) -> DraftTree:
        k, device = self.top_k, root_B.device
        value_BK, best_BK = likeliest(start.log_probs_BKD[:, 0], k)
        ids_BK, h_BKH = vocab.to_target(best_BK), start.h_BKH.expand(-1, k, -1)
        candidate_BK = torch.arange(k, device=device).expand_as(ids_BK)
        eye_BKK = torch.eye(k, dtype=torch.bool, device=device).expand(len(root_B), k, k)
        seen_BKQ = eye_BKK
        tokens, values, parents = [ids_BK], [value_BK], [torch.full_like(ids_BK, -1)]
        for level in range(self.depth - 1):
            depth_Q = torch.arange(k * (level + 1), device=device) // k
            frontier = expand(ids_BK, h_BKH, seen_BKQ, depth_Q)
            own_BKL, best_BKL = likeliest(frontier.log_probs_BKD, k)
            value_BC = (own_BKL + value_BK[..., None]).flatten(1)
            ids_BC = vocab.to_target(best_BKL).flatten(1)
            offset = k + level * k * k
            tokens.append(ids_BC)
            values.append(value_BC)
            parents.append(candidate_BK[..., None].expand(-1, -1, k).flatten(1))
            value_BK, chosen_BK = value_BC.topk(k)
            parent_BK = chosen_BK // k
            ids_BK, candidate_BK = ids_BC.gather(1, chosen_BK), offset + chosen_BK
            h_BKH = frontier.h_BKH.take_along_dim(parent_BK[..., None], dim=1)
            seen_BKQ = torch.cat([seen_BKQ.take_along_dim(parent_BK[..., None], dim=1), eye_BKK], dim=2)
        # candidates stand in level order, so a stable sort breaks ties as documented
        order_BC = torch.cat(values, 1).sort(dim=-1, descending=True, stable=True).indices
        kept_BN = order_BC[:, : self.nodes].sort(dim=-1).values
        parent_BN = torch.searchsorted(kept_BN, torch.cat(parents, 1).gather(1, kept_BN)) + 1
        parent_BN = torch.where(kept_BN < k, 0, parent_BN)
        tokens_BN = torch.cat(tokens, 1).gather(1, kept_BN)
        zero_B1 = torch.zeros_like(root_B)[:, None]
        return DraftTree(torch.cat([root_B[:, None], tokens_BN], 1), torch.cat([zero_B1, parent_BN], 1))
