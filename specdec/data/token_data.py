"""The base of all data: which rows a Lightning run trains and validates on, and their resumable loaders."""

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from specdec.data.loader import (
    Batch,
    Document,
    Mix,
    Reader,
    ResumableLoader,
    batch_counts,
    content_of,
    order,
)
from specdec.data.packing import pack_stream
from specdec.utils.numbers import RowTokens, Seed, Side, check_numbers
from specdec.utils.text import how_many

log = logging.getLogger(__name__)

VALIDATION = "validation"  # in a checkpoint: what the rows are


class Contents(NamedTuple):
    """Hashes of the packed rows; see :func:`specdec.data.loader.content_of`."""

    train: str
    validation: str


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

    unanswered: ClassVar[bool] = False  # whether the target's answers are still to be written

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
        """Return (training, validation) documents."""
        raise NotImplementedError

    def pack(self, documents: Sequence[Document]) -> Batch:
        """Return all documents as rows of ``seq_len`` tokens."""
        return pack_stream(documents, self.seq_len)

    def setup(self, stage: str | None = None) -> None:
        """Read, tokenize and pack with the module's tokenizer, once.

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
        """Read, tokenize and pack; a second call does nothing. For use without a trainer."""
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
        """Return the documents as rows.

        Data with sources sets :attr:`mix`, :attr:`shares` and :attr:`validation_sections`.
        """
        return Splits(*(self.pack(part) for part in self.documents(tokenizer)))

    @property
    def splits(self) -> Splits:
        """The packed rows."""
        if self._splits is None:
            raise ValueError(
                "the data is not read yet: call setup (with a trainer) or prepare(tokenizer) first"
            )
        return self._splits

    @functools.cached_property
    def contents(self) -> Contents:
        """Hashes of the packed rows, all of which are read once for it."""
        return Contents(*map(content_of, self.splits))

    def state_dict(self) -> dict[str, Any]:
        """Return which rows a run is validated on, by which its best drafter is chosen; for its checkpoints."""
        return {VALIDATION: self.contents.validation}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Compare the validation rows of a run that is resumed with those of its checkpoint.

        Raises:
            ValueError: they are others: figures before and after the checkpoint would not compare.
        """
        assert self.trainer is not None
        resumes = self.trainer.state.fn == TrainerFn.FITTING
        if resumes and state_dict[VALIDATION] != self.contents.validation:
            raise ValueError(
                "the data cannot be resumed: the rows of validation are not those of the checkpoint; resume with the "
                "same data (val, val_fraction, seq_len, seed), or start a new run from its drafter with model.start"
            )

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
        """Return, for a message, where the first id stands that is outside the vocabulary; empty if not known."""
        return ""

    def supervised_counts(self, vocab_size: int) -> Tensor:
        """Return how often each id is supervised in the packed training data, of a mix in an epoch; (V,) int64.

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
        """Return the training rows that the first epoch draws first, of all processes together; None gives all."""
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

    def first_validation_rows(self, count: int | None) -> Batch:
        """Return the validation rows that the first batches have, of all processes together; None gives all."""
        return Batch(*(column[:count] for column in self.splits.validation))

    def train_dataloader(self) -> ResumableLoader:
        """Return the loader of training rows, newly shuffled in each epoch.

        To overfit on the first rows, they come in order, again and again.
        """
        overfit = self.trainer is not None and self.trainer.overfit_batches > 0  # type: ignore[attr-defined]
        return self._loader(
            self.splits.train, shuffle=not overfit, content=lambda: self.contents.train
        )

    def val_dataloader(self) -> ResumableLoader:
        """Return the loader of validation rows in order; no batch has rows of two sources with names."""
        return self._loader(
            self.splits.validation,
            shuffle=False,
            sections=list(self.validation_sections.values()),
            content=lambda: self.contents.validation,
        )

    def test_dataloader(self) -> ResumableLoader:
        """Return the loader of validation rows: to test, give ``Trainer.test`` data whose ``val`` is the test set."""
        return self.val_dataloader()

    def validation_source(self, batch: int) -> str | None:
        """Return the name of the source whose rows the validation batch of that number has, on every process.

        None if it has none.
        """
        world_size = 1 if self.trainer is None else self.trainer.world_size
        batches = batch_counts(list(self.validation_sections.values()), self.batch_size, world_size)
        ends = zip(self.validation_sections, itertools.accumulate(batches), strict=True)
        return next((name for name, end in ends if batch < end), None)

    def _loader(
        self,
        rows: Batch,
        shuffle: bool,
        sections: Sequence[int] = (),
        content: Callable[[], str] | None = None,
    ) -> ResumableLoader:
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
            content,
        )
