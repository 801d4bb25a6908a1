"""Draft shapes: how a proposal grows, level by level, into a chain or EAGLE-2's dynamic tree.

Legend: B sequences, N tree nodes with the root, K frontier nodes, k = top_k, Q drafted nodes so far, C candidates of a
level, H hidden, D draft vocabulary, V any vocabulary, X noise numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from specdec.decoding.accept import RULES, DraftTree, Rule
from specdec.decoding.sampling import DRAFT, draw_distinct, exponential
from specdec.drafter import DrafterConfig, DraftVocab
from specdec.drafting.mode import Expand, Frontier
from specdec.utils.numbers import Depth, Side, check_numbers


class ChildSampling(NamedTuple):
    """Finds the children of tree nodes as an acceptance rule needs them: the most likely ones, or drawn at random."""

    rule: Rule  # children are drawn if it is ``sampled``; the rest is read only then
    temperature: float  # of the drafter
    seed_B: Tensor  # int64, of each sequence's noise
    place_B: Tensor  # int64, where the root stands in each text

    def find(self, logits_BKD: Tensor, width: int, level: int) -> tuple[Tensor, Tensor | None]:
        """The children of nodes at a level of the tree (the root's is 0), in order, (B, K, width) draft ids; and what
        they were drawn from, (B, K, D), if they were."""
        if not self.rule.sampled:
            return likeliest(logits_BKD, width)[1], None
        q_BKD = (logits_BKD / self.temperature).softmax(-1)
        # Of this pass alone, so by the root's place and the level, not by the draft's place: the next pass may draft
        # there too, and that it does can depend on what was drawn here (Block judges by drafts that it refuses).
        noise_B1X = exponential(self.seed_B, self.place_B[:, None], DRAFT + level, q_BKD[0].numel())
        return draw_distinct(q_BKD, noise_B1X.view_as(q_BKD), width), q_BKD


def likeliest(scores_V: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The greatest scores in order, and their tokens, (..., count) each; of one alone, the first of its equals."""
    values, tokens = scores_V.max(-1, keepdim=True) if count == 1 else scores_V.topk(count)
    return values, tokens


@dataclass(frozen=True)
class DraftShape:
    """Base of the draft shapes: how many levels and how many nodes, root excluded, a proposal has, and how it grows."""

    depth: Depth = 5

    in_order: ClassVar[bool] = False
    """Whether every path is the first nodes of its tree, so that its keys lie where they belong already."""

    def __post_init__(self) -> None:
        check_numbers(type(self), vars(self), "shape: ")

    @property
    def nodes_drafted(self) -> int:
        """Draft tokens per proposal, at most."""
        raise TypeError(f"{type(self).__name__} must say how many nodes it proposes")

    @property
    def sizes(self) -> Sequence[int]:
        """The numbers of nodes that trees may have, the root included, ascending. Where there are several, growing
        reads from the device which it is."""
        return [self.nodes_drafted + 1]

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
        parameters = {
            parameter.name: getattr(self, parameter.name)
            for parameter in fields(self)
            if parameter.compare
        }
        return {"class": type(self).__name__, **parameters}

    def check(self, config: DrafterConfig) -> None:
        """Raise ValueError when the drafter cannot propose so."""
        config.drafting.check_depth(self.depth)

    def check_rule(self, rule: Rule) -> None:
        """Raise ValueError when the rule cannot judge what is proposed so."""
        if rule.needs_chain and not self.in_order:
            name = next(
                (word for word, known in RULES.items() if known == rule), type(rule).__name__
            )
            raise ValueError(
                f"shape: {self.name} branches, and the rule {name} judges chains: use a chain"
            )

    def prepare(self, device: torch.device) -> None:
        """Make what no round changes, before any."""

    def grow(
        self,
        root_B: Tensor,
        start: Frontier,
        expand: Expand,
        vocab: DraftVocab,
        children: ChildSampling,
    ) -> DraftTree:
        """The proposal after ``root_B``, given what the drafter says there, with K = 1."""
        raise TypeError(f"{type(self).__name__} must grow")


@dataclass(frozen=True)
class Chain(DraftShape):
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

    def grow(
        self,
        root_B: Tensor,
        start: Frontier,
        expand: Expand,
        vocab: DraftVocab,
        children: ChildSampling,
    ) -> DraftTree:
        order_N = torch.arange(self.depth + 1, device=root_B.device)
        tokens = [root_B]
        drawn = []
        frontier = start
        for level in range(self.depth):
            # a draft sees all before it; the first has depth 0, since the root is committed
            if level:
                seen_1Q = torch.ones(1, level, dtype=torch.bool, device=root_B.device)
                frontier = expand(tokens[-1][:, None], frontier.h_BKH, seen_1Q, order_N[:level])
            draft_B11, q_B1D = children.find(frontier.logits_BKD, 1, level)
            tokens.append(vocab.to_target(draft_B11[:, 0, 0]))
            if q_B1D is not None:
                drawn.append(q_B1D)
        tokens_BN = torch.stack(tokens, 1)
        parents_BN = (order_N - 1).clamp(min=0).expand(len(root_B), -1)
        if not drawn:
            return DraftTree(tokens_BN, parents_BN)
        q_BND = torch.cat([*drawn, torch.zeros_like(drawn[0])], 1)
        return DraftTree(tokens_BN, parents_BN, q_BND, vocab.target_ids_D)


@dataclass(frozen=True)
class DynamicTree(DraftShape):
    """EAGLE-2's context-dependent tree (https://arxiv.org/abs/2406.16858).

    Every level expands the ``top_k`` nodes of highest value, the product of the drafter's probabilities along the
    path; at the end the ``nodes`` best candidates of all levels are kept. There, ties go to the shallower node, then to
    the earlier candidate, so that a kept node's parent is always kept. The published tree of 60 tokens, depth 6, top-10
    is ``nodes=59, depth=6, top_k=10``.
    """

    top_k: Side = 4
    nodes: Side = 12

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.top_k + (self.depth - 1) * self.top_k**2
        if self.nodes > most:
            raise ValueError(
                f"shape: depth {self.depth} and top_k {self.top_k} make 1 to {most} candidates, not {self.nodes}"
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

    def check(self, config: DrafterConfig) -> None:
        super().check(config)
        if self.top_k > config.draft_vocab_size:
            raise ValueError(
                f"shape: top_k {self.top_k} is more than the draft vocabulary of {config.draft_vocab_size}"
            )

    def check_rule(self, rule: Rule) -> None:
        if rule.sampled:
            raise ValueError(
                f"shape: {self.name} keeps the drafts it likes best, which no rule for drawn drafts allows: "
                "use a chain or a static tree, or the rule one_hot"
            )

    def grow(
        self,
        root_B: Tensor,
        start: Frontier,
        expand: Expand,
        vocab: DraftVocab,
        children: ChildSampling,
    ) -> DraftTree:
        k = self.top_k
        device = root_B.device
        value_BK, best_BK = likeliest(start.logits_BKD[:, 0].log_softmax(-1), k)
        ids_BK = vocab.to_target(best_BK)
        h_BKH = start.h_BKH.expand(-1, k, -1)
        # the frontier's places among all candidates
        candidate_BK = torch.arange(k, device=device).expand_as(ids_BK)
        eye_BKK = torch.eye(k, dtype=torch.bool, device=device).expand(len(root_B), k, k)
        seen_BKQ = eye_BKK
        tokens = [ids_BK]
        values = [value_BK]
        parents = [torch.full_like(ids_BK, -1)]
        for level in range(self.depth - 1):
            # the drafter reads the frontier; each of its nodes brings k candidates, valued by their path
            depth_Q = torch.arange(k * (level + 1), device=device) // k
            frontier = expand(ids_BK, h_BKH, seen_BKQ, depth_Q)
            log_q_BKk, best_BKk = likeliest(frontier.logits_BKD.log_softmax(-1), k)
            value_BC = (log_q_BKk + value_BK[..., None]).flatten(1)
            ids_BC = vocab.to_target(best_BKk).flatten(1)
            tokens.append(ids_BC)
            values.append(value_BC)
            parents.append(candidate_BK[..., None].expand(-1, -1, k).flatten(1))
            # the k best of this level's candidates are the next frontier; each sees itself and what its parent saw
            value_BK, chosen_BK = value_BC.topk(k)
            parent_BK = chosen_BK // k
            ids_BK = ids_BC.gather(1, chosen_BK)
            candidate_BK = k + level * k * k + chosen_BK
            h_BKH = frontier.h_BKH.take_along_dim(parent_BK[..., None], dim=1)
            seen_BKQ = torch.cat(
                [seen_BKQ.take_along_dim(parent_BK[..., None], dim=1), eye_BKK], dim=2
            )
        # the best of all: candidates stand in level order, so a stable sort breaks ties as documented
        order_BC = torch.cat(values, 1).sort(dim=-1, descending=True, stable=True).indices
        best_BN = order_BC[:, : self.nodes].sort(dim=-1).values
        tokens_BN = torch.cat(tokens, 1).gather(1, best_BN)
        # a candidate's parent becomes a node's; node 0 is the root, parent of the first k candidates
        parent_BN = torch.searchsorted(best_BN, torch.cat(parents, 1).gather(1, best_BN)) + 1
        parent_BN = torch.where(best_BN < k, 0, parent_BN)
        root_B1 = root_B[:, None]
        return DraftTree(
            torch.cat([root_B1, tokens_BN], 1),
            torch.cat([torch.zeros_like(root_B1), parent_BN], 1),
        )
