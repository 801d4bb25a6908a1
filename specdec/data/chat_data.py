"""Conversations as training data, of which only what the assistant says is supervised, unless told otherwise."""

import logging
from typing import Any, Literal

import torch

from specdec.data import buckets
from specdec.data.batch import Batch, Document
from specdec.data.chat import encode
from specdec.data.conversations import read_conversations
from specdec.data.datamodule import TokenData
from specdec.data.documents import as_list, warn_of_overlap
from specdec.data.encoded import Encoded
from specdec.data.layouts import named
from specdec.data.packing import pack_whole, pad, pad_to_longest
from specdec.data.rows import find_sources
from specdec.data.split import split
from specdec.data.template import check_tokenizer
from specdec.data.token_cache import cached, determinants

log = logging.getLogger(__name__)

PACKERS = {"whole": pack_whole, "pad": pad, "bucket": pad_to_longest}


class ChatData(TokenData):
    """Conversations, rendered by the target's own template; longer ones are cut to ``seq_len``.

    Args:
        train: files (JSON lines, JSON, Parquet, Arrow), globs of them, folders that ``save_to_disk`` made, and
            ``hub:REPOSITORY[@REVISION]:CONFIG:SPLIT``.
        val: the same; None sets ``val_fraction`` of the training conversations aside.
        test: the same; None tests on the validation conversations.
        layout: of all rows: messages, sharegpt, ultrachat, alpaca or prompt_response; None tells each row's by its
            columns.
        broken: what becomes of a row that is malformed or that the template refuses: "refuse" stops there, "drop"
            leaves it out and tells how many there were, and what was wrong with the first.
        cache: keep the tokens in specdec's cache, for the next run on the same data.
        val_fraction: share of conversations set aside, chosen by ``seed``; at least one.
        packing: "whole" puts as many whole conversations into a row as fit, "pad" one; "bucket" puts one into a
            row, and rows of similar length into a batch, which ends with its longest row.
        answer_only: supervise what the assistant says and nothing else; else every token of the training
            conversations. Validation and test are of the assistant's words in any case, which is what is drafted.
    """

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        val_fraction: float = 0.05,
        packing: Literal["whole", "pad", "bucket"] = "whole",
        answer_only: bool = True,
        layout: str | None = None,
        broken: Literal["refuse", "drop"] = "refuse",
        cache: bool = True,
        seq_len: int = 512,
        batch_size: int = 8,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(seq_len, batch_size, num_workers, seed)
        if packing not in PACKERS:
            raise ValueError(f"packing is {packing!r}: choose one of {', '.join(PACKERS)}")
        if broken not in ("refuse", "drop"):
            raise ValueError(f"broken is {broken!r}: choose refuse or drop")
        if layout is not None:
            named(layout)
        self.train, self.val, self.test, self.val_fraction = train, val, test, val_fraction
        self.packing, self.answer_only, self.layout, self.cache = packing, answer_only, layout, cache
        self.broken = broken
        if packing == "bucket":
            self.loader = buckets.BucketLoader

    def documents(self, tokenizer: Any) -> tuple[list[Document], list[Document]]:
        """(training, validation) conversations as documents."""
        if self.val is not None:
            warn_of_overlap(find_sources(self.train), find_sources(self.val))
        train, validation = self._train_and_validation(tokenizer)
        documents = train.usable(self.seq_len, "train")
        if not self.answer_only:
            documents = [doc._replace(loss_mask_T=torch.ones_like(doc.loss_mask_T)) for doc in documents]
        return documents, validation.usable(self.seq_len, "validation")

    def test_documents(self, tokenizer: Any) -> list[Document] | None:
        """Conversations of the test files, if any were given."""
        return None if self.test is None else self._encoded(self.test, tokenizer).usable(self.seq_len, "test")

    def conversations(self, tokenizer: Any) -> dict[str, Encoded]:
        """Every conversation of each split, those included that nothing can be learnt from."""
        train, validation = self._train_and_validation(tokenizer)
        test = {} if self.test is None else {"test": self._encoded(self.test, tokenizer)}
        return {"train": train, "validation": validation, **test}

    def _train_and_validation(self, tokenizer: Any) -> tuple[Encoded, Encoded]:
        train = self._encoded(self.train, tokenizer)
        if self.val is not None:
            return train, self._encoded(self.val, tokenizer)
        parts = split(range(len(train.documents)), self.val_fraction, self.seed)
        return train.take(parts[0]), train.take(parts[1])

    def _encoded(self, patterns: str | list[str], tokenizer: Any) -> Encoded:
        """Every conversation of the sources as tokens, from the cache if it has them."""
        check_tokenizer(tokenizer)

        def make() -> Encoded:
            left_out: list[str] | None = [] if self.broken == "drop" else None
            conversations = read_conversations(patterns, self.layout, left_out)
            log.info("%d conversations are made into tokens", len(conversations))
            return encode(conversations, tokenizer, self.seq_len, left_out)

        if not self.cache:
            return make()
        return cached(determinants(as_list(patterns), self.layout, self.broken, tokenizer, self.seq_len), make)

    def padding_share(self, rows: Batch) -> float:
        """Share of padding in what is read of these rows."""
        if self.packing != "bucket":
            return super().padding_share(rows)
        return buckets.padding_share(rows, self.batch_size, self.seed)

    def pack(self, documents: list[Document]) -> Batch:
        """Conversations as rows of ``seq_len`` tokens."""
        return PACKERS[self.packing](documents, self.seq_len)
