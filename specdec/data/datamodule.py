"""The data's side of a Lightning run: documents in, resumable loaders of packed rows out."""

import logging
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor

from specdec.data.batch import PAD_DOCUMENT, Batch, Document
from specdec.data.loader import Companion, ResumableLoader
from specdec.data.packing import check_ids, pack_stream

log = logging.getLogger(__name__)


class Splits(NamedTuple):
    """Packed rows of the three uses of data."""

    train: Batch
    validation: Batch
    test: Batch


class TokenData(pl.LightningDataModule):
    """Base of all data: a subclass says which documents there are, and may say how they are packed.

    Run the trainer with ``use_distributed_sampler=False``: the loaders take each process's share themselves.

    Args:
        seq_len: tokens of a row.
        batch_size: rows of a batch, per process.
        num_workers: processes that fetch rows; they are in memory, so 0 is seldom slow.
        seed: what the order of rows and the validation split depend on.
    """

    loader: type[ResumableLoader] = ResumableLoader

    def __init__(self, seq_len: int = 512, batch_size: int = 8, num_workers: int = 0, seed: int = 0) -> None:
        super().__init__()
        if seq_len < 2:
            raise ValueError(f"seq_len is {seq_len}: a row needs at least 2 tokens, one to predict from another")
        if batch_size < 1 or num_workers < 0:
            raise ValueError(f"batch_size is {batch_size}, num_workers {num_workers}: at least 1 and 0 are needed")
        self.seq_len, self.batch_size, self.num_workers, self.seed = seq_len, batch_size, num_workers, seed
        self.companion = Companion()  # of the loaders that are made from now on
        self._splits: Splits | None = None

    def documents(self, tokenizer: Any) -> tuple[list[Document], list[Document]]:
        """(training, validation) documents."""
        raise NotImplementedError

    def test_documents(self, tokenizer: Any) -> list[Document] | None:
        """Documents of the test, or None: test on the validation documents."""
        return None

    def pack(self, documents: list[Document]) -> Batch:
        """All documents as rows of ``seq_len`` tokens."""
        return pack_stream(documents, self.seq_len)

    def setup(self, stage: str | None = None) -> None:
        """Read, tokenise and pack with the module's tokenizer, once."""
        assert self.trainer is not None and self.trainer.lightning_module is not None
        self.prepare(self.trainer.lightning_module.tokenizer)

    def prepare(self, tokenizer: Any) -> None:
        """Read, tokenise and pack; a second call does nothing. For use without a trainer."""
        if self._splits is not None:
            return
        train, validation = (self.pack(part) for part in self.documents(tokenizer))
        test = self.test_documents(tokenizer)
        self._splits = Splits(train, validation, validation if test is None else self.pack(test))
        for name, rows in self._splits._asdict().items():
            supervised = 100 * int(rows.loss_mask_BT.sum()) / rows.loss_mask_BT.numel()
            told = (name, *rows.ids_BT.shape, supervised, 100 * self.padding_share(rows))
            log.info("%s: %d rows of %d tokens, %.1f %% supervised, %.1f %% padding", *told)

    def padding_share(self, rows: Batch) -> float:
        """Share of padding in what is read of these rows."""
        return float((rows.documents_BT == PAD_DOCUMENT).float().mean())

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
            check_ids(rows, vocab_size, name)

    def supervised_counts(self, vocab_size: int) -> Tensor:
        """How often each id is supervised in the packed training data; (V,) int64.

        Raises:
            ValueError: an id is negative or not below ``vocab_size``.
        """
        self.check_vocabulary(vocab_size)
        train = self.splits.train
        return torch.bincount(train.ids_BT[train.loss_mask_BT], minlength=vocab_size)

    def _loader(self, rows: Batch, shuffle: bool) -> ResumableLoader:
        rank, world_size = 0, 1
        if self.trainer is not None:
            rank, world_size = self.trainer.global_rank, self.trainer.world_size
        share = (rows, self.batch_size, self.seed, shuffle, self.num_workers, rank, world_size)
        return self.loader(*share, self.companion)

    def first_rows(self, count: int | None) -> Batch:
        """The training rows that the first epoch draws first, shuffled, of all processes together; None gives all."""
        if count is None:
            return self.splits.train
        together = self.batch_size * (1 if self.trainer is None else self.trainer.world_size)
        order = self.loader(self.splits.train, together, self.seed).order.order(0)
        return Batch(*(column[order[:count]] for column in self.splits.train))

    def train_dataloader(self) -> ResumableLoader:
        """Training rows, shuffled anew in each epoch; in order, the first ones again and again, to overfit on them."""
        overfit = self.trainer is not None and self.trainer.overfit_batches > 0  # type: ignore[attr-defined]
        return self._loader(self.splits.train, shuffle=not overfit)

    def val_dataloader(self) -> ResumableLoader:
        """Validation rows in order."""
        return self._loader(self.splits.validation, shuffle=False)

    def test_dataloader(self) -> ResumableLoader:
        """Test rows in order."""
        return self._loader(self.splits.test, shuffle=False)
