"""Rows of data, conversations and their masks, packing, and the data modules."""

from specdec.data.loader import Batch, Document
from specdec.data.mixes import MixSource
from specdec.data.module import ChatData, TextData
from specdec.data.token_data import TokenData
from specdec.data.tokenized import TokenizedData

__all__ = ["Batch", "ChatData", "Document", "MixSource", "TextData", "TokenData", "TokenizedData"]
