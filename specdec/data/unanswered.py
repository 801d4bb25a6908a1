"""Data whose answers the target writes during training: conversations, and batches whose tokens come from outside.

Legend: B conversations, or rows of a batch.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from specdec.data.chat import read_conversations, warn_of_broken
from specdec.data.layouts import TRAINING, ChatConversation, layouts_named
from specdec.data.loader import (
    BLANK,
    PAD_DOCUMENT,
    Batch,
    Document,
    Reader,
    ResumableLoader,
    content_of,
    split,
)
from specdec.data.packing import pack_whole
from specdec.data.rows import find_sources, warn_of_overlap
from specdec.data.template import check_tokenizer
from specdec.data.token_data import Contents, Splits, TokenData
from specdec.data.turns import Turns
from specdec.utils.numbers import RowTokens, Seed, Side
from specdec.utils.text import how_many

log = logging.getLogger(__name__)

UNKNOWN = (
    "the conversations of data UnansweredData are answered during training, by model.features=Answered: here run "
    "specdec regenerate first, and give the file that it writes to data=ChatData"
)


class Answerer(Reader, Protocol):
    """A reader that answers conversations, too."""

    settings_digest: str
    """A hash of what the answers depend on in addition to the conversations."""

    def ask(self, rows: Sequence[ChatConversation]) -> None:
        """A batch of these conversations comes, after those that were asked for before."""

    def answered(self, rows: Sequence[ChatConversation]) -> Batch:
        """Wait for the batch that was asked for first, and return it."""

    def drop(self, rows: Sequence[ChatConversation]) -> None:
        """The batch that was asked for last does not come."""


class UnansweredLoader(ResumableLoader):
    """Batches of conversations, whose rows the answerer makes.

    A batch has as many rows as the answered conversations fill; none of a supervised token makes a row of padding.
    """

    reader: Answerer

    def __init__(
        self, conversations: Sequence[ChatConversation], content: str, reader: Answerer, batch_size: int, seed: int,
        shuffle: bool, rank: int, world_size: int,
    ) -> None:  # fmt: skip
        count = len(conversations)
        nothing = torch.zeros(count, 0, dtype=torch.int64)
        no_tokens = Batch(
            nothing, nothing.bool(), nothing
        )  # of each conversation: there are none yet
        asked = f"{content} {reader.settings_digest}"
        super().__init__(
            no_tokens, batch_size, seed, shuffle, rank, world_size, reader, content=lambda: asked
        )
        self.conversations = conversations

    def fetch(self, numbers_B: Tensor) -> list[ChatConversation]:
        """Conversations by their numbers."""
        return [self.conversations[number] for number in numbers_B.tolist() if number != BLANK]

    def announce(self, batch: list[ChatConversation]) -> None:
        self.reader.ask(batch)

    def hand_out(self, batch: list[ChatConversation]) -> Batch:
        """Return the rows of answered conversations, once they are there."""
        return self.reader.answered(batch)

    def take_back(self, batch: list[ChatConversation]) -> None:
        self.reader.drop(batch)


class UnansweredData(TokenData):
    """Conversations that the target answers during training; model.features=Answered has it do so.

    A conversation's own answers are not read, except for the calls of tools that recorded results belong to: they are
    replaced as ``specdec regenerate`` replaces them.

    Args:
        train: files (JSON lines, JSON, Parquet), globs of them, and ``hub:REPOSITORY[@REVISION]:CONFIG:SPLIT``.
        val: the same, all answered before the first step; None sets ``val_fraction`` of the conversations aside.
        layout: of all rows: messages, sharegpt, alpaca or prompt_response; None recognizes each row's by its columns.
        broken: whether a row that is malformed, or of which no answer can be supervised, ends the run ("refuse") or
            is left out ("drop").
        turns: how the turns of an answered conversation are put into rows; see ``ChatData``.
        val_fraction: share of conversations set aside, chosen by ``seed``; at least one.
        seq_len: tokens of a row; longer conversations are cut.
        batch_size: conversations of a batch, per process. Their answers are packed into as few rows as hold them.
    """

    unanswered: ClassVar[bool] = True

    def __init__(
        self, train: str | list[str], val: str | list[str] | None = None, val_fraction: float = 0.05,
        layout: str | None = None, broken: Literal["refuse", "drop"] = "refuse", turns: Turns = "auto",
        seq_len: RowTokens = 512, batch_size: Side = 8, seed: Seed = 0,
    ) -> None:  # fmt: skip
        super().__init__(seq_len, batch_size, seed)
        layouts_named([] if layout is None else [layout], TRAINING)  # refuses one that is unknown
        self.train = train
        self.val = val
        self.val_fraction = val_fraction
        self.layout = layout
        self.broken = broken
        self.turns = turns
        self.conversations: list[ChatConversation] = []
        self.validation_conversations: list[ChatConversation] = []

    def documents(self, tokenizer: Any) -> tuple[Sequence[Document], Sequence[Document]]:
        """Raise ValueError: there are none before the conversations are answered."""
        raise ValueError(UNKNOWN)

    def prepare(self, tokenizer: Any) -> None:
        """Read the conversations; a second call does nothing.

        Raises:
            ValueError: a source is missing or broken, or too small to be split; or there is no chat template.
        """
        if self.conversations:
            return
        check_tokenizer(tokenizer)
        log.info("reading the conversations")
        train = self._read(self.train)
        if self.val is None:
            train, validation = split(train, self.val_fraction, self.seed)
        else:
            warn_of_overlap(find_sources(self.train), find_sources(self.val))
            validation = self._read(self.val)
        self.conversations = train
        self.validation_conversations = validation
        log.info(
            "to be answered: %s to train on, %s to validate on", how_many(len(train), "conversation"), len(validation)
        )  # fmt: skip

    def _read(self, patterns: str | list[str]) -> list[ChatConversation]:
        left_out: list[str] | None = [] if self.broken == "drop" else None
        conversations = read_conversations(patterns, self.layout, left_out)
        warn_of_broken(left_out)
        return conversations

    def answered_validation(self, documents: Sequence[Document]) -> None:
        """Take the validation conversations' documents, which are validated on from now on.

        Raises:
            ValueError: there is none.
        """
        if not documents:
            raise ValueError(
                f"none of {how_many(len(self.validation_conversations), 'validation conversation')} has an answer to "
                "validate on: see the reasons above, and give other conversations as data.val"
            )
        vars(self).pop("contents", None)  # of what was answered before
        self._splits = Splits(self.rows_of([]), self.rows_of(documents))

    def rows_of(self, documents: Sequence[Document]) -> Batch:
        """Documents as rows of ``seq_len`` tokens, as few as hold them; a row of padding if there is no document."""
        if documents:
            return pack_whole(documents, self.seq_len)
        shape = (1, self.seq_len)
        padding_1T = torch.full(shape, PAD_DOCUMENT)
        return Batch(torch.zeros_like(padding_1T), padding_1T >= 0, padding_1T)

    @property
    def splits(self) -> Splits:
        """The answered validation rows; of training rows, one of padding.

        Raises:
            ValueError: they are not answered.
        """
        if self._splits is None:
            raise ValueError(UNKNOWN)
        return self._splits

    @cached_property
    def contents(self) -> Contents:
        """Hashes of the training conversations, and of the answered validation rows."""
        digest = hashlib.sha256(f"{self.seq_len} {self.turns} {self.broken}".encode())
        for row in self.conversations:
            digest.update(json.dumps([row.id, row.messages, row.tools], sort_keys=True).encode())
        return Contents(digest.hexdigest()[:16], content_of(self.splits.validation))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Do nothing: the target's tokenizer and the target itself make all ids."""

    def supervised_counts(self, vocab_size: int) -> Tensor:
        """Return zeros, (V,) int64: which tokens the answers have is not known before training."""
        return torch.zeros(vocab_size, dtype=torch.int64)

    def train_dataloader(self) -> ResumableLoader:
        """Return the loader of training conversations, newly shuffled in each epoch.

        Raises:
            ValueError: there is nothing that answers them.
        """
        answerer: Any = self.reader
        if not hasattr(answerer, "settings_digest"):
            raise ValueError(UNKNOWN)
        overfit = self.trainer is not None and self.trainer.overfit_batches > 0  # type: ignore[attr-defined]
        rank = 0 if self.trainer is None else self.trainer.global_rank
        world_size = 1 if self.trainer is None else self.trainer.world_size
        return UnansweredLoader(
            self.conversations, self.contents.train, answerer, self.batch_size, self.seed, not overfit, rank, world_size
        )  # fmt: skip
