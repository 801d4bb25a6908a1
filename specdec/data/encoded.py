"""Conversations as tokens, and what was lost on the way.

Legend: N conversations, T tokens.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.data.batch import Document
from specdec.data.conversations import tell_left_out

log = logging.getLogger(__name__)

MUCH = 0.05  # a loss that deserves a warning


class MaskError(ValueError):
    """There is nothing to learn, or nothing is told apart."""


class Lost(NamedTuple):
    """What truncation and missing answers cost."""

    conversations: int
    cut: int  # conversations longer than a row
    tokens: int
    tokens_lost: int
    supervised: int
    supervised_lost: int
    silent: int  # conversations without a supervised token, before the cut
    cut_away: int  # conversations whose supervised tokens were all lost

    @property
    def dropped(self) -> int:
        """Conversations that nothing can be learnt from."""
        return self.silent + self.cut_away


class Encoded(NamedTuple):
    """Every conversation as a document of at most so many tokens, and how much it was before."""

    documents: list[Document]
    lengths_N: Tensor  # int64, tokens
    supervised_N: Tensor  # int64, supervised tokens
    left_out: list[str]  # of the sources as a whole: what was wrong with each broken row

    def take(self, indices: Sequence[int]) -> "Encoded":
        """Some of the conversations."""
        documents = [self.documents[i] for i in indices]
        return Encoded(documents, self.lengths_N[indices], self.supervised_N[indices], self.left_out)

    @property
    def lost(self) -> Lost:
        """What the documents are short of."""
        kept_N = torch.tensor([int(document.loss_mask_T.sum()) for document in self.documents])
        sizes_N = torch.tensor([len(document.ids_T) for document in self.documents])
        return Lost(
            conversations=len(self.documents),
            cut=int((sizes_N < self.lengths_N).sum()),
            tokens=int(self.lengths_N.sum()),
            tokens_lost=int((self.lengths_N - sizes_N).sum()),
            supervised=int(self.supervised_N.sum()),
            supervised_lost=int((self.supervised_N - kept_N).sum()),
            silent=int((self.supervised_N == 0).sum()),
            cut_away=int(((self.supervised_N > 0) & (kept_N == 0)).sum()),
        )

    def usable(self, max_length: int, name: str) -> list[Document]:
        """The documents that have a supervised token; what was lost is logged, with a warning if it is much.

        Raises:
            MaskError: no token is supervised, or every one.
        """
        lost = self.lost
        tell_left_out(self.left_out)
        supervised_share = lost.supervised_lost / max(lost.supervised, 1)
        log.log(
            logging.WARNING if max(supervised_share, lost.cut / lost.conversations) > MUCH else logging.INFO,
            "%s: %d conversations, %d cut to %d tokens: %d of %d tokens lost, %d of %d supervised (%.1f %%)",
            name, lost.conversations, lost.cut, max_length, lost.tokens_lost, lost.tokens, lost.supervised_lost,
            lost.supervised, 100 * supervised_share,
        )  # fmt: skip
        if lost.dropped:
            log.warning("%s: %d of %d rows have no supervised token; dropped", name, lost.dropped, lost.conversations)
        documents = [document for document in self.documents if document.loss_mask_T.any()]
        if not documents:
            raise MaskError(
                f"{name}: none of {lost.conversations} conversations has a supervised token ({lost.cut} were cut to "
                f"{max_length} tokens): they need assistant turns that begin within seq_len"
            )
        if all(bool(document.loss_mask_T.all()) for document in documents):
            raise MaskError(
                f"{name}: every token is supervised, prompts included: the chat template marks no assistant turns; "
                "check its {% generation %} tags"
            )
        return documents
