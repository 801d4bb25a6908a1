"""The shape of the proposal: a chain, or EAGLE-2's dynamic tree.

Legend: K frontier nodes, Q drafted nodes so far, C candidates, N tree nodes with the root, D draft vocabulary, H width.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.decoding.children import Children
from specdec.decoding.rules import Rule
from specdec.decoding.tree import DraftTree
from specdec.drafter import DraftVocab


class Frontier(NamedTuple):
    """What the drafter says at K nodes: the next features and the law of the next token."""

    h_KH: Tensor
    log_probs_KD: Tensor  # float32 at least


Expand = Callable[[Tensor, Tensor, Tensor, Tensor], Frontier]
"""(ids_K, h_KH, seen_KQ, depth_Q) -> Frontier: one level of drafting; see View.append for the last two."""


@dataclass(frozen=True)
class Growth:
    """Base of the growths: how many levels and how many nodes, root excluded, a proposal has."""

    depth: int = 5

    @property
    def nodes_drafted(self) -> int:
        """Draft tokens per proposal, the same in every round."""
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

    def grow(self, root_1: Tensor, start: Frontier, expand: Expand, vocab: DraftVocab, children: Children) -> DraftTree:
        """The proposal after ``root_1``, given what the drafter says there."""
        raise TypeError(f"{type(self).__name__} must grow")

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ValueError(f"growth: depth must be at least 1, not {self.depth}")


@dataclass(frozen=True)
class Chain(Growth):
    """One token after another; ``depth`` draft tokens."""

    @property
    def nodes_drafted(self) -> int:
        return self.depth

    @property
    def slots(self) -> int:
        return self.depth - 1

    @property
    def name(self) -> str:
        return f"chain of {self.depth}"

    def ends(self, chosen: Sequence[tuple[Tensor, Tensor]]) -> bool:
        """Whether to stop before ``depth``, given for every draft so far its log-probabilities (1, D) and id (1,)."""
        return False

    def grow(self, root_1: Tensor, start: Frontier, expand: Expand, vocab: DraftVocab, children: Children) -> DraftTree:
        device = root_1.device
        order = torch.arange(self.depth + 1, device=device)
        tokens, frontier, laws, chosen = [root_1], start, [], []
        for level in range(self.depth):
            laws.append(children.law(frontier.log_probs_KD))
            chosen.append((frontier.log_probs_KD, children.find(laws[-1], 1, level)[:, 0]))
            tokens.append(vocab.to_target(chosen[-1][1]))
            if level + 1 == self.depth or self.ends(chosen):
                break
            seen_1Q = torch.ones(1, level + 1, dtype=torch.bool, device=device)
            frontier = expand(tokens[-1], frontier.h_KH, seen_1Q, order[: level + 1])
        q_ND = torch.cat([*laws, torch.zeros_like(laws[0])]) if children.rule.sampled else None
        return DraftTree(torch.cat(tokens), (order[: len(tokens)] - 1).clamp(min=0), q_ND)


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

    def grow(self, root_1: Tensor, start: Frontier, expand: Expand, vocab: DraftVocab, children: Children) -> DraftTree:
        k, device = self.top_k, root_1.device
        first = start.log_probs_KD[-1].topk(k)
        value_K, ids_K, h_KH = first.values, vocab.to_target(first.indices), start.h_KH[-1:].expand(k, -1)
        eye_KK = torch.eye(k, dtype=torch.bool, device=device)
        seen_KQ, candidate_K = eye_KK, torch.arange(k, device=device)
        tokens, values, parents = [ids_K], [value_K], [torch.full((k,), -1, device=device)]
        for level in range(self.depth - 1):
            depth_Q = torch.arange(level + 1, device=device).repeat_interleave(k)
            frontier = expand(ids_K, h_KH, seen_KQ, depth_Q)
            best = frontier.log_probs_KD.topk(k)
            value_C = (best.values + value_K[:, None]).flatten()
            ids_C = vocab.to_target(best.indices).flatten()
            offset = k + level * k * k
            tokens.append(ids_C)
            values.append(value_C)
            parents.append(candidate_K.repeat_interleave(k))
            value_K, chosen_K = value_C.topk(k)
            parent_K = chosen_K // k
            ids_K, h_KH, candidate_K = ids_C[chosen_K], frontier.h_KH[parent_K], offset + chosen_K
            seen_KQ = torch.cat([seen_KQ[parent_K], eye_KK], dim=1)
        # candidates stand in level order, so a stable sort breaks ties as documented
        order_C = torch.sort(torch.cat(values), descending=True, stable=True).indices
        kept_N = order_C[: self.nodes].sort().values
        parent_N = torch.searchsorted(kept_N, torch.cat(parents)[kept_N]) + 1
        parent_N[kept_N < k] = 0
        return DraftTree(torch.cat([root_1, torch.cat(tokens)[kept_N]]), torch.cat([parent_N.new_zeros(1), parent_N]))
