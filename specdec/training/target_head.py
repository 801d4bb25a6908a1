"""The target's next-token distribution on the draft vocabulary, from its last states, block by block of its head.

Legend: C positions, R rows, H hidden, D draft vocabulary.
"""

from collections.abc import Collection
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.drafter import DraftVocab
from specdec.nn.backend import pointwise, wide
from specdec.target import Target

BLOCK = 8192  # columns of the target's vocabulary that stand in memory at once
# Numbers of a tile for each core: in float32 half a megabyte, which its cache holds with what is computed of it.
TILE_NUMBERS = 2**17


class TargetProbs(NamedTuple):
    """The target's next-token distribution at C positions, on the draft vocabulary; four as in ``LossRows``."""

    p_CD: Tensor  # float32 or wider
    log_p_CD: Tensor
    log_mass_C: Tensor
    token_C: Tensor
    covered_C: Tensor  # bool, whether the most likely token of all is in the draft vocabulary; a tie counts


class TargetHead:
    """The target's probabilities from its last states, its head streamed over blocks of the vocabulary.

    Args:
        reads: what losses read in addition to p; see ``losses.DistributionLoss.reads``.
        needs_covered: whether ``covered_C`` is wanted. If neither that nor the mass is, only the draft vocabulary's
            rows are multiplied, and all tokens count as covered.
    """

    def __init__(
        self, target: Target, vocab: DraftVocab, reads: Collection[str], needs_covered: bool
    ) -> None:
        self.target = target
        self.vocab = vocab
        self.reads = frozenset(reads)
        self.needs_covered = needs_covered
        # Edges of the blocks, in the target's vocabulary and in the draft vocabulary.
        size = target.vocab_size
        edges = torch.arange(0, size + BLOCK, BLOCK, device=vocab.target_ids_D.device)
        edges = edges.clamp(max=size)
        draft_edges = torch.searchsorted(vocab.target_ids_D, edges).tolist()
        self._blocks = list(pairwise(zip(edges.tolist(), draft_edges, strict=True)))

    @torch.no_grad()
    def __call__(self, final_CH: Tensor) -> TargetProbs:
        """Return the distribution at states after the target's final norm."""
        logits_CD, greatest_C, total_C = self._logits(final_CH)
        log_p_is_read = "log_p_RD" in self.reads
        log_p_CD = logits_CD.clone() if log_p_is_read else None
        if "token_R" in self.reads:
            token_C = logits_CD.argmax(-1)
        else:
            token_C = self.vocab.target_ids_D.new_full((len(final_CH),), -1)
        p_CD = logits_CD
        top_C, lse_C = _softmax_(p_CD)
        if greatest_C is None:
            covered_C = torch.ones_like(top_C, dtype=torch.bool)
        else:
            covered_C = top_C >= greatest_C
        # A column that nobody reads is one number, expanded.
        unread = p_CD.new_full((1,), float("nan"))
        if log_p_CD is None:
            log_p_CD = unread[:, None].expand_as(p_CD)
        else:
            log_p_CD.sub_(lse_C[:, None])
        if "log_mass_R" not in self.reads:
            log_mass_C = unread.expand(len(final_CH))
        elif total_C is None:
            log_mass_C = torch.zeros_like(lse_C)
        else:
            log_mass_C = (lse_C - total_C).clamp(max=0)
        return TargetProbs(p_CD, log_p_CD, log_mass_C, token_C, covered_C)

    def _logits(self, final_CH: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the logits on the draft vocabulary, and of all logits the greatest and the log-sum-exp, both (C,).

        These are None where they are not needed, or where the draft vocabulary is the whole one.
        """
        kind = wide(final_CH.dtype)
        ids_D = self.vocab.target_ids_D
        needs_mass = "log_mass_R" in self.reads
        if self.vocab.complete:
            return self.target.logits(final_CH[None])[0].to(kind, copy=True), None, None
        if not (needs_mass or self.needs_covered):
            return self.target.logits(final_CH[None], ids_D)[0].to(kind, copy=True), None, None
        draft_CD = final_CH.new_empty((len(final_CH), len(ids_D)), dtype=kind)
        greatest_C = draft_CD.new_full((len(final_CH),), float("-inf"))
        total_C = greatest_C.clone()
        for (first, draft_first), (end, draft_end) in self._blocks:
            logits = self.target.logits(final_CH[None], slice(first, end))[0]
            columns = ids_D[draft_first:draft_end] - first
            draft_CD[:, draft_first:draft_end] = logits.index_select(1, columns)
            greatest_C = torch.maximum(greatest_C, logits.amax(-1).to(kind))
            if needs_mass:
                total_C = torch.logaddexp(total_C, logits.to(kind).logsumexp(-1))
        return draft_CD, greatest_C, total_C


def row_tiles(x_RD: Tensor) -> list[slice]:
    """Return the rows of a matrix in tiles that stay in a processor's cache from one operation to the next.

    Row by row, losses and probabilities take about ten operations, and memory is slower than any of them. On a GPU
    starting an operation is what costs: there it is one tile.
    """
    R, D = x_RD.shape
    rows = max(1, TILE_NUMBERS * torch.get_num_threads() // D)
    if x_RD.device.type != "cpu" or rows >= R:
        return [slice(None)]
    return [slice(first, first + rows) for first in range(0, R, rows)]


def _softmax_(logits_CD: Tensor) -> tuple[Tensor, Tensor]:
    """Make logits their probabilities, in place; the greatest logit and the log-sum-exp."""
    tiles = row_tiles(logits_CD)
    if len(tiles) == 1:
        return _softmax_rows_(logits_CD)
    top_C, lse_C = zip(*(_softmax_rows_(logits_CD[tile]) for tile in tiles), strict=True)
    return torch.cat(top_C), torch.cat(lse_C)


@pointwise
def _softmax_rows_(logits_CD: Tensor) -> tuple[Tensor, Tensor]:
    top_C = logits_CD.amax(-1)
    e_CD = torch.exp(logits_CD - top_C[:, None])
    total_C = e_CD.sum(-1)
    logits_CD.copy_(e_CD / total_C[:, None])
    return top_C, top_C + total_C.log()
