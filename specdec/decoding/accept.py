"""Which drafts of a tree the target accepts, so that what comes out is the target's own.

A rule is lossless if the accepted tokens and the next one, continued by the target, have the distribution of the target
alone, exactly. All of it is shape-static, on any device, and no sequence sees another.

Legend: B sequences, N tree nodes with the root, P path nodes at most, L levels with the root's, V vocabulary, D draft
vocabulary.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from specdec.decoding.sampling import AcceptanceNoise, LogitsProcessor, draw, token_noise
from specdec.utils.numbers import Positive, Seed, check_numbers


class DraftTree(NamedTuple):
    """Tokens proposed after the last committed one of every sequence.

    Node 0, the root, is that committed token and its own parent. Parents stand before their children, siblings in the
    order they were drawn. Trees of a batch have the same number of nodes; a node that a tree does not use is its own
    parent too, and no rule takes it for a draft.
    """

    tokens_BN: Tensor  # int64 target ids
    parents_BN: Tensor  # int64
    # what a node's children were drawn from, zeros at leaves; None if not drawn
    q_BND: Tensor | None = None
    ids_D: Tensor | None = None  # int64, the target ids of the draft vocabulary, which q is over

    def resized(self, nodes: int) -> "DraftTree":
        """The first nodes alone, or with copies of the last behind them: a tree of this size, whatever it is worth."""
        last = self.tokens_BN.shape[1] - 1
        order_N = torch.arange(nodes, device=self.tokens_BN.device).clamp_max(last)
        q_BND = None if self.q_BND is None else self.q_BND[:, order_N]
        return DraftTree(self.tokens_BN[:, order_N], self.parents_BN[:, order_N], q_BND, self.ids_D)


def ancestors(parents_BN: Tensor) -> Tensor:
    """(B, N, N) bool: column j is an ancestor of row i, or i itself. By pointer jumping, in log2(N) rounds."""
    B, N = parents_BN.shape
    jump_BN = parents_BN
    seen_BNN = torch.eye(N, dtype=torch.bool, device=parents_BN.device).expand(B, N, N)
    for _ in range(max(1, N - 1).bit_length()):
        seen_BNN = seen_BNN | seen_BNN.gather(1, jump_BN[..., None].expand(B, N, N))
        jump_BN = jump_BN.gather(1, jump_BN)
    return seen_BNN


def nodes_in_order(path_BN: Tensor, length: int) -> Tensor:
    """The nodes of each path from the root on, (B, P) int64, P = ``length``; column j past a path's end is padding.

    Args:
        path_BN: bool, the nodes on the path.
    """
    B, N = path_BN.shape
    order_N = torch.arange(N, device=path_BN.device)
    order_P = torch.arange(length, device=path_BN.device)
    # how many of the path stand before each
    place_BN = (path_BN[:, None] & (order_N < order_N[:, None])).sum(-1)
    # nodes off the path go to a column past the end
    column_BN = torch.where(path_BN, place_BN, length)
    rest_W = torch.cat([order_P, order_P[:1]])
    rest_BW = rest_W.clamp_max(N - 1).repeat(B, 1)
    return rest_BW.scatter(1, column_BN, order_N.expand(B, N))[:, :length]


class Accepted(NamedTuple):
    """Which drafts are taken, and the target's own token after them."""

    path_BN: Tensor  # bool, the accepted nodes, the root among them
    next_B: Tensor  # int64


class Rule:
    """Base of the acceptance rules: frozen specs without state."""

    sampled: ClassVar[bool] = False
    """Whether drafts must be sampled: siblings drawn without replacement from ``DraftTree.q_BND``, which ``accept``
    reads. A shape of your own may drop trailing siblings only if it decides so before drawing them."""
    needs_chain: ClassVar[bool] = False
    """Whether a node may have one child only."""

    def accept(self, tree: DraftTree, p_BNV: Tensor, noise: AcceptanceNoise) -> Accepted:
        """Judge the drafts.

        Args:
            p_BNV: what a plain decode would draw the token after each node from, logits processed; float32 or wider.
        """
        raise TypeError(f"{type(self).__name__} must accept")


@dataclass(frozen=True)
class Greedy(Rule):
    """The longest path on which every draft is the target's most likely token (https://arxiv.org/abs/2401.15077).

    Lossless for greedy decoding, however the drafts came about. Of equally likely tokens the first counts, as in plain
    decoding; of equal siblings the one with the longer path behind it. Nothing is random, and it reads no noise.
    """

    def accept(self, tree: DraftTree, p_BNV: Tensor, noise: AcceptanceNoise) -> Accepted:
        ancestors_BNN = ancestors(tree.parents_BN)
        choice_BN = p_BNV.argmax(-1)
        # a node agrees if its token is the target's choice after its parent ...
        agrees_BN = tree.tokens_BN == choice_BN.gather(1, tree.parents_BN)
        agrees_BN[:, 0] = True
        # ... and is taken if all its ancestors agree too; the deepest such node ends the path
        taken_BN = (agrees_BN[:, None] | ~ancestors_BNN).all(-1)
        leaf_B1 = (taken_BN * ancestors_BNN.sum(-1)).argmax(-1, keepdim=True)
        leaf_B1N = leaf_B1[..., None].expand_as(ancestors_BNN[:, :1])
        path_BN = ancestors_BNN.gather(1, leaf_B1N)[:, 0]
        return Accepted(path_BN, choice_BN.gather(1, leaf_B1)[:, 0])


@dataclass(frozen=True)
class OneHot(Rule):
    """The target draws its own token at each node; where that token is a child, the walk continues from the child.

    Lossless for any children chosen independently of this noise, drawn at random or not: the draws are a plain
    decode's, and the drafts only decide how many of them fit into one pass. With the noise of a plain decode, the
    tokens themselves are a plain decode's. It suits children that are a function of the past, such as a greedy chain or
    EAGLE-2's tree; if children are drawn from q, :class:`WithoutReplacement` accepts more of them.

    In distribution it is the rule for drafters without probabilities of vLLM, and of EAGLE for trees: try children in
    turn, accept c with probability p(c), else strike c from p and renormalize. That accepts the k-th child, and at last
    draws an x that is no child, with the same probability p(c_k), p(x) as one draw from p: the renormalizations cancel.

    It reads ``exponential_BLV`` alone; L must be at least the number of levels of the deepest tree.
    """

    def accept(self, tree: DraftTree, p_BNV: Tensor, noise: AcceptanceNoise) -> Accepted:
        tokens_BN = tree.tokens_BN
        parents_BN = tree.parents_BN
        B, N = tokens_BN.shape
        node_N = torch.arange(N, device=tokens_BN.device)
        # more than one node only if siblings are equal: one context
        reached_BN = (node_N == 0).expand(B, N)
        walking_B = torch.ones(B, dtype=torch.bool, device=tokens_BN.device)
        next_B = tokens_BN[:, 0]
        for level in range(noise.exponential_BLV.shape[1]):
            # the target draws the token after the nodes reached ...
            first_B = reached_BN.to(torch.uint8).argmax(-1)
            drawn_B = draw(at(p_BNV, first_B), noise.exponential_BLV[:, level])
            next_B = torch.where(walking_B, drawn_B, next_B)
            # ... and the walk goes on to the child that holds it; without one that token is the next, and it ends
            is_child_BN = reached_BN.gather(1, parents_BN) & (node_N != parents_BN)
            child_BN = is_child_BN & (tokens_BN == next_B[:, None])
            walking_B = walking_B & child_BN.any(-1)
            reached_BN = torch.where(walking_B[:, None], child_BN, reached_BN)
        return Accepted(at(ancestors(parents_BN), reached_BN.to(torch.uint8).argmax(-1)), next_B)


@dataclass(frozen=True)
class WithoutReplacement(Rule):
    """Rejection sampling for drafts drawn at random: one try for each child, in the order drawn, no two alike.

    At a node let r be the target's distribution p and q the drafter's. A child x is accepted with probability
    min(1, r(x)/q(x)); if it is not, r becomes the residual (r - q)+, q loses x, and both are renormalized. With no
    child left, the next token is drawn from r. With one child per node this is speculative sampling of a chain
    (https://arxiv.org/abs/2211.17192, https://arxiv.org/abs/2302.01318), vLLM's rule for probabilistic drafts; for
    trees it is recursive rejection (https://arxiv.org/abs/2402.14160, https://arxiv.org/abs/2402.12374).

    q must be what children were really drawn from, the drafter's own temperature included, whatever it is: only the
    target's distribution decides what comes out. Both are renormalized here, so sums off one by rounding do no harm. A
    child that q gives nothing (a filler after q's support is used up) was not drawn and is passed over. If the
    residual is zero everywhere, which only rounding can cause, r is kept.
    """

    sampled: ClassVar[bool] = True

    def accept(self, tree: DraftTree, p_BNV: Tensor, noise: AcceptanceNoise) -> Accepted:
        tokens_BN = tree.tokens_BN
        parents_BN = tree.parents_BN
        # the node that each walk stands at, the last one accepted
        node_B = torch.zeros_like(tokens_BN[:, 0])
        r_BV, q_BV = self._start(tree, p_BNV, 0)
        path = [torch.ones_like(node_B, dtype=torch.bool)]
        # parents come first, so one pass meets the whole walk in order
        for node in range(1, tokens_BN.shape[1]):
            x_B1 = tokens_BN[:, node, None]
            r_x_B = r_BV.gather(1, x_B1)[:, 0]
            q_x_B = q_BV.gather(1, x_B1)[:, 0]
            tried_B = (parents_BN[:, node] == node_B) & (q_x_B > 0)
            taken_B = tried_B & self.takes(noise.uniform_BN[:, node], r_x_B, q_x_B)
            refused_B1 = (tried_B & ~taken_B)[:, None]
            # accepted: start afresh at the child; refused: go on with what is left; not a child of here: no change
            p_BV, child_q_BV = self._start(tree, p_BNV, node)
            residual_BV = torch.where(refused_B1, self.residual(r_BV, q_BV), r_BV)
            left_BV = torch.where(refused_B1, self.left(q_BV, x_B1), q_BV)
            r_BV = torch.where(taken_B[:, None], p_BV, residual_BV)
            q_BV = torch.where(taken_B[:, None], child_q_BV, left_BV)
            node_B = torch.where(taken_B, node, node_B)
            path.append(taken_B)
        path_BN = torch.stack(path, 1)
        return Accepted(path_BN, draw(r_BV, at(noise.exponential_BLV, path_BN.sum(-1) - 1)))

    def takes(self, uniform_B: Tensor, r_x_B: Tensor, q_x_B: Tensor) -> Tensor:
        """Whether the child is accepted: with probability min(1, r/q)."""
        return uniform_B * q_x_B < r_x_B

    def residual(self, r_BV: Tensor, q_BV: Tensor) -> Tensor:
        """Return the rest of the target's distribution once a child drawn from q was refused: (r - q)+."""
        excess_BV = (r_BV - q_BV).clamp_min(0)
        return torch.where((excess_BV > 0).any(-1, keepdim=True), normalized(excess_BV), r_BV)

    def left(self, q_BV: Tensor, x_B1: Tensor) -> Tensor:
        """Return what the next child was drawn from, given that those before it were refused, x the last of them."""
        return normalized(q_BV.scatter(1, x_B1, 0.0))

    def _start(self, tree: DraftTree, p_BNV: Tensor, node: int) -> tuple[Tensor, Tensor]:
        """p and q at a node, over the target's vocabulary."""
        assert tree.q_BND is not None and tree.ids_D is not None, (
            "sampled drafts come with what they were drawn from"
        )
        p_BV = p_BNV[:, node]
        q_BD = tree.q_BND[:, node].to(p_BNV.dtype)
        return normalized(p_BV), normalized(torch.zeros_like(p_BV).index_copy(1, tree.ids_D, q_BD))


@dataclass(frozen=True)
class Block(WithoutReplacement):
    """Block verification (https://arxiv.org/abs/2403.10444): drawn drafts of a chain, judged together.

    Lossless, and of all such rules it accepts most on average: a draft that the target likes less than the drafter does
    is made good by one that it likes more. Let k_i = min(1, k_{i-1} p(x_i) / q(x_i)), from k_0 = 1 on. The first i
    drafts are accepted for the largest i whose own coin says so, with probability s / (s + 1 - k_i), where s is the sum
    of (k_i p - q)+ over the vocabulary, and k_i after the last draft; then the next token is drawn from (k_i p - q)+,
    renormalized, and after the last draft from p. Every coin is tossed, since a refused draft may stand before an
    accepted one.
    """

    needs_chain: ClassVar[bool] = True

    def accept(self, tree: DraftTree, p_BNV: Tensor, noise: AcceptanceNoise) -> Accepted:
        tokens_BN = tree.tokens_BN
        last = tree.tokens_BN.shape[1] - 1
        keep_B1 = torch.ones_like(p_BNV[:, 0, :1])
        p_BV, q_BV = self._start(tree, p_BNV, 0)
        next_BV = self.residual(p_BV, q_BV) if last else p_BV
        node_B = torch.zeros_like(tokens_BN[:, 0])
        for node in range(1, last + 1):
            x_B1 = tokens_BN[:, node, None]
            tiny = torch.finfo(p_BV.dtype).tiny
            q_x_B1 = q_BV.gather(1, x_B1).clamp_min(tiny)
            keep_B1 = (keep_B1 * p_BV.gather(1, x_B1) / q_x_B1).clamp_max(1)
            # nothing from an unused node on is kept; a shorter chain's last draft has q = 0 behind it, for which what
            # follows gives what the last node gets: all of p
            keep_B1 = keep_B1 * (tree.parents_BN[:, node, None] < node)
            p_BV, q_BV = self._start(tree, p_BNV, node)
            residual_BV = p_BV
            chance_B1 = keep_B1
            if node < last:
                residual_BV = self.residual(keep_B1 * p_BV, q_BV)
                excess_B1 = (keep_B1 * p_BV - q_BV).clamp_min(0).sum(-1, keepdim=True)
                chance_B1 = excess_B1 / (excess_B1 + 1 - keep_B1).clamp_min(tiny)
            taken_B = noise.uniform_BN[:, node] < chance_B1[:, 0]
            next_BV = torch.where(taken_B[:, None], residual_BV, next_BV)
            node_B = torch.where(taken_B, node, node_B)
        path_BN = torch.arange(last + 1, device=node_B.device) <= node_B[:, None]
        return Accepted(path_BN, draw(next_BV, at(noise.exponential_BLV, node_B)))


RULES: dict[str, Rule] = {
    "greedy": Greedy(), "auto": OneHot(), "one_hot": OneHot(), "without_replacement": WithoutReplacement(),
    "block": Block(),
}  # fmt: skip


def normalized(probs_BV: Tensor) -> Tensor:
    """Scaled to sum to one; rows of zeros stay zero."""
    return probs_BV / probs_BV.sum(-1, keepdim=True).clamp_min(torch.finfo(probs_BV.dtype).tiny)


def at(x_BNV: Tensor, index_B: Tensor) -> Tensor:
    """``x_BNV[b, index_B[b]]`` of every sequence b, (B, V)."""
    return x_BNV[torch.arange(len(index_B), device=index_B.device), index_B]


@dataclass(frozen=True)
class Sampling(LogitsProcessor):
    """How tokens are drawn and drafts are judged; greedy unless a temperature is given.

    Args:
        rule: ``auto`` is greedy at temperature 0 and else ``one_hot``, which takes the drafter's most likely tokens;
            ``without_replacement`` and ``block`` draw the drafts.
        draft_temperature: of the drafter where drafts are drawn; None for the target's, and 1 with a greedy target.
        seed: of all the noise. With ``one_hot`` the tokens are those that plain decoding draws from the same seed.

    Raises:
        ValueError: a value is out of its range.
    """

    rule: Literal["auto", "one_hot", "without_replacement", "block"] = "auto"
    draft_temperature: Positive | None = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(Sampling, vars(self), "sampling: ")

    @property
    def acceptance(self) -> Rule:
        """The rule that judges drafts."""
        return RULES["greedy" if self.temperature == 0 and self.rule == "auto" else self.rule]

    @property
    def without_drafts(self) -> Rule:
        """The rule that gives the target's own token where nothing is drafted."""
        return Greedy() if self.temperature == 0 else OneHot()

    def draw(self, logits_BV: Tensor, seed_B: Tensor, place_B: Tensor) -> Tensor:
        """The tokens at ``place_B`` of texts with these seeds, (B,) int64, as plain decoding draws them."""
        probs_BV = self.probs(logits_BV)
        if self.temperature == 0:
            return probs_BV.argmax(-1)
        return draw(probs_BV, token_noise(seed_B, place_B[:, None], logits_BV.shape[-1])[:, 0])
