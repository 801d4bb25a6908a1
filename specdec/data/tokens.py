"""Tokens of conversations at rest."""

from typing import NamedTuple

from torch import Tensor


class EncodedDocument(NamedTuple):
    """A row of a conversation as tokens."""

    ids_T: Tensor  # int32, cut to the longest row
    loss_mask_T: Tensor  # bool
    length: int  # tokens before the cut
    supervised: int  # supervised tokens before the cut
    conversation: int  # the number of its conversation
