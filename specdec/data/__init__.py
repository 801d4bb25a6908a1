"""Rows of data, conversations and their masks, packing, and the data modules."""

from specdec.data.module import ChatData, TextData, TokenData
from specdec.data.packing import Batch, Document

__all__ = ["Batch", "ChatData", "Document", "TextData", "TokenData"]
