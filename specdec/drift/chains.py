"""Drafting from several places of a text at once, step by step, as decoding does it.

Legend: A chains, N aux layers, H hidden, T tokens of the text, D draft vocabulary, F quantities of attention, h heads,
S key slots.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.decoding import Chain, Proposer
from specdec.decoding.children import LIKELIEST
from specdec.drafter import Drafter
from specdec.drift.branches import Branches
from specdec.drift.observing import observing
from specdec.drift.texts import OwnText
from specdec.nn.view import View
from specdec.target import Target, TargetOutput


class DraftStep(NamedTuple):
    """What one step of A chains yields, and what it does inside."""

    tokens_A: Tensor
    """int64, the drafted tokens, as ids of the target."""
    log_probs_AD: Tensor
    """The drafter's law that they are taken from."""
    state_AH: Tensor
    """The recurrent state, which the next step reads."""
    out_AH: Tensor
    """The same before the output norm; equal to it where the recurrence feeds that back."""


class Roots(NamedTuple):
    """What the chains begin with."""

    aux_ANH: Tensor
    """The target's states before each anchor."""
    normed_aux_ANH: Tensor
    feature_AH: Tensor
    """The drafter's feature of them: the state that step 1 reads."""


class Trunk:
    """A text in the target's cache and in the drafter's, with room for chains that branch off it.

    The drafter runs through its :class:`Proposer` alone: the text's rows are its prefill, and a step of all chains is a
    level of a draft tree. A chain sees the rows that it would see if the text had been decoded up to its anchor.

    Args:
        chains: A, at most; of ``depths`` tokens.

    Raises:
        ValueError: the text with its chains is too long for the target.
    """

    def __init__(self, target: Target, drafter: Drafter, text: OwnText, chains: int, depths: int) -> None:
        self.target, self.drafter, self.text = target, drafter, text
        self.length, self.prompt = len(text.ids), text.prompt
        config, device = drafter.config, target.device
        self.layers, self.final_norm = config.aux_layers, config.aux_final_norm
        self.ids_1T = torch.tensor([text.ids], device=device)
        self.capacity = self.length + chains * depths
        self.cache = target.new_cache(self.capacity)
        zero_1 = torch.zeros_like(self.ids_1T[0, :1])
        self.out = self._forward(self.ids_1T, View.chain(zero_1, self.length, self.capacity, self.cache))
        self.proposer = Proposer(drafter, Chain(depths), self.capacity)
        self.proposer.prefill(0, self.ids_1T[:, 1:], self.out.aux_BTNH[:, :-1])

    def _forward(self, ids_1T: Tensor, view: View) -> TargetOutput:
        return self.target.forward(ids_1T, view, self.layers, self.final_norm)

    @property
    def rows(self) -> int:
        """The drafter's rows of the text: every token but the first has a feature before it."""
        return self.length - 1

    def draft(
        self, anchors: Sequence[int], depths: int, look: Callable[[int, list[Tensor]], object]
    ) -> tuple[Roots, list[DraftStep]]:
        """What the chains begin with, and every step of theirs.

        Args:
            anchors: positions of the last committed tokens, each behind the prompt.
            look: called at every step, counted from 0, with the attention weights of every layer, (A, h, S).
        """
        anchor_A = torch.tensor(anchors, device=self.ids_1T.device)
        before = self.prompt - 1  # rows that every chain sees, since anchors lie behind the prompt
        branches = Branches(self.rows - before, anchor_A - 1 - before)
        prefix_1 = torch.full_like(self.ids_1T[0, :1], before)
        with observing(self.drafter) as seen:
            h_1AH = self.drafter.fuse(self.out.aux_BTNH[:, anchor_A - 1])
            assert seen.aux_BTNH is not None and seen.normed_aux_BTNH is not None
            roots = Roots(seen.aux_BTNH[0], seen.normed_aux_BTNH[0], h_1AH[0])
            ids_1A, steps = self.ids_1T[:, anchor_A], list[DraftStep]()
            for level in range(depths):
                sees, depth_Q = branches.seen(level, level + 1), branches.depth(level + 1)
                frontier = self.proposer.expand(prefix_1, ids_1A, h_1AH, sees, depth_Q[None])
                law_1AD = LIKELIEST.law(frontier.logits_BKD)
                ids_1A = self.drafter.vocab.to_target(LIKELIEST.find(law_1AD, 1, level)[..., 0])
                h_1AH = frontier.h_BKH
                assert seen.out_BTH is not None
                steps.append(DraftStep(ids_1A[0], frontier.log_probs_BKD[0], h_1AH[0], seen.out_BTH[0]))
                look(level, [seen.weights_BhTS[layer][0].transpose(0, 1) for layer in sorted(seen.weights_BhTS)])
        return roots, steps

    def verify(self, anchors: Sequence[int], drafted: Sequence[Tensor]) -> list[TargetOutput]:
        """The target's states of the chains' tokens: at the anchors, at the first drafts, and so on; (1, A, ...) each.

        Args:
            drafted: tokens (A,) of each step.
        """
        anchor_A = torch.tensor(anchors, device=self.ids_1T.device)
        found = [TargetOutput(self.out.aux_BTNH[:, anchor_A], self.out.final_BTH[:, anchor_A])]
        if not drafted:
            return found
        branches = Branches(self.length - self.prompt, anchor_A + 1 - self.prompt)
        prefix_1, levels = torch.full_like(self.ids_1T[0, :1], self.prompt), len(drafted)
        sees, depth_Q = branches.seen(0, levels), branches.depth(levels)
        view = View.append(prefix_1, sees, depth_Q[None], self.capacity, self.cache)
        out = self._forward(torch.cat(list(drafted))[None], view)
        pairs = zip(out.aux_BTNH.chunk(levels, 1), out.final_BTH.chunk(levels, 1), strict=True)
        return found + [TargetOutput(*pair) for pair in pairs]
