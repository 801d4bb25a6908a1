"""The shapes of a proposal: a chain, EAGLE-2's dynamic tree and EAGLE-1's static tree.

Legend: B sequences, K frontier nodes, Q drafted nodes so far, C candidates, L nodes of a level, R child ranks, N tree
nodes with the root, D draft vocabulary, H width.
"""

import functools
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import yaml
from torch import Tensor

from specdec.decoding.accept import Rule
from specdec.decoding.noise import likeliest
from specdec.decoding.proposal import DraftShape, Expand, Frontier
from specdec.decoding.sampling import ChildSampling
from specdec.decoding.tree import DraftTree
from specdec.drafter import DraftVocab
from specdec.utils.files import explain

Ranks = tuple[int, ...]
"""A static tree's node, by the rank of every child on the way from the root: 0 is its parent's most likely."""

# https://arxiv.org/abs/2401.15077, as its authors' code has it under the name mc_sim_7b_63
_EAGLE1 = "0 1 2 3  00 01 02 10 11 20 21 30  000 001 002 010 011 020 021 100  0000 0001 0002  00000 00001"
EAGLE1: tuple[Ranks, ...] = tuple(tuple(map(int, path)) for path in _EAGLE1.split())
"""EAGLE-1's own tree: 25 nodes, with the root 26 tokens to verify."""


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
        self, root_B: Tensor, start: Frontier, expand: Expand, vocab: DraftVocab, children: ChildSampling
    ) -> DraftTree:
        order_N = torch.arange(self.depth + 1, device=root_B.device)
        tokens, drawn, frontier = [root_B], [], start
        for level in range(self.depth):
            if level:  # a draft sees all before it
                seen_1Q = torch.ones(1, level, dtype=torch.bool, device=root_B.device)
                frontier = expand(tokens[-1][:, None], frontier.h_BKH, seen_1Q, order_N[:level])
            draft_B11, q_B1D = children.find(frontier.logits_BKD, 1, level)
            tokens.append(vocab.to_target(draft_B11[:, 0, 0]))
            if q_B1D is not None:
                drawn.append(q_B1D)
        tokens_BN, parents_BN = torch.stack(tokens, 1), (order_N - 1).clamp(min=0).expand(len(root_B), -1)
        if not drawn:
            return DraftTree(tokens_BN, parents_BN)
        return DraftTree(tokens_BN, parents_BN, torch.cat([*drawn, torch.zeros_like(drawn[0])], 1), vocab.target_ids_D)


@dataclass(frozen=True)
class DynamicTree(DraftShape):
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

    def check(self, draft_vocab_size: int) -> None:
        if self.top_k > draft_vocab_size:
            raise ValueError(f"shape: top_k {self.top_k} is more than the draft vocabulary of {draft_vocab_size}")

    def check_rule(self, rule: Rule) -> None:
        if rule.sampled:
            raise ValueError(
                f"shape: {self.name} keeps the drafts it likes best, which no rule for drawn drafts allows: "
                "use a chain or a static tree, or the rule one_hot"
            )

    def grow(
        self, root_B: Tensor, start: Frontier, expand: Expand, vocab: DraftVocab, children: ChildSampling
    ) -> DraftTree:
        k, device = self.top_k, root_B.device
        value_BK, best_BK = likeliest(start.log_probs_BKD[:, 0], k)
        ids_BK, h_BKH = vocab.to_target(best_BK), start.h_BKH.expand(-1, k, -1)
        candidate_BK = torch.arange(k, device=device).expand_as(ids_BK)  # the frontier's places among all candidates
        eye_BKK = torch.eye(k, dtype=torch.bool, device=device).expand(len(root_B), k, k)
        seen_BKQ = eye_BKK
        tokens, values, parents = [ids_BK], [value_BK], [torch.full_like(ids_BK, -1)]
        for level in range(self.depth - 1):
            # the drafter reads the frontier; each of its nodes brings k candidates, valued by their path
            depth_Q = torch.arange(k * (level + 1), device=device) // k
            frontier = expand(ids_BK, h_BKH, seen_BKQ, depth_Q)
            own_BKL, best_BKL = likeliest(frontier.log_probs_BKD, k)
            value_BC = (own_BKL + value_BK[..., None]).flatten(1)
            ids_BC = vocab.to_target(best_BKL).flatten(1)
            tokens.append(ids_BC)
            values.append(value_BC)
            parents.append(candidate_BK[..., None].expand(-1, -1, k).flatten(1))
            # the k best of this level's candidates are the next frontier; each sees itself and what its parent saw
            value_BK, chosen_BK = value_BC.topk(k)
            parent_BK = chosen_BK // k
            ids_BK, candidate_BK = ids_BC.gather(1, chosen_BK), k + level * k * k + chosen_BK
            h_BKH = frontier.h_BKH.take_along_dim(parent_BK[..., None], dim=1)
            seen_BKQ = torch.cat([seen_BKQ.take_along_dim(parent_BK[..., None], dim=1), eye_BKK], dim=2)
        # the best of all: candidates stand in level order, so a stable sort breaks ties as documented
        order_BC = torch.cat(values, 1).sort(dim=-1, descending=True, stable=True).indices
        kept_BN = order_BC[:, : self.nodes].sort(dim=-1).values
        parent_BN = torch.searchsorted(kept_BN, torch.cat(parents, 1).gather(1, kept_BN)) + 1
        parent_BN = torch.where(kept_BN < k, 0, parent_BN)
        tokens_BN = torch.cat(tokens, 1).gather(1, kept_BN)
        zero_B1 = torch.zeros_like(root_B)[:, None]
        return DraftTree(torch.cat([root_B[:, None], tokens_BN], 1), torch.cat([zero_B1, parent_BN], 1))


class _StaticLevel(NamedTuple):
    """A static tree's nodes of one depth, in the order of the tree."""

    row_L: Tensor  # int64, which of the nodes expanded just before is the parent
    rank_L: Tensor  # int64
    ranks: int  # one more than the highest
    expanded_K: Tensor  # int64, the tree's nodes whose children these are
    inner_K: Tensor  # int64, which of the L are expanded; none of the last level
    seen_KQ: Tensor  # for View.append, as is the next
    depth_Q: Tensor


@dataclass(frozen=True)
class StaticTree(DraftShape):
    """The same nodes in every round (https://arxiv.org/abs/2401.15077), level by level; inner nodes are expanded.

    Args:
        paths: every node but the root as a sequence of child ranks, in any order, as lists or tuples. A rank may be
            there without the lower ones: ``[[0], [2]]`` are the most and the third most likely token.

    Raises:
        ValueError: there is no path, one is no sequence of ranks or there twice, or one lacks its parent.
    """

    depth: int = field(init=False)
    paths: tuple[Ranks, ...] = EAGLE1
    _levels: dict[torch.device, tuple[Tensor, list[_StaticLevel]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        paths = _checked(self.paths)
        object.__setattr__(self, "paths", paths)
        object.__setattr__(self, "depth", len(paths[-1]))

    @property
    def nodes_drafted(self) -> int:
        return len(self.paths)

    @property
    def slots(self) -> int:
        return len({path[:-1] for path in self.paths} - {()})

    @property
    def name(self) -> str:
        return f"static tree of {len(self.paths)} (depth {self.depth})"

    def describe(self) -> dict[str, Any]:
        return {"class": type(self).__name__, "depth": self.depth, "paths": [list(path) for path in self.paths]}

    def check(self, draft_vocab_size: int) -> None:
        for path in self.paths:
            if max(path) >= draft_vocab_size:
                raise ValueError(f"shape: path {list(path)} goes beyond the draft vocabulary of {draft_vocab_size}")

    def check_rule(self, rule: Rule) -> None:
        gap = next((path for path in self.paths if path[-1] and (*path[:-1], path[-1] - 1) not in self.paths), None)
        if rule.sampled and gap is not None:
            raise ValueError(
                f"shape: path {list(gap)} skips a sibling, which drawn drafts must not: add "
                f"{[*gap[:-1], gap[-1] - 1]}, or use the rule one_hot"
            )

    def prepare(self, device: torch.device) -> None:
        if device not in self._levels:
            with torch.inference_mode(False):  # it is kept, and not only for inference
                self._levels[device] = _levels(self.paths, device)

    def grow(
        self, root_B: Tensor, start: Frontier, expand: Expand, vocab: DraftVocab, children: ChildSampling
    ) -> DraftTree:
        parents_N, levels = self._levels[root_B.device]
        parents_BN = parents_N.expand(len(root_B), -1)
        tokens, frontier, q_BND = [root_B[:, None]], start, None
        for depth, level in enumerate(levels):
            best_BKR, q_BKD = children.find(frontier.logits_BKD, level.ranks, depth)
            if q_BKD is not None:
                q_BND = q_BKD.new_zeros(*parents_BN.shape, q_BKD.shape[-1]) if q_BND is None else q_BND
                q_BND[:, level.expanded_K] = q_BKD
            tokens.append(vocab.to_target(best_BKR[:, level.row_L, level.rank_L]))
            if len(level.inner_K):
                h_BKH = frontier.h_BKH[:, level.row_L[level.inner_K]]
                frontier = expand(tokens[-1][:, level.inner_K], h_BKH, level.seen_KQ, level.depth_Q)
        return DraftTree(torch.cat(tokens, 1), parents_BN, q_BND, None if q_BND is None else vocab.target_ids_D)


def _levels(paths: tuple[Ranks, ...], device: torch.device) -> tuple[Tensor, list[_StaticLevel]]:
    """What no round changes: the parents of all nodes, (N,), and the levels."""
    index = functools.partial(torch.tensor, dtype=torch.int64, device=device)
    number = {path: node for node, path in enumerate(((), *paths))}
    parents = {path[:-1] for path in paths}
    above: list[Ranks] = [()]
    drafted: list[Ranks] = []
    levels = []
    for depth in range(1, len(paths[-1]) + 1):
        nodes = [path for path in paths if len(path) == depth]
        inner = [path for path in nodes if path in parents]
        drafted += inner
        seen = [[path[: len(other)] == other for other in drafted] for path in inner]
        level = _StaticLevel(
            row_L=index([above.index(path[:-1]) for path in nodes]),
            rank_L=index([path[-1] for path in nodes]),
            ranks=1 + max(path[-1] for path in nodes),
            expanded_K=index([number[path] for path in above]),
            inner_K=index([nodes.index(path) for path in inner]),
            seen_KQ=torch.tensor(seen, dtype=torch.bool, device=device),
            depth_Q=index([len(path) - 1 for path in drafted]),
        )
        levels.append(level)
        above = inner
    return index([0, *(number[path[:-1]] for path in paths)]), levels


def _checked(paths: Any) -> tuple[Ranks, ...]:
    """As tuples, level by level; so parents come first, and trees of the same nodes are equal."""
    if not isinstance(paths, list | tuple) or not paths:
        raise ValueError(f"shape: a static tree is a list of paths, as [[0], [1], [0, 0]], not {paths!r}")
    known: set[Ranks] = set()
    for path in paths:
        if not isinstance(path, list | tuple) or not path or not all(type(rank) is int and rank >= 0 for rank in path):
            raise ValueError(f"shape: a path is a list of child ranks from 0 up, as [0, 1], not {path!r}")
        if tuple(path) in known:
            raise ValueError(f"shape: path {list(path)} is there twice: name every node once")
        known.add(tuple(path))
    for path in sorted(known):
        if path[:-1] and path[:-1] not in known:
            raise ValueError(f"shape: path {list(path)} lacks its parent: add {list(path[:-1])}")
    return tuple(sorted(known, key=lambda path: (len(path), path)))


def parse_shape(text: str) -> DraftShape:
    """A shape as on a command line: ``chain:depth=3``, ``tree:depth=6,top_k=10,nodes=59``,
    ``static:file=PATH``, or a name alone for its defaults.

    Raises:
        ValueError: an unknown shape or parameter, a value that is not a number, or a file that holds no tree.
    """
    kinds: dict[str, type[DraftShape]] = {"chain": Chain, "tree": DynamicTree}
    kind, colon, parameters = text.partition(":")
    if kind == "static":
        name, _, file = parameters.partition("=")
        if colon and (name.strip() != "file" or not file.strip()):
            raise ValueError(f"shape {text!r}: a static tree has one parameter, file=PATH")
        return read_static_tree(file.strip()) if colon else StaticTree()
    if kind not in kinds:
        known = ", ".join((*kinds, "static"))
        raise ValueError(f"shape {text!r}: expected one of {known}, with parameters as chain:depth=3")
    names = [one.name for one in fields(kinds[kind])]
    values: dict[str, int] = {}
    for item in parameters.split(",") if colon else []:
        name, _, value = (part.strip() for part in item.partition("="))
        if name not in names or name in values or not re.fullmatch(r"\d+", value, re.ASCII):
            all_of = ", ".join(f"{one}=NUMBER" for one in names)
            raise ValueError(f"shape {text!r}: {item!r} is not one of {all_of}, each at most once")
        values[name] = int(value)
    return kinds[kind](**values)


def read_static_tree(file: Path | str) -> StaticTree:
    """The static tree whose paths are a list in a YAML or JSON file.

    Raises:
        ValueError: the file is missing, unreadable or neither, or what it lists is no tree.
    """
    try:
        return StaticTree(yaml.safe_load(Path(file).read_text(encoding="utf-8")))  # JSON is a part of YAML
    except OSError as error:
        raise explain(error, file) from error
    except yaml.YAMLError as error:
        raise ValueError(f"{file}: not valid YAML or JSON: {' '.join(str(error).split())}") from error
    except ValueError as error:  # UnicodeDecodeError is one
        raise ValueError(f"{file}: {error}") from error
