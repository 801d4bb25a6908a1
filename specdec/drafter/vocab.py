"""The draft vocabulary: which target tokens a drafter can propose."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def most_frequent_ids(counts_V: Tensor, size: int, always: Iterable[int] = ()) -> Tensor:
    """The most frequent ``size`` token ids, ascending; ties go to the lower id.

    Args:
        counts_V: int64, how often each id is supervised in the training data.
        always: ids that are in it whatever their count: end-of-turn and other control tokens, without which a
            drafter can never propose to stop.

    Raises:
        ValueError: more ids must be in it than fit, or an id is out of range.
    """
    size_V = counts_V.shape[0]
    forced = sorted(set(always))
    if forced and not 0 <= forced[0] <= forced[-1] < size_V:
        raise ValueError(f"token ids {forced} do not all lie in 0..{size_V - 1}")
    if not len(forced) <= size <= size_V:
        raise ValueError(
            f"a draft vocabulary of {size} must hold {len(forced)} control tokens and at most {size_V}"
        )
    ranked_V = counts_V.to(torch.int64).clone()
    ranked_V[forced] = torch.iinfo(torch.int64).max
    order_V = torch.sort(ranked_V, descending=True, stable=True).indices
    return order_V[:size].sort().values


class DraftVocab(nn.Module):
    """Maps draft ids to target ids and back.

    Args:
        target_ids_D: int64, strictly increasing target ids; offsets exist only in exported checkpoints.

    Raises:
        ValueError: the ids are not strictly increasing, or out of range.
    """

    target_ids_D: Tensor
    draft_ids_V: Tensor

    def __init__(self, target_ids_D: Tensor, vocab_size: int) -> None:
        super().__init__()
        self.register_buffer("target_ids_D", target_ids_D.to(torch.int64))
        self.register_buffer(
            "draft_ids_V", self.target_ids_D.new_empty(vocab_size), persistent=False
        )
        self.refresh()

    def refresh(self) -> None:
        """Check the ids and rebuild the map back, after they have been set or loaded."""
        ids_D = self.target_ids_D
        size_V = self.draft_ids_V.shape[0]
        if (
            len(ids_D) == 0
            or bool((ids_D.diff() <= 0).any())
            or int(ids_D[0]) < 0
            or int(ids_D[-1]) >= size_V
        ):
            raise ValueError(
                f"draft vocabulary: the target ids must increase strictly inside 0..{size_V - 1}"
            )
        self.complete = len(ids_D) == size_V  # whether it is the target's whole vocabulary
        self.draft_ids_V.fill_(-1)
        self.draft_ids_V[ids_D] = torch.arange(len(ids_D), device=ids_D.device)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Target ids of draft ids, any shape."""
        return self.target_ids_D[draft_ids]

    def to_draft(self, target_ids: Tensor) -> Tensor:
        """Draft ids of target ids, any shape; -1 where the draft vocabulary lacks the token."""
        return self.draft_ids_V[target_ids]
