"""Batches, documents, chats, packing and the data modules."""

from specdec.data.batch import Batch, Document, collate
from specdec.data.chat_data import ChatData
from specdec.data.datamodule import TokenData
from specdec.data.text import TextData

__all__ = ["Batch", "ChatData", "Document", "TextData", "TokenData", "collate"]
