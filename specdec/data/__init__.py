"""Rows of data, conversations and their masks, packing, and the data modules."""

from typing import TYPE_CHECKING

from specdec.data.loader import Batch, Document
from specdec.data.mixes import MixSource
from specdec.utils.lazily import imported_when_asked_for

__all__ = [
    "Batch",
    "ChatData",
    "Document",
    "MixSource",
    "TextData",
    "TokenData",
    "TokenizedData",
    "UnansweredData",
]

if TYPE_CHECKING:
    from specdec.data.module import ChatData, TextData
    from specdec.data.token_data import TokenData
    from specdec.data.tokenized import TokenizedData
    from specdec.data.unanswered import UnansweredData
else:  # they import lightning, which decoding does without
    __getattr__ = imported_when_asked_for(
        __name__,
        {
            "ChatData": "specdec.data.module",
            "TextData": "specdec.data.module",
            "TokenData": "specdec.data.token_data",
            "TokenizedData": "specdec.data.tokenized",
            "UnansweredData": "specdec.data.unanswered",
        },
    )
