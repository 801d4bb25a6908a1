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
from specdec.drafting.branches import Chains
from specdec.drafting.mode import AnchorDrafting
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
    to_end: bool = True, advance: Callable[[int], object] = lambda done: None,
) -> list[AnsweredText]:  # fmt: skip
    """The target's greedy answers to prompts (ids and tokens), decoded without any drafter.

    Unless ``to_end`` is False they stop at end tokens, which are kept. ValueError if a prompt cannot be decoded.
    """
    batch = max(1, min(ANSWERS_SIDE_BY_SIDE, target.most_texts, len(prompts)))
    end = target.eos_token_ids if to_end else ()
    requests = [Request(ids, max_new_tokens) for _, ids in prompts]
    answers: dict[int, list[int]] = {}
    for number, answer in PlainDecoder(target, batch=batch).generate_all(requests, end):
        answers[number] = answer.ids
        advance(1)
    return [
        AnsweredText(name, [*ids, *answers[n]], len(ids)) for n, (name, ids) in enumerate(prompts)
    ]


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
        nodes = 1 + max(depth, drafter.config.drafting.fixed_drafts)  # of a chain, with its root
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
        on_step: Callable[[int], object] = lambda step: None,
    ) -> Chains:  # fmt: skip
        """Draft K tokens from every anchor (of one of :meth:`groups`), greedily.

        Args:
            given_AK: int64, K - 1 tokens or more of each chain: step k + 1 reads token k of these instead of its draft
                (teacher forcing).
            on_step: called after each of the K steps, counted from 0.
        """
        anchor_A = torch.tensor(anchors, device=self.ids_1T.device)
        feature_1AH = self.drafter.fuse(self.out.aux_BTNH[:, anchor_A - 1])
        root_1A = self.ids_1T[:, anchor_A]
        task = AnchorDrafting(anchor_A, self.rows, root_1A, feature_1AH, given_AK, on_step)
        return self.drafter.config.drafting.draft_at_anchors(self._proposer.memory, task)
