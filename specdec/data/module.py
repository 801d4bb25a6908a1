"""The data of a Lightning run that is read from files and the Hub: plain text, and conversations."""

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch

from specdec.data.chat import CHUNK, Report, encode_chunks, iter_conversations
from specdec.data.layouts import TRAINING, layouts_named
from specdec.data.loader import (
    Batch,
    Document,
    held_out,
)
from specdec.data.mixes import MixSource, SourceDocuments, mix_of, read_mix, shares
from specdec.data.packing import packed, stream_rows, whole_rows
from specdec.data.prefix import text_prefix
from specdec.data.rows import find_sources, warn_of_overlap
from specdec.data.template import check_tokenizer, tokenizing
from specdec.data.texts import encode_texts, iter_texts
from specdec.data.token_cache import cached, determinants
from specdec.data.token_data import Splits, TokenData
from specdec.data.tokens import Encoded, EncodedDocument
from specdec.data.turns import Turns
from specdec.utils.numbers import RowTokens, Seed, Side

Sources = str | list[str] | MixSource | list[MixSource]


class SourceData(TokenData):
    """Base of the data that is read from files and the Hub: one source, or a mix of several with names."""

    def __init__(
        self,
        train: Sources,
        val: Sources | None,
        val_fraction: float,
        seq_len: int,
        batch_size: int,
        seed: int,
    ) -> None:
        super().__init__(seq_len, batch_size, seed)
        self.train = train
        self.val = val
        self.val_fraction = val_fraction
        read_mix(train, "data.train")  # refuses one that makes no sense
        if any(source.weight is not None for source in self.validation_sources or ()):
            raise ValueError(
                "data.val: validation reads every row once and takes no weights: remove them"
            )
        self._parts: dict[str, list[SourceDocuments]] = {}

    @property
    def sources(self) -> list[MixSource]:
        """The sources of the training data; a single one has no name where it was given as plain paths."""
        return read_mix(self.train, "data.train")

    @property
    def validation_sources(self) -> list[MixSource] | None:
        """The sources of the validation data; None where it is a part of the training data."""
        return None if self.val is None else read_mix(self.val, "data.val")

    @property
    def patterns(self) -> list[str]:
        """Paths, globs and names on the Hub of all training data."""
        return [pattern for source in self.sources for pattern in source.patterns]

    @property
    def rows_of(self) -> partial[Iterator[Batch]]:
        """The function that packs documents."""
        raise NotImplementedError

    def encoded(self, patterns: list[str], tokenizer: Any) -> Encoded:
        """Return every document of the files, as tokens."""
        raise NotImplementedError

    def place(self, patterns: list[str], number: int) -> str:
        """Return where the conversation or text of that number stands."""
        raise NotImplementedError

    def usable(self, documents: Encoded, name: str) -> Encoded:
        """Return the documents that can be trained on."""
        return documents

    def parts(self, tokenizer: Any) -> dict[str, list[SourceDocuments]]:
        """Return every document by source, of ``train`` and ``validation``, those that cannot be used included.

        Raises:
            ValueError: a source is missing, broken or too small to be split.
        """
        files = [file for source in self.sources for file in set(find_sources(source.patterns))]
        if twice := [file for file in dict.fromkeys(files) if files.count(file) > 1]:
            raise ValueError(
                f"{twice[0]}: two sources of the mix have it, so that validation would be trained on"
            )
        train = [
            SourceDocuments(source, self.encoded(source.patterns, tokenizer))
            for source in self.sources
        ]
        validation_sources = self.validation_sources
        if validation_sources is not None:
            patterns = [pattern for source in validation_sources for pattern in source.patterns]
            warn_of_overlap(find_sources(self.patterns), find_sources(patterns))
            validation = [
                SourceDocuments(source, self.encoded(source.patterns, tokenizer))
                for source in validation_sources
            ]
            return {"train": train, "validation": validation}
        halves = []
        for source, documents in train:
            try:
                halves.append(
                    documents.split(lambda count: held_out(count, self.val_fraction, self.seed))
                )
            except ValueError as error:
                raise ValueError(
                    f"{source.name}: {error}" if source.name else str(error)
                ) from error
        return {
            name: [
                SourceDocuments(source, half[number])
                for source, half in zip(self.sources, halves, strict=True)
            ]
            for number, name in enumerate(("train", "validation"))
        }

    def _usable(self, tokenizer: Any) -> dict[str, list[SourceDocuments]]:
        self._parts = {
            split: [
                SourceDocuments(
                    source,
                    self.usable(documents, f"{split}, {source.name}" if source.name else split),
                )
                for source, documents in parts
            ]
            for split, parts in self.parts(tokenizer).items()
        }
        return self._parts

    def documents(self, tokenizer: Any) -> tuple[Sequence[Document], Sequence[Document]]:
        """Return (training, validation) documents that can be trained on, source by source."""
        train, validation = (
            parts[0].documents
            if len(parts) == 1
            else [document for part in parts for document in part.documents]
            for parts in self._usable(tokenizer).values()
        )
        return train, validation

    def pack(self, documents: Sequence[Document]) -> Batch:
        """Return all documents as rows of ``seq_len`` tokens."""
        return packed([documents], self.rows_of).rows

    def packed(self, tokenizer: Any) -> Splits:
        """Return the documents as rows, packed source by source."""
        if not any(source.name for source in [*self.sources, *(self.validation_sources or ())]):
            return super().packed(tokenizer)
        splits = self._usable(tokenizer)
        train, validation = (
            packed([part.documents for part in parts], self.rows_of) for parts in splits.values()
        )
        if self.sources[0].name:
            self.mix = mix_of(self.sources, train.counts)
            supervised = [
                sum(int(piece.loss_mask_BT.sum()) for piece in source.pieces())
                for source in train.rows.sections(train.counts)
            ]
            self.shares = shares(self.sources, train.counts, torch.tensor(supervised))
        sources = [part.source.name for part in splits["validation"]]
        self.validation_sections = {
            name: rows for name, rows in zip(sources, validation.counts, strict=True) if name
        }
        return Splits(train.rows, validation.rows)

    def place_of(self, split: str, vocab_size: int) -> str:
        """Return, for a message, where the first id stands that is outside the vocabulary."""
        for source, documents in self._parts.get(split, ()):
            for index, number in enumerate(documents.column("conversations").tolist()):
                ids, _ = documents.arrays(index)
                wrong = ids[(ids < 0) | (ids >= vocab_size)]
                if len(wrong):
                    return f"correct {self.place(source.patterns, number)}, which has id {wrong[0]}, or "
        return ""


class TextData(SourceData):
    """Plain text, of which every token is supervised, closed by the tokenizer's end-of-sequence token if it has one.

    Rows of data (JSON, Parquet, the Hub) are a document each (their ``text``), any other file is one.

    Args:
        train: paths, globs and ``hub:REPOSITORY[@REVISION]:CONFIG:SPLIT``, or a mix: a list of sources, each with a
            ``name`` and a ``weight``, its share of an epoch's rows.
        val: the same, without weights; None sets ``val_fraction`` of the training documents of every source aside.
        val_fraction: share of documents set aside, chosen by ``seed``; at least one. No file of plain text is
            ever cut in two by it.
    """

    def __init__(
        self, train: str | list[str] | MixSource | list[MixSource],
        val: str | list[str] | MixSource | list[MixSource] | None = None, val_fraction: float = 0.05,
        seq_len: RowTokens = 512, batch_size: Side = 8, seed: Seed = 0,
    ) -> None:  # fmt: skip
        super().__init__(train, val, val_fraction, seq_len, batch_size, seed)

    @property
    def rows_of(self) -> partial[Iterator[Batch]]:
        """Packs texts one after another; each, and the part that continues in the next row, begins with the prefix."""
        return partial(stream_rows, seq_len=self.seq_len, prefix=self.prefix)

    def encoded(self, patterns: list[str], tokenizer: Any) -> Encoded:
        """Return every text as tokens, from specdec's cache if it has them."""
        with tokenizing():
            self.prefix = text_prefix(tokenizer)
        determined_by = ["text", *determinants(patterns, None, "refuse", tokenizer, 0)]
        texts = (item.text for item in iter_texts(patterns))
        return cached(
            determined_by, lambda begin, _: encode_texts(texts, tokenizer, begin), "document"
        )

    def place(self, patterns: list[str], number: int) -> str:
        """Return where the text of that number stands."""
        return next(itertools.islice(iter_texts(patterns), number, None)).place


class ChatData(SourceData):
    """Conversations, rendered by the target's own template; longer ones are cut to ``seq_len``.

    Args:
        train: files (JSON lines, JSON, Parquet), globs of them, and ``hub:REPOSITORY[@REVISION]:CONFIG:SPLIT``, or a
            mix: a list of sources, each with a ``name`` and a ``weight``, its share of an epoch's rows.
        val: the same, without weights; None sets ``val_fraction`` of the conversations of every source aside.
        layout: of all rows: messages, sharegpt, alpaca or prompt_response; None recognizes each row's by its columns.
        broken: what happens to a row that is malformed, or of which no turn can be supervised: "refuse" stops there,
            "drop" leaves it out, and the log says how many rows were left out and why.
        turns: "auto" puts the turns of a conversation into one row as long as the template leaves earlier turns as
            they were generated, and starts another row where it does not; "each" makes a row of every assistant turn;
            "whole" makes one row of a conversation, and supervises only the turns that stand in it as generated.
        val_fraction: share of conversations set aside, chosen by ``seed``; at least one.
    """

    def __init__(
        self, train: str | list[str] | MixSource | list[MixSource],
        val: str | list[str] | MixSource | list[MixSource] | None = None, val_fraction: float = 0.05,
        layout: str | None = None, broken: Literal["refuse", "drop"] = "refuse", turns: Turns = "auto",
        seq_len: RowTokens = 512, batch_size: Side = 8, seed: Seed = 0,
    ) -> None:  # fmt: skip
        super().__init__(train, val, val_fraction, seq_len, batch_size, seed)
        layouts_named([] if layout is None else [layout], TRAINING)  # refuses one that is unknown
        self.layout = layout
        self.broken = broken
        self.turns = turns

    @property
    def rows_of(self) -> partial[Iterator[Batch]]:
        """Packs as many whole conversations into a row as fit."""
        return partial(whole_rows, seq_len=self.seq_len)

    def usable(self, documents: Encoded, name: str) -> Encoded:
        """Return those that have a supervised token."""
        return documents.usable(self.seq_len, name)

    def encoded(self, patterns: list[str], tokenizer: Any) -> Encoded:
        """Return every conversation as tokens, from specdec's cache if it has them."""
        check_tokenizer(tokenizer)
        report = Report()

        def make(begin: int, known: dict[str, Any]) -> Iterator[list[EncodedDocument]]:
            # what is known of the chunks before, which are only read
            for name, value in known.items():
                setattr(report, name, value)
            left_out: list[str] | None = [] if self.broken == "drop" else None
            numbered = enumerate(iter_conversations(patterns, self.layout, left_out))
            deque(itertools.islice(numbered, begin * CHUNK), maxlen=0)
            if left_out is not None:
                left_out[:] = report.left_out
                report.left_out = left_out
            yield from encode_chunks(
                numbered, tokenizer, self.seq_len, self.turns, left_out, report
            )

        determined_by = determinants(
            patterns, self.layout, self.broken, tokenizer, self.seq_len, self.turns
        )
        encoded = cached(determined_by, make, about=lambda: dataclasses.asdict(report))
        Report(**encoded.about).log()
        return encoded

    def place(self, patterns: list[str], number: int) -> str:
        """Return where the conversation of that number stands."""
        left_out: list[str] | None = [] if self.broken == "drop" else None
        return next(
            itertools.islice(iter_conversations(patterns, self.layout, left_out), number, None)
        ).place
