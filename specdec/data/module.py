"""The data's side of a Lightning run: documents in, resumable loaders of packed rows out."""

import logging
from pathlib import Path
from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor

from specdec.data.chat import Encoded, cached, determinants, encode, read_conversations
from specdec.data.layouts import TRAINING, named
from specdec.data.loader import Batch, Document, Reader, ResumableLoader, order, pack_stream, pack_whole, split
from specdec.data.rows import DataRow, find_sources, has_rows, read_rows, read_text, warn_of_overlap
from specdec.data.template import check_tokenizer, tokenizing
from specdec.utils.numbers import RowTokens, Seed, Side, check_numbers
from specdec.utils.text import how_many

log = logging.getLogger(__name__)

CHUNK = 256  # texts tokenised in one call


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
        self._splits: Splits | None = None

    def documents(self, tokenizer: Any) -> tuple[list[Document], list[Document]]:
        """(training, validation) documents."""
        raise NotImplementedError

    def pack(self, documents: list[Document]) -> Batch:
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
            supervised = 100 * int(rows.loss_mask_BT.sum()) / rows.loss_mask_BT.numel()
            padding = 100 * float((rows.documents_BT < 0).float().mean())
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
            wrong_BT = (rows.ids_BT < 0) | (rows.ids_BT >= vocab_size)
            if wrong_BT.any():
                raise ValueError(
                    f"the {name} data holds token id {int(rows.ids_BT[wrong_BT][0])} ({int(wrong_BT.sum())} such "
                    f"tokens), but the vocabulary has {vocab_size} ids: the tokenizer does not belong to this target"
                )

    def supervised_counts(self, vocab_size: int) -> Tensor:
        """How often each id is supervised in the packed training data; (V,) int64.

        Raises:
            ValueError: an id is negative or not below ``vocab_size``.
        """
        self.check_vocabulary(vocab_size)
        train = self.splits.train
        return torch.bincount(train.ids_BT[train.loss_mask_BT], minlength=vocab_size)

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

    def documents(self, tokenizer: Any) -> tuple[list[Document], list[Document]]:
        """(training, validation) documents."""
        train = encode_texts(read_texts(self.train), tokenizer)
        if self.val is None:
            return split(train, self.val_fraction, self.seed)
        warn_of_overlap(find_sources(self.train), find_sources(self.val))
        return train, encode_texts(read_texts(self.val), tokenizer)


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

    def documents(self, tokenizer: Any) -> tuple[list[Document], list[Document]]:
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
        parts = split(range(len(train.documents)), self.val_fraction, self.seed)
        return {"train": train.take(parts[0]), "validation": train.take(parts[1])}

    def pack(self, documents: list[Document]) -> Batch:
        """As many whole conversations to a row as fit."""
        return pack_whole(documents, self.seq_len)

    def _encoded(self, patterns: str | list[str], tokenizer: Any) -> Encoded:
        """Every conversation of the sources as tokens, from specdec's cache if it has them."""
        check_tokenizer(tokenizer)

        def make() -> Encoded:
            left_out: list[str] | None = [] if self.broken == "drop" else None
            encoded = encode(read_conversations(patterns, self.layout, left_out), tokenizer, self.seq_len, left_out)
            if left_out:
                log.warning("left out %s, as: %s", how_many(len(left_out), "broken row"), left_out[0])
            return encoded

        return cached(determinants(patterns, self.layout, self.broken, tokenizer, self.seq_len), make)


def read_texts(patterns: str | list[str]) -> list[str]:
    """Every document of the sources that is not empty, for :class:`TextData`.

    Raises:
        ValueError: a source is missing or undecodable, a row is broken, or no document is left.
    """

    def text_of(row: DataRow) -> str:
        if not isinstance(row.values.get("text"), str):
            raise ValueError(f"{row.place}: a row of text needs a string 'text', this has only {sorted(row.values)}")
        return row.values["text"]

    read: list[str] = []
    for source in find_sources(patterns):
        read += read_rows(source, text_of) if has_rows(source) else [read_text(Path(source))]
    texts = [text for text in read if text.strip()]
    if len(texts) < len(read):
        log.warning("left out %s, %d remain", how_many(len(read) - len(texts), "empty document"), len(texts))
    if not texts:
        raise ValueError(f"no documents in {patterns}: every file is empty")
    return texts


def encode_texts(texts: list[str], tokenizer: Any) -> list[Document]:
    """Texts with the tokenizer's special tokens, closed by its end-of-sequence token where it has one."""
    documents: list[Document] = []
    for start in range(0, len(texts), CHUNK):
        chunk = texts[start : start + CHUNK]
        with tokenizing():
            encoded = tokenizer(chunk, add_special_tokens=True, return_attention_mask=False, verbose=False)
        for ids in encoded["input_ids"]:
            if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
                ids.append(tokenizer.eos_token_id)
            ids_T = torch.tensor(ids, dtype=torch.long)
            documents.append(Document(ids_T, torch.ones_like(ids_T, dtype=torch.bool)))
    return documents
