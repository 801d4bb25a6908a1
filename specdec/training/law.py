"""What the target says at some positions, without ever holding its logits for all of them.

Legend: C positions, H hidden, D draft vocabulary, V vocabulary.
"""

from collections.abc import Collection
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.drafter import DraftVocab
from specdec.nn.pointwise import pointwise
from specdec.nn.unroll import wide
from specdec.target import Target

BLOCK = 8192  # columns of the vocabulary that stand in memory at once


class Law(NamedTuple):
    """The target's next-token law at C positions, on the draft vocabulary; see ``losses.Rows`` for the first four."""

    p_CD: Tensor  # float32 or wider
    log_p_CD: Tensor
    log_mass_C: Tensor
    token_C: Tensor
    known_C: Tensor  # bool, whether the most likely token of all is in the draft vocabulary; a tie counts

    def at(self, index: Tensor | slice) -> "Law":
        """Some of the positions; what is not known of any costs nothing."""
        rows = index if isinstance(index, slice) else slice(len(index))
        return Law(*(x[index if x.stride(0) else rows] for x in self))


@pointwise
def _softmax_(logits_CD: Tensor) -> tuple[Tensor, Tensor]:
    """Make logits their probabilities, in place; the greatest logit and the log-sum-exp."""
    top_C = logits_CD.amax(-1)
    e_CD = torch.exp(logits_CD - top_C[:, None])
    total_C = e_CD.sum(-1)
    logits_CD.copy_(e_CD / total_C[:, None])
    return top_C, top_C + total_C.log()


@pointwise
def _take(logits_CB: Tensor, at_D: Tensor, into_CD: Tensor) -> Tensor:
    """Copy some columns; the greatest logit of all."""
    into_CD.copy_(logits_CB.index_select(1, at_D))
    return logits_CB.amax(-1).to(into_CD.dtype)


class TargetLaw:
    """Streams the target's head over blocks of its vocabulary.

    Args:
        reads: what losses read of it beside p; see ``losses.LawLoss.reads``.
        known: whether ``known_C`` is wanted. If neither that nor the mass is, only the draft vocabulary's rows are
            multiplied, and all tokens count as known.
    """

    def __init__(self, target: Target, vocab: DraftVocab, reads: Collection[str], known: bool) -> None:
        self.target, self.vocab, self.reads, self.known = target, vocab, frozenset(reads), known
        ids_D = vocab.target_ids_D
        edges = torch.arange(0, target.vocab_size + BLOCK, BLOCK, device=ids_D.device).clamp(max=target.vocab_size)
        cuts = torch.searchsorted(ids_D, edges).tolist()
        self._blocks = list(pairwise(zip(edges.tolist(), cuts, strict=True)))

    @torch.no_grad()
    def __call__(self, final_CH: Tensor) -> Law:
        """The law at states after the target's final norm."""
        C, kind = len(final_CH), wide(final_CH.dtype)
        mass = "log_mass_R" in self.reads
        greatest_C = total_C = None
        if self.vocab.complete:
            draft_CD = self.target.logits(final_CH[None])[0].to(kind, copy=True)
        elif not (mass or self.known):
            draft_CD = self.target.logits(final_CH[None], self.vocab.target_ids_D)[0].to(kind, copy=True)
        else:
            draft_CD, greatest_C, total_C = self._stream(final_CH, mass)
        logits_CD = draft_CD.clone() if "log_p_RD" in self.reads else draft_CD
        token_C = draft_CD.argmax(-1) if "token_R" in self.reads else self.vocab.target_ids_D.new_full((C,), -1)
        p_CD = draft_CD
        top_C, lse_C = _softmax_(p_CD)
        known_C = top_C.new_ones(C, dtype=torch.bool) if greatest_C is None else top_C >= greatest_C
        none = p_CD.new_full((1,), float("nan"))
        log_p_CD = logits_CD.sub_(lse_C[:, None]) if "log_p_RD" in self.reads else none[:, None].expand_as(p_CD)
        log_mass_C = none.expand(C)
        if mass:
            log_mass_C = torch.zeros_like(lse_C) if total_C is None else (lse_C - total_C).clamp(max=0)
        return Law(p_CD, log_p_CD, log_mass_C, token_C, known_C)

    def _stream(self, final_CH: Tensor, mass: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Logits on the draft vocabulary, (C, D), and the greatest of all and, if asked for, their log-sum-exp."""
        C, ids_D = len(final_CH), self.vocab.target_ids_D
        draft_CD = final_CH.new_empty((C, len(ids_D)), dtype=wide(final_CH.dtype))
        greatest_C = draft_CD.new_full((C,), float("-inf"))
        total_C = greatest_C.clone()
        for (v0, d0), (v1, d1) in self._blocks:
            logits = self.target.logits(final_CH[None], slice(v0, v1))[0]
            greatest_C = torch.maximum(greatest_C, _take(logits, ids_D[d0:d1] - v0, draft_CD[:, d0:d1]))
            if mass:
                total_C = torch.logaddexp(total_C, logits.to(draft_CD.dtype).logsumexp(-1))
        return draft_CD, greatest_C, total_C
