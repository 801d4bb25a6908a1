"""EAGLE-1's static tree: a fixed set of nodes, whatever the drafter is sure of.

Legend: B sequences, L nodes of a level, K those of them that are expanded, Q nodes expanded so far, R child ranks, N
tree nodes with the root, D draft vocabulary, H width.
"""

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor

from specdec.decoding.children import Children
from specdec.decoding.growth import Expand, Frontier, Growth
from specdec.decoding.rules import Rule
from specdec.decoding.tree import DraftTree
from specdec.drafter import DraftVocab
from specdec.files import explain

Ranks = tuple[int, ...]
"""A node, by the rank of every child on the way from the root: 0 is its parent's most likely."""

# https://arxiv.org/abs/2401.15077, as its authors' code has it under the name mc_sim_7b_63
_EAGLE1 = "0 1 2 3  00 01 02 10 11 20 21 30  000 001 002 010 011 020 021 100  0000 0001 0002  00000 00001"
EAGLE1: tuple[Ranks, ...] = tuple(tuple(map(int, path)) for path in _EAGLE1.split())
"""EAGLE-1's own tree: 25 nodes, with the root 26 tokens to verify."""


@dataclass(frozen=True)
class StaticTree(Growth):
    """The same nodes in every round, level by level; only nodes that have children are expanded.

    Args:
        paths: every node but the root as a sequence of child ranks, in any order, as lists or tuples. A rank may be
            there without the lower ones: ``[[0], [2]]`` are the most and the third most likely token.

    Raises:
        ValueError: there is no path, one is no sequence of ranks or there twice, or one lacks its parent.
    """

    depth: int = field(init=False)
    paths: tuple[Ranks, ...] = EAGLE1
    _plans: dict[torch.device, "_Plan"] = field(default_factory=dict, init=False, repr=False, compare=False)

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
                raise ValueError(f"growth: path {list(path)} goes beyond the draft vocabulary of {draft_vocab_size}")

    def check_rule(self, rule: Rule) -> None:
        gap = next((path for path in self.paths if path[-1] and (*path[:-1], path[-1] - 1) not in self.paths), None)
        if rule.sampled and gap is not None:
            raise ValueError(
                f"growth: path {list(gap)} skips a sibling, which drawn drafts must not: add "
                f"{[*gap[:-1], gap[-1] - 1]}, or use the rule one_hot"
            )

    def prepare(self, device: torch.device) -> None:
        if device not in self._plans:
            with torch.inference_mode(False):  # it is kept, and not only for inference
                self._plans[device] = _plan(self.paths, device)

    def grow(self, root_B: Tensor, start: Frontier, expand: Expand, vocab: DraftVocab, children: Children) -> DraftTree:
        parents_N, levels = self._plans[root_B.device]
        tokens, frontier, q_BND = [root_B[:, None]], start, None
        if children.rule.sampled:
            D = start.logits_BKD.shape[-1]
            q_BND = start.logits_BKD.new_zeros(len(root_B), len(parents_N), D)
        for depth, level in enumerate(levels):
            law_BKD = children.law(frontier.logits_BKD)
            if q_BND is not None:
                q_BND[:, level.expanded_K] = law_BKD
            best_BKR = children.find(law_BKD, level.ranks, depth)
            tokens.append(vocab.to_target(best_BKR[:, level.row_L, level.rank_L]))
            if len(level.inner_K):
                h_BKH = frontier.h_BKH[:, level.row_L[level.inner_K]]
                frontier = expand(tokens[-1][:, level.inner_K], h_BKH, level.seen_KQ, level.depth_Q)
        return DraftTree(torch.cat(tokens, 1), parents_N.expand(len(root_B), -1), q_BND)


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
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _checked(paths: Any) -> tuple[Ranks, ...]:
    """As tuples, level by level; so parents come first, and trees of the same nodes are equal."""
    if not isinstance(paths, list | tuple) or not paths:
        raise ValueError(f"growth: a static tree is a list of paths, as [[0], [1], [0, 0]], not {paths!r}")
    known: set[Ranks] = set()
    for path in paths:
        if not isinstance(path, list | tuple) or not path:
            raise ValueError(f"growth: a path is a list of child ranks, as [0, 1], not {path!r}; the root has none")
        if not all(type(rank) is int and rank >= 0 for rank in path):
            raise ValueError(f"growth: path {list(path)!r} has a rank that is not a whole number from 0 up")
        if tuple(path) in known:
            raise ValueError(f"growth: path {list(path)} is there twice: name every node once")
        known.add(tuple(path))
    for path in sorted(known):
        if path[:-1] and path[:-1] not in known:
            raise ValueError(f"growth: path {list(path)} lacks its parent: add {list(path[:-1])}")
    return tuple(sorted(known, key=lambda path: (len(path), path)))


class _Level(NamedTuple):
    """The nodes of one depth, in the order of the tree."""

    row_L: Tensor  # int64, which of the nodes expanded just before is the parent
    rank_L: Tensor  # int64
    ranks: int  # one more than the highest
    expanded_K: Tensor  # int64, the tree's nodes whose children these are
    inner_K: Tensor  # int64, which of the L are expanded; none of the last level
    seen_KQ: Tensor  # for View.append, as is the next
    depth_Q: Tensor


class _Plan(NamedTuple):
    """What no round changes."""

    parents_N: Tensor  # int64
    levels: list[_Level]


def _plan(paths: tuple[Ranks, ...], device: torch.device) -> _Plan:
    number = {path: node for node, path in enumerate(((), *paths))}
    parents = {path[:-1] for path in paths}
    above: list[Ranks] = [()]
    drafted: list[Ranks] = []
    levels = []
    index = functools.partial(torch.tensor, dtype=torch.int64, device=device)
    for depth in range(1, len(paths[-1]) + 1):
        nodes = [path for path in paths if len(path) == depth]
        inner = [path for path in nodes if path in parents]
        drafted += inner
        seen = [[path[: len(other)] == other for other in drafted] for path in inner]
        level = _Level(
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
    return _Plan(index([0, *(number[path[:-1]] for path in paths)]), levels)
