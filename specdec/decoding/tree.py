"""Draft trees.

Legend: N nodes, the root included, D draft vocabulary.
"""

from typing import NamedTuple

from torch import Tensor

from specdec.decoding.rules import Drafts, ancestors
from specdec.drafter import DraftVocab


class DraftTree(NamedTuple):
    """Tokens proposed after the last committed one; node 0, the root, is that committed token.

    Parents precede their children, siblings stand in the order they were drawn, and the root is its own parent.
    Everything else is derived.
    """

    tokens_N: Tensor  # int64 target ids
    parents_N: Tensor  # int64
    q_ND: Tensor | None = None  # the law that a node's children were drawn from, zeros at leaves; None if not drawn

    def ancestors_NN(self) -> Tensor:  # noqa: N802
        """bool: column j is an ancestor of row i, or i itself."""
        return ancestors(self.parents_N[None])[0]

    def drafts(self, vocab: DraftVocab) -> Drafts:
        """What an acceptance rule judges, a batch of one."""
        q_BND = None if self.q_ND is None else self.q_ND[None]
        return Drafts(self.tokens_N[None], self.parents_N[None], q_BND, vocab.target_ids_D)
