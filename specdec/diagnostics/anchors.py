"""Draft at given places of the target's own answers, and see what the target says there.

An *anchor* is the position of a text's last committed token. A chain of drafts begun there reads the target's true
state before the anchor together with the anchor's token, as decoding does after a target pass; from then on it reads
its own states. All chains of one text run side by side: they are branches of one draft tree whose trunk is the text.

Legend: T tokens of the text, A chains, K drafts of a chain, J = K + 1, N aux layers, H hidden, D draft vocabulary,
Q nodes of trunk and chains.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.decoding import Chain, PlainDecoder, Proposer, Request
from specdec.drafter import Drafter
from specdec.nn.backend import wide
from specdec.nn.view import View
from specdec.target import Target

ANSWERS_SIDE_BY_SIDE = 16
CHAINS_SIDE_BY_SIDE = 64
LOG_PROBS_AT_ONCE = 2**24  # numbers of Chains.log_probs_AKD


class AnsweredText(NamedTuple):
    """A prompt and what the target itself says after it."""

    prompt_id: str
    ids: list[int]  # the prompt's tokens and the answer's
    prompt: int  # how many are the prompt's; at least one


def answered_texts(
    target: Target, prompts: Sequence[tuple[str, list[int]]], max_new_tokens: int, *,
    to_end: bool = True, on_answer: Callable[[], None] = lambda: None,
) -> list[AnsweredText]:  # fmt: skip
    """The target's greedy answers to prompts (ids and tokens), decoded without any drafter.

    Unless ``to_end`` is False they stop at end tokens, which are kept. ValueError if a prompt cannot be decoded.
    """
    batch = max(1, min(ANSWERS_SIDE_BY_SIDE, target.most_texts, len(prompts)))
    end = target.eos_token_ids if to_end else ()
    requests = [Request(ids, max_new_tokens) for _, ids in prompts]
    answers: dict[int, list[int]] = {}
    for number, made in PlainDecoder(target, batch=batch).generate_all(requests, end):
        answers[number] = made.ids
        on_answer()
    return [
        AnsweredText(name, [*ids, *answers[n]], len(ids)) for n, (name, ids) in enumerate(prompts)
    ]


class Chains(NamedTuple):
    """What A chains of K greedy drafts did."""

    tokens_AK: Tensor  # int64, the drafted tokens, as ids of the target
    log_probs_AKD: (
        Tensor  # float32 at least: the distribution that each draft is the likeliest token of
    )
    features_AJH: (
        Tensor  # what each step read, the fused true states first; and what the last step handed on
    )


class AnchoredText:
    """A text that the target read, and in the drafter's cache with room for chains of ``depth`` drafts that leave it.

    The drafter runs through decoding's own :class:`Proposer`: the text's rows are its prefill, and a step of all chains
    is one level of a draft tree. A chain sees the rows that it would see if the text had been decoded up to its anchor.
    No room is made for more than ``chains``. ValueError if the text is too long for the target.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        ids: Sequence[int],
        depth: int,
        chains: int = CHAINS_SIDE_BY_SIDE,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.depth = depth
        nodes = 1 + max(depth, drafter.config.recurrence.masks)  # of a chain, its root with them
        # the drafter's, of the text: every token but the first has a feature before it
        self.rows = len(ids) - 1
        most = min(
            chains,
            CHAINS_SIDE_BY_SIDE,
            LOG_PROBS_AT_ONCE // (depth * drafter.config.draft_vocab_size),
        )
        self.side_by_side = max(1, most)  # A
        self.ids_1T = torch.tensor([list(ids)], device=target.device)
        config = drafter.config
        with torch.no_grad():
            view = View.chain(
                torch.zeros_like(self.ids_1T[0, :1]), len(ids), len(ids), target.new_cache(len(ids))
            )
            self.out = target.forward(
                self.ids_1T, view, config.aux_layers, config.fusion.final_norm
            )
            self._proposer = Proposer(drafter, Chain(depth), len(ids) + self.side_by_side * nodes)
            self._proposer.prefill(0, self.ids_1T[:, 1:], self.out.aux_BTNH[:, :-1])

    def groups(self, anchors: Sequence[int]) -> Iterator[list[int]]:
        """The anchors, as many at a time as :meth:`draft` takes."""
        for at in range(0, len(anchors), self.side_by_side):
            yield list(anchors[at : at + self.side_by_side])

    def behind(self, anchors: Sequence[int]) -> Tensor:
        """The text's own tokens that a chain of K steps reads behind its anchor, (A, K - 1) int64."""
        anchor_A1 = torch.tensor(anchors, device=self.ids_1T.device)[:, None]
        return self.ids_1T[0, anchor_A1 + torch.arange(1, self.depth, device=anchor_A1.device)]

    @torch.no_grad()
    def draft(
        self, anchors: Sequence[int], given_AK: Tensor | None = None,
        on_step: Callable[[int], object] = lambda level: None,
    ) -> Chains:  # fmt: skip
        """Draft K tokens from every anchor (of one of :meth:`groups`), greedily.

        Args:
            given_AK: int64, K - 1 tokens or more of each chain: step k + 1 reads token k of these instead of its draft
                (teacher forcing).
            on_step: called after each of the K steps, counted from 0.
        """
        anchor_A = torch.tensor(anchors, device=self.ids_1T.device)
        if self.drafter.config.recurrence.masks:
            return self._draft_blocks(anchor_A, on_step)
        before = min(anchors) - 1  # rows that every chain sees
        branches = _Branches(self.rows - before, anchor_A - 1 - before)
        prefix_1 = torch.full_like(self.ids_1T[0, :1], before)
        feature_1AH = self.drafter.fuse(self.out.aux_BTNH[:, anchor_A - 1])
        ids_1A = self.ids_1T[:, anchor_A]
        tokens = []
        log_probs = []
        features = [feature_1AH[0]]
        for level in range(self.depth):
            seen = branches.seen(level, level + 1)
            depth_Q = branches.depth(level + 1)
            frontier = self._proposer.expand(prefix_1, ids_1A, feature_1AH, seen, depth_Q[None])
            feature_1AH = frontier.h_BKH
            features.append(feature_1AH[0])
            log_probs.append(frontier.logits_BKD[0].log_softmax(-1))
            tokens.append(self.drafter.vocab.to_target(frontier.logits_BKD[0].argmax(-1)))
            if level + 1 < self.depth:
                ids_1A = tokens[-1][None] if given_AK is None else given_AK[None, :, level]
                ids_1A = self.drafter.following(ids_1A)
            on_step(level)
        return Chains(torch.stack(tokens, 1), torch.stack(log_probs, 1), torch.stack(features, 1))

    def _draft_blocks(self, anchor_A: Tensor, on_step: Callable[[int], object]) -> Chains:
        """The same of a block drafter: a block behind each anchor, which sees the features before it and all of itself.

        All steps come of one call: those of step k are its nodes from ``(k + 1) A`` on.
        """
        before = int(anchor_A.min())
        masks = self.drafter.config.recurrence.masks
        chains = len(anchor_A)
        levels = masks + 1
        drafts = slice(chains, (self.depth + 1) * chains)
        branches = _Branches(self.rows - before, anchor_A - before)
        prefix_1 = torch.full_like(self.ids_1T[0, :1], before)
        seen = branches.seen(0, levels, whole=True)
        view = View.append(
            prefix_1,
            seen,
            branches.depth(levels)[None],
            self._proposer.capacity,
            self._proposer.cache,
        )
        root_1A = self.ids_1T[:, anchor_A]
        ids_1Q = torch.cat([root_1A, self.drafter.following(root_1A).repeat(1, masks)], 1)
        feature_AH = self.drafter.fuse(self.out.aux_BTNH[:, anchor_A - 1])[0]
        step = self.drafter.step(ids_1Q, feature_AH[None, :0], view)
        for level in range(self.depth):
            on_step(level)
        logits_KAD = self.drafter.logits(step.normed_BTH[0, drafts]).unflatten(
            0, (self.depth, chains)
        )
        tokens_AK = self.drafter.vocab.to_target(logits_KAD.argmax(-1)).T
        handed_KAH = step.h_BTH[0, drafts].unflatten(0, (self.depth, chains))
        features_AJH = torch.cat([feature_AH[None], handed_KAH]).transpose(0, 1)
        return Chains(
            tokens_AK,
            logits_KAD.to(wide(logits_KAD.dtype)).log_softmax(-1).transpose(0, 1),
            features_AJH,
        )


class _Branches(NamedTuple):
    """Who sees whom among chains that leave one trunk, as :meth:`View.append` wants to be told.

    The first columns are the trunk, a chain itself. Then follow the chains' nodes, level by level, A to a level: the
    node of level 0 of chain a stands where trunk node ``at_A[a]`` does and sees the trunk nodes before that.
    """

    trunk: int
    at_A: Tensor  # int64, from 0 to trunk

    def seen(self, first: int, last: int, whole: bool = False) -> Tensor:
        """What the nodes of the levels from ``first`` up to before ``last`` see, (1, nodes, Q) bool; ``whole``: the
        later ones of their chain too."""
        device = self.at_A.device
        chains = len(self.at_A)
        column_Q = torch.arange(self.trunk + last * chains, device=device)
        on_trunk_Q = column_Q < self.trunk
        level_Q = (column_Q - self.trunk) // chains
        chain_Q = (column_Q - self.trunk) % chains
        node = torch.arange(first * chains, last * chains, device=device)[:, None]
        level = node // chains
        chain = node % chains
        before = on_trunk_Q & (column_Q < self.at_A[chain])
        own = ~on_trunk_Q & (chain_Q == chain) & ((level_Q <= level) | whole)
        return (before | own)[None]

    def depth(self, levels: int) -> Tensor:
        """How far behind the trunk's first node each of the Q nodes stands, int64."""
        device = self.at_A.device
        of_chains = self.at_A + torch.arange(levels, device=device)[:, None]
        return torch.cat([torch.arange(self.trunk, device=device), of_chains.flatten()])
