"""The data's side of a Lightning run: documents in, resumable loaders of packed rows out."""

import dataclasses
import itertools
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor

from specdec.data.chat import Report, encode, iter_conversations
from specdec.data.layouts import TRAINING, layouts_named
from specdec.data.loader import (
    Batch,
    Document,
    Mix,
    Reader,
    ResumableLoader,
    batch_counts,
    held_out,
    order,
)
from specdec.data.mixes import MixSource, SourceDocuments, mix_of, read_mix, shares
from specdec.data.packing import pack_stream, packed, stream_rows, whole_rows
from specdec.data.prefix import text_prefix
from specdec.data.rows import find_sources, warn_of_overlap
from specdec.data.template import check_tokenizer, tokenizing
from specdec.data.texts import encode_texts, iter_texts
from specdec.data.tokens import Encoded, EncodedDocument, cached, determinants
from specdec.data.turns import Turns
from specdec.utils.numbers import RowTokens, Seed, Side, check_numbers
from specdec.utils.text import how_many

log = logging.getLogger(__name__)

Sources = str | list[str] | MixSource | list[MixSource]


class Splits(NamedTuple):
    """Packed rows to train and to validate on."""

    train: Batch
    validation: Batch


class TokenData(pl.LightningDataModule):
    """Base of all data: a subclass says which documents there are, and may say how they are packed.

    Run the trainer with ``use_distributed_sampler=False``: the loaders take each process's share themselves.

    Args:
        seq_len: tokens of a row.
        batch_size: rows of a batch, per process.
        seed: what the order of rows and the validation split depend on.
    """

    def __init__(self, seq_len: RowTokens = 512, batch_size: Side = 8, seed: Seed = 0) -> None:
        super().__init__()
        check_numbers(
            TokenData.__init__,
            {"seq_len": seq_len, "batch_size": batch_size, "seed": seed},
            "data.",
        )
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.seed = seed
        self.reader: Reader | None = None  # of the loaders that are made from now on
        # begins every document, and again what goes on in the next row, unsupervised there
        self.prefix: list[int] = []
        self.mix: Mix | None = None  # of the training rows; None: an epoch draws every row once
        # what each source of a mix is of an epoch, JSON-ready
        self.shares: list[dict[str, Any]] = []
        # rows of validation by the names of their sources, in order
        self.validation_sections: dict[str, int] = {}
        self._splits: Splits | None = None

    def documents(self, tokenizer: Any) -> tuple[Sequence[Document], Sequence[Document]]:
        """(training, validation) documents."""
        raise NotImplementedError

    def pack(self, documents: Sequence[Document]) -> Batch:
        """All documents as rows of ``seq_len`` tokens."""
        return pack_stream(documents, self.seq_len)

    def setup(self, stage: str | None = None) -> None:
        """Read, tokenise and pack with the module's tokenizer, once.

        Raises:
            ValueError: the module has none, and :meth:`prepare` was not called either.
        """
        if self._splits is not None:
            return
        assert self.trainer is not None
        module = self.trainer.lightning_module
        if not hasattr(module, "tokenizer"):
            raise ValueError(
                f"{type(module).__name__} has no tokenizer to read the data with: give it a `tokenizer`, or call "
                "data.prepare(target.tokenizer) before trainer.fit"
            )
        self.prepare(module.tokenizer)

    def prepare(self, tokenizer: Any) -> None:
        """Read, tokenise and pack; a second call does nothing. For use without a trainer."""
        if self._splits is not None:
            return
        log.info("reading the data")
        self._splits = self.packed(tokenizer)
        for name, rows in self._splits._asdict().items():
            tokens = rows.ids_BT.numel()
            supervised = (
                100 * sum(int(piece.loss_mask_BT.sum()) for piece in rows.pieces()) / tokens
            )
            padding = (
                100 * sum(int((piece.documents_BT < 0).sum()) for piece in rows.pieces()) / tokens
            )
            log.info(
                "%s: %s of %d tokens, %.1f %% supervised, %.1f %% padding", name, how_many(len(rows.ids_BT), "row"),
                rows.ids_BT.shape[1], supervised, padding,
            )  # fmt: skip
        for share in self.shares:
            log.info(
                "train: %s: %s, %d of an epoch (%.1f %%), %.1f %% of its supervised tokens", share["name"],
                how_many(share["rows"], "row"), share["rows_of_an_epoch"], 100 * share["share_of_rows"],
                100 * share["share_of_supervised_tokens"],
            )  # fmt: skip

    def packed(self, tokenizer: Any) -> Splits:
        """The documents as rows; what has sources sets :attr:`mix`, :attr:`shares` and :attr:`validation_sections`."""
        return Splits(*(self.pack(part) for part in self.documents(tokenizer)))

    @property
    def splits(self) -> Splits:
        """The packed rows."""
        if self._splits is None:
            raise ValueError(
                "the data is not read yet: call setup (with a trainer) or prepare(tokenizer) first"
            )
        return self._splits

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse data with ids outside the target's vocabulary.

        Raises:
            ValueError: an id is negative or not below ``vocab_size``.
        """
        for name, rows in self.splits._asdict().items():
            wrong = [
                piece.ids_BT[(piece.ids_BT < 0) | (piece.ids_BT >= vocab_size)]
                for piece in rows.pieces()
            ]
            if len(wrong_S := torch.cat(wrong)):
                place = self.place_of(name, vocab_size)
                raise ValueError(
                    f"the {name} data holds token id {int(wrong_S[0])} ({len(wrong_S)} such tokens), but the "
                    f"vocabulary has {vocab_size} ids: {place}the tokenizer does not belong to this target"
                )

    def place_of(self, split: str, vocab_size: int) -> str:
        """For a message: where the first id stands that is outside the vocabulary; empty if that is not known."""
        return ""

    def supervised_counts(self, vocab_size: int) -> Tensor:
        """How often each id is supervised in the packed training data, of a mix in an epoch; (V,) int64.

        Raises:
            ValueError: an id is negative or not below ``vocab_size``.
        """
        self.check_vocabulary(vocab_size)
        counts_V = torch.zeros(vocab_size, dtype=torch.int64)
        rows, drawn = ([len(self.splits.train.ids_BT)], [1]) if self.mix is None else self.mix
        for source, times in zip(self.splits.train.sections(rows), drawn, strict=True):
            source_V = torch.zeros_like(counts_V)
            for piece in source.pieces():
                source_V += torch.bincount(piece.ids_BT[piece.loss_mask_BT], minlength=vocab_size)
            often = 1 if self.mix is None else times / len(source.ids_BT)
            counts_V += (source_V * often).ceil().long()  # what occurs at all stays
        return counts_V

    def first_rows(self, count: int | None) -> Batch:
        """The training rows that the first epoch draws first, shuffled, of all processes together; None gives all."""
        if count is None:
            return self.splits.train
        rows = len(self.splits.train.ids_BT)
        drawn = (
            order(rows, self.seed, epoch=0)
            if self.mix is None
            else self.mix.order(self.seed, epoch=0)
        )
        first = drawn[:count]
        return Batch(*(column[first] for column in self.splits.train))

    def train_dataloader(self) -> ResumableLoader:
        """Training rows, shuffled anew in each epoch; in order, the first ones again and again, to overfit on them."""
        overfit = self.trainer is not None and self.trainer.overfit_batches > 0  # type: ignore[attr-defined]
        return self._loader(self.splits.train, shuffle=not overfit)

    def val_dataloader(self) -> ResumableLoader:
        """Validation rows in order; no batch has rows of two sources with names."""
        return self._loader(
            self.splits.validation, shuffle=False, sections=list(self.validation_sections.values())
        )

    def validation_source(self, batch: int) -> str | None:
        """The name of the source whose rows the validation batch of that number has, on every process; None if it has
        none."""
        world_size = 1 if self.trainer is None else self.trainer.world_size
        batches = batch_counts(list(self.validation_sections.values()), self.batch_size, world_size)
        ends = zip(self.validation_sections, itertools.accumulate(batches), strict=True)
        return next((name for name, end in ends if batch < end), None)

    def _loader(self, rows: Batch, shuffle: bool, sections: Sequence[int] = ()) -> ResumableLoader:
        rank = 0
        world_size = 1
        if self.trainer is not None:
            rank = self.trainer.global_rank
            world_size = self.trainer.world_size
        return ResumableLoader(
            rows,
            self.batch_size,
            self.seed,
            shuffle,
            rank,
            world_size,
            self.reader,
            self.mix,
            sections,
        )


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
        """Of the training data; a single one has no name where it was given as plain paths."""
        return read_mix(self.train, "data.train")

    @property
    def validation_sources(self) -> list[MixSource] | None:
        """Of the validation data; None where it is a part of the training data."""
        return None if self.val is None else read_mix(self.val, "data.val")

    @property
    def patterns(self) -> list[str]:
        """Paths, globs and names on the Hub of all training data."""
        return [pattern for source in self.sources for pattern in source.patterns]

    @property
    def rows_of(self) -> partial[Iterator[Batch]]:
        """How documents are packed."""
        raise NotImplementedError

    def encoded(self, patterns: list[str], tokenizer: Any) -> Encoded:
        """Every document of the files, as tokens."""
        raise NotImplementedError

    def place(self, patterns: list[str], number: int) -> str:
        """Where the conversation or text of that number stands."""
        raise NotImplementedError

    def usable(self, documents: Encoded, name: str) -> Encoded:
        """The documents that can be trained on."""
        return documents

    def parts(self, tokenizer: Any) -> dict[str, list[SourceDocuments]]:
        """Every document by source, of ``train`` and ``validation``, those that cannot be used included.

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
        """(training, validation) documents that can be trained on, source by source."""
        train, validation = (
            parts[0].documents
            if len(parts) == 1
            else [document for part in parts for document in part.documents]
            for parts in self._usable(tokenizer).values()
        )
        return train, validation

    def pack(self, documents: Sequence[Document]) -> Batch:
        """All documents as rows of ``seq_len`` tokens."""
        return packed([documents], self.rows_of).rows

    def packed(self, tokenizer: Any) -> Splits:
        """The documents as rows, packed source by source."""
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
        """For a message: where the first id stands that is outside the vocabulary."""
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
        """Texts one after another; each, and what goes on in the next row, begins with the prefix."""
        return partial(stream_rows, seq_len=self.seq_len, prefix=self.prefix)

    def encoded(self, patterns: list[str], tokenizer: Any) -> Encoded:
        """Every text as tokens, from specdec's cache if it has them."""
        with tokenizing():
            self.prefix = text_prefix(tokenizer)
        determined_by = ["text", *determinants(patterns, None, "refuse", tokenizer, 0)]
        texts = (item.text for item in iter_texts(patterns))
        return cached(determined_by, lambda: encode_texts(texts, tokenizer), "document")

    def place(self, patterns: list[str], number: int) -> str:
        """Where the text of that number stands."""
        return next(itertools.islice(iter_texts(patterns), number, None)).place


class ChatData(SourceData):
    """Conversations, rendered by the target's own template; longer ones are cut to ``seq_len``.

    Args:
        train: files (JSON lines, JSON, Parquet), globs of them, and ``hub:REPOSITORY[@REVISION]:CONFIG:SPLIT``, or a
            mix: a list of sources, each with a ``name`` and a ``weight``, its share of an epoch's rows.
        val: the same, without weights; None sets ``val_fraction`` of the conversations of every source aside.
        layout: of all rows: messages, sharegpt, alpaca or prompt_response; None recognises each row's by its columns.
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
        """As many whole conversations to a row as fit."""
        return partial(whole_rows, seq_len=self.seq_len)

    def usable(self, documents: Encoded, name: str) -> Encoded:
        """Those that have a supervised token."""
        return documents.usable(self.seq_len, name)

    def encoded(self, patterns: list[str], tokenizer: Any) -> Encoded:
        """Every conversation as tokens, from specdec's cache if it has them."""
        check_tokenizer(tokenizer)

        report = Report()

        def make() -> Iterator[EncodedDocument]:
            left_out: list[str] | None = [] if self.broken == "drop" else None
            conversations = iter_conversations(patterns, self.layout, left_out)
            yield from encode(conversations, tokenizer, self.seq_len, self.turns, left_out, report)
            report.left_out = left_out or []

        determined_by = determinants(
            patterns, self.layout, self.broken, tokenizer, self.seq_len, self.turns
        )
        encoded = cached(determined_by, make, about=lambda: dataclasses.asdict(report))
        Report(**encoded.about).log()
        return encoded

    def place(self, patterns: list[str], number: int) -> str:
        """Where the conversation of that number stands."""
        left_out: list[str] | None = [] if self.broken == "drop" else None
        return next(
            itertools.islice(iter_conversations(patterns, self.layout, left_out), number, None)
        ).place
