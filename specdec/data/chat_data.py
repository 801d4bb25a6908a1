"""Conversations as training data, of which only what the assistant says is supervised, unless told otherwise."""

from typing import Any, Literal

import torch

from specdec.data.batch import Batch, Document
from specdec.data.chat import encode_conversations
from specdec.data.conversations import Conversation, read_conversations
from specdec.data.datamodule import TokenData
from specdec.data.documents import warn_of_overlap
from specdec.data.packing import pack_whole, pad
from specdec.data.split import split

PACKERS = {"whole": pack_whole, "pad": pad}


class ChatData(TokenData):
    """Chat JSON lines, rendered by the target's own template; longer conversations are cut to ``seq_len``.

    Args:
        train: paths and globs of ``messages`` or ``conversations`` rows.
        val: paths and globs; None sets ``val_fraction`` of the training conversations aside.
        test: paths and globs; None tests on the validation conversations.
        val_fraction: share of conversations set aside, chosen by ``seed``; at least one.
        packing: "whole" puts as many whole conversations into a row as fit, "pad" one.
        answer_only: supervise what the assistant says and nothing else; else every token of the training
            conversations. Validation and test are of the assistant's words in any case, which is what is drafted.
    """

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        val_fraction: float = 0.05,
        packing: Literal["whole", "pad"] = "whole",
        answer_only: bool = True,
        seq_len: int = 512,
        batch_size: int = 8,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(seq_len, batch_size, num_workers, seed)
        if packing not in PACKERS:
            raise ValueError(f"packing is {packing!r}: choose one of {', '.join(PACKERS)}")
        self.train, self.val, self.test, self.val_fraction = train, val, test, val_fraction
        self.packing, self.answer_only = packing, answer_only

    def documents(self, tokenizer: Any) -> tuple[list[Document], list[Document]]:
        """(training, validation) conversations as documents."""
        train = read_conversations(self.train)
        if self.val is None:
            train, validation = split(train, self.val_fraction, self.seed)
        else:
            warn_of_overlap(self.train, self.val)
            validation = read_conversations(self.val)
        documents = self._encode(train, tokenizer, "train")
        if not self.answer_only:
            documents = [doc._replace(loss_mask_T=torch.ones_like(doc.loss_mask_T)) for doc in documents]
        return documents, self._encode(validation, tokenizer, "validation")

    def test_documents(self, tokenizer: Any) -> list[Document] | None:
        """Conversations of the test files, if any were given."""
        return None if self.test is None else self._encode(read_conversations(self.test), tokenizer, "test")

    def _encode(self, conversations: list[Conversation], tokenizer: Any, name: str) -> list[Document]:
        return encode_conversations(conversations, tokenizer, self.seq_len, name)

    def pack(self, documents: list[Document]) -> Batch:
        """Conversations as rows of ``seq_len`` tokens."""
        return PACKERS[self.packing](documents, self.seq_len)
