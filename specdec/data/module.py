"""The data's side of a Lightning run: documents in, resumable loaders of packed rows out."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor

from specdec.data.chat import encode, iter_conversations
from specdec.data.layouts import TRAINING, named
from specdec.data.loader import Batch, Document, Reader, ResumableLoader, held_out, order
from specdec.data.packing import pack_stream, pack_whole
from specdec.data.prefix import text_prefix, undoubled
from specdec.data.rows import DataRow, find_sources, has_rows, read_plain_text, read_rows, warn_of_overlap
from specdec.data.template import check_tokenizer, tokenizing
from specdec.data.tokens import Encoded, EncodedDocument, cached, determinants
from specdec.utils.numbers import RowTokens, Seed, Side, check_numbers
from specdec.utils.text import how_many

log = logging.getLogger(__name__)

CHUNK = 256  # texts tokenised in one call, at most
CHARACTERS = 1 << 20  # and characters, from which on there are enough


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
        check_numbers(TokenData.__init__, {"seq_len": seq_len, "batch_size": batch_size, "seed": seed}, "data.")
        self.seq_len, self.batch_size, self.seed = seq_len, batch_size, seed
        self.reader: Reader | None = None  # of the loaders that are made from now on
        self.prefix: list[int] = []  # begins every document, and again what goes on in the next row, unsupervised there
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
        self._splits = Splits(*(self.pack(part) for part in self.documents(tokenizer)))
        for name, rows in self._splits._asdict().items():
            tokens = rows.ids_BT.numel()
            supervised = 100 * sum(int(piece.loss_mask_BT.sum()) for piece in rows.pieces()) / tokens
            padding = 100 * sum(int((piece.documents_BT < 0).sum()) for piece in rows.pieces()) / tokens
            log.info(
                "%s: %s of %d tokens, %.1f %% supervised, %.1f %% padding", name, how_many(len(rows.ids_BT), "row"),
                rows.ids_BT.shape[1], supervised, padding,
            )  # fmt: skip

    @property
    def splits(self) -> Splits:
        """The packed rows."""
        if self._splits is None:
            raise ValueError("the data is not read yet: call setup (with a trainer) or prepare(tokenizer) first")
        return self._splits

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse data with ids outside the target's vocabulary.

        Raises:
            ValueError: an id is negative or not below ``vocab_size``.
        """
        for name, rows in self.splits._asdict().items():
            wrong = [piece.ids_BT[(piece.ids_BT < 0) | (piece.ids_BT >= vocab_size)] for piece in rows.pieces()]
            if len(wrong_S := torch.cat(wrong)):
                raise ValueError(
                    f"the {name} data holds token id {int(wrong_S[0])} ({len(wrong_S)} such "
                    f"tokens), but the vocabulary has {vocab_size} ids: the tokenizer does not belong to this target"
                )

    def supervised_counts(self, vocab_size: int) -> Tensor:
        """How often each id is supervised in the packed training data; (V,) int64.

        Raises:
            ValueError: an id is negative or not below ``vocab_size``.
        """
        self.check_vocabulary(vocab_size)
        counts_V = torch.zeros(vocab_size, dtype=torch.int64)
        for piece in self.splits.train.pieces():
            counts_V += torch.bincount(piece.ids_BT[piece.loss_mask_BT], minlength=vocab_size)
        return counts_V

    def first_rows(self, count: int | None) -> Batch:
        """The training rows that the first epoch draws first, shuffled, of all processes together; None gives all."""
        if count is None:
            return self.splits.train
        first = order(len(self.splits.train.ids_BT), self.seed, epoch=0)[:count]
        return Batch(*(column[first] for column in self.splits.train))

    def train_dataloader(self) -> ResumableLoader:
        """Training rows, shuffled anew in each epoch; in order, the first ones again and again, to overfit on them."""
        overfit = self.trainer is not None and self.trainer.overfit_batches > 0  # type: ignore[attr-defined]
        return self._loader(self.splits.train, shuffle=not overfit)

    def val_dataloader(self) -> ResumableLoader:
        """Validation rows in order."""
        return self._loader(self.splits.validation, shuffle=False)

    def _loader(self, rows: Batch, shuffle: bool) -> ResumableLoader:
        rank, world_size = 0, 1
        if self.trainer is not None:
            rank, world_size = self.trainer.global_rank, self.trainer.world_size
        return ResumableLoader(rows, self.batch_size, self.seed, shuffle, rank, world_size, self.reader)


class TextData(TokenData):
    """Plain text, of which every token is supervised, closed by the tokenizer's end-of-sequence token if it has one.

    Rows of data (JSON, Parquet, the Hub) are a document each (their ``text``), any other file is one.

    Args:
        train: paths, globs and ``hub:REPOSITORY[@REVISION]:CONFIG:SPLIT``.
        val: the same; None sets ``val_fraction`` of the training documents aside.
        val_fraction: share of documents set aside, chosen by ``seed``; at least one. No file of plain text is
            ever cut in two by it.
    """

    def __init__(
        self, train: str | list[str], val: str | list[str] | None = None, val_fraction: float = 0.05,
        seq_len: RowTokens = 512, batch_size: Side = 8, seed: Seed = 0,
    ) -> None:  # fmt: skip
        super().__init__(seq_len, batch_size, seed)
        self.train, self.val, self.val_fraction = train, val, val_fraction

    def documents(self, tokenizer: Any) -> tuple[Encoded, Encoded]:
        """(training, validation) documents."""
        with tokenizing():
            self.prefix = text_prefix(tokenizer)
        train = self._encoded(self.train, tokenizer)
        if self.val is None:
            return train.split(lambda count: held_out(count, self.val_fraction, self.seed))
        warn_of_overlap(find_sources(self.train), find_sources(self.val))
        return train, self._encoded(self.val, tokenizer)

    def pack(self, documents: Sequence[Document]) -> Batch:
        """Documents one after another; all of them, and what goes on in the next row, begin with the prefix."""
        return pack_stream(documents, self.seq_len, self.prefix)

    def _encoded(self, patterns: str | list[str], tokenizer: Any) -> Encoded:
        """Every document of the sources as tokens, from specdec's cache if it has them."""
        determined_by = ["text", *determinants(patterns, None, "refuse", tokenizer, 0)]
        texts = (item.text for item in iter_texts(patterns))
        return cached(determined_by, lambda: encode_texts(texts, tokenizer), "document")


class ChatData(TokenData):
    """Conversations, rendered by the target's own template; longer ones are cut to ``seq_len``.

    Args:
        train: files (JSON lines, JSON, Parquet), globs of them, and ``hub:REPOSITORY[@REVISION]:CONFIG:SPLIT``.
        val: the same; None sets ``val_fraction`` of the training conversations aside.
        layout: of all rows: messages, sharegpt, alpaca or prompt_response; None recognises each row's by its columns.
        broken: what becomes of a row that is malformed or that the template refuses: "refuse" stops there, "drop"
            leaves it out; when the tokens are made, the log says how many there were.
        val_fraction: share of conversations set aside, chosen by ``seed``; at least one.
    """

    def __init__(
        self, train: str | list[str], val: str | list[str] | None = None, val_fraction: float = 0.05,
        layout: str | None = None, broken: Literal["refuse", "drop"] = "refuse", seq_len: RowTokens = 512,
        batch_size: Side = 8, seed: Seed = 0,
    ) -> None:  # fmt: skip
        super().__init__(seq_len, batch_size, seed)
        named([] if layout is None else [layout], TRAINING)  # refuses one that is unknown
        self.train, self.val, self.val_fraction, self.layout, self.broken = train, val, val_fraction, layout, broken

    def documents(self, tokenizer: Any) -> tuple[Encoded, Encoded]:
        """(training, validation) conversations as documents; those without a supervised token are left out."""
        if self.val is not None:
            warn_of_overlap(find_sources(self.train), find_sources(self.val))
        train, validation = (one.usable(self.seq_len, name) for name, one in self.conversations(tokenizer).items())
        return train, validation

    def conversations(self, tokenizer: Any) -> dict[str, Encoded]:
        """Every conversation of ``train`` and ``validation``, those without a supervised token included."""
        train = self._encoded(self.train, tokenizer)
        if self.val is not None:
            return {"train": train, "validation": self._encoded(self.val, tokenizer)}
        parts = train.split(lambda count: held_out(count, self.val_fraction, self.seed))
        return dict(zip(("train", "validation"), parts, strict=True))

    def pack(self, documents: Sequence[Document]) -> Batch:
        """As many whole conversations to a row as fit."""
        return pack_whole(documents, self.seq_len)

    def _encoded(self, patterns: str | list[str], tokenizer: Any) -> Encoded:
        """Every conversation of the sources as tokens, from specdec's cache if it has them."""
        check_tokenizer(tokenizer)

        def make() -> Iterator[EncodedDocument]:
            left_out: list[str] | None = [] if self.broken == "drop" else None
            found = iter_conversations(patterns, self.layout, left_out)
            yield from encode(found, tokenizer, self.seq_len, left_out=left_out)
            if left_out:
                log.warning("left out %s, as: %s", how_many(len(left_out), "broken row"), left_out[0])

        return cached(determinants(patterns, self.layout, self.broken, tokenizer, self.seq_len), make)


class Text(NamedTuple):
    """A document of :class:`TextData`."""

    place: str  # for messages: "books.jsonl, line 7"
    text: str


def iter_texts(patterns: str | list[str]) -> Iterator[Text]:
    """Every document of the sources that is not empty, as it comes.

    Raises:
        ValueError: a source is missing or undecodable, a row is broken, or there is no document.
    """

    def text_of(row: DataRow) -> Text:
        if not isinstance(row.values.get("text"), str):
            raise ValueError(f"{row.place}: a row of text needs a string 'text', this has only {sorted(row.values)}")
        return Text(row.place, row.values["text"])

    count = 0
    empty = 0
    for source in find_sources(patterns):
        for item in read_rows(source, text_of) if has_rows(source) else [Text(source, read_plain_text(Path(source)))]:
            if item.text.strip():
                count += 1
                yield item
            else:
                empty += 1
    if not count:
        raise ValueError(f"no documents in {patterns}: every file is empty")
    if empty:
        log.warning("left out %s, %d remain", how_many(empty, "empty document"), count)


def encode_texts(texts: Iterable[str], tokenizer: Any) -> Iterator[EncodedDocument]:
    """Texts with the tokenizer's special tokens, closed by its end-of-sequence token where it has one."""
    with tokenizing():
        prefix = text_prefix(tokenizer)
    number = 0
    for chunk in _chunks(texts):
        with tokenizing():
            encoded = tokenizer(chunk, add_special_tokens=True, return_attention_mask=False, verbose=False)
        for found in encoded["input_ids"]:
            ids = undoubled(found, prefix)
            if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
                ids.append(tokenizer.eos_token_id)
            ids_T = torch.tensor(ids, dtype=torch.int32)
            yield EncodedDocument(ids_T, torch.ones_like(ids_T, dtype=torch.bool), len(ids), len(ids), number)
            number += 1


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    characters = 0
    for text in texts:
        chunk.append(text)
        characters += len(text)
        if len(chunk) == CHUNK or characters >= CHARACTERS:
            yield chunk
            chunk = []
            characters = 0
    if chunk:
        yield chunk
