"""Data that is already tokenized: a data set, a ``DataLoader`` or a ``LightningDataModule`` of the user's own.

Legend: B examples of a batch, T tokens of an example.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from specdec.data.loader import Batch, Document, ResumableLoader, split
from specdec.data.packing import pack_whole
from specdec.data.token_data import TokenData
from specdec.utils.numbers import RowTokens, Seed, Side
from specdec.utils.text import how_many

log = logging.getLogger(__name__)

IGNORED = -100  # the label that the losses of Hugging Face leave out
MASKS = "loss_mask", "assistant_masks"  # the second is the name that apply_chat_template gives it
Examples = Iterable[Any]


class TokenizedData(TokenData):
    """Token ids made elsewhere. specdec reads them once, packs whole examples into rows, and shuffles the rows itself.

    An example is a :class:`Document` or a mapping with ``input_ids``; a batch is a mapping of 2-D tensors, whose
    ``attention_mask`` marks what is no padding. Training supervises the tokens whose ``labels`` are not -100, or those
    that ``loss_mask`` or ``assistant_masks`` marks; without any of the three, all tokens.

    Args:
        train: any iterable of examples or batches, as a ``datasets.Dataset`` or a ``DataLoader``; or a
            ``LightningDataModule``, which has the validation examples too. A ``DataLoader`` that shuffles is read in
            its data set's own order, so that a resumed run draws the same rows.
        val: the same for validation; None takes the data module's, or sets ``val_fraction`` of the examples aside.
        test: the same for ``Trainer.test``; None takes the data module's, or the validation examples.
        val_fraction: share of the examples set aside, chosen by ``seed``; at least one.
    """

    def __init__(
        self, train: Examples | pl.LightningDataModule, val: Examples | None = None, test: Examples | None = None,
        val_fraction: float = 0.05, seq_len: RowTokens = 512, batch_size: Side = 8, seed: Seed = 0,
    ) -> None:  # fmt: skip
        super().__init__(seq_len, batch_size, seed)
        self.val_fraction = val_fraction
        self._train = train
        self._val = val
        self._test = test

    def documents(self, tokenizer: Any) -> tuple[Sequence[Document], Sequence[Document]]:
        """Return (training, validation) examples; nothing is tokenized.

        Raises:
            ValueError: an example has no token ids, or a mask or labels of another length.
        """
        train = self._train
        validation = self._val
        if isinstance(train, pl.LightningDataModule):
            train.prepare_data()
            train.setup("fit")
            validation = own_examples(train.val_dataloader) if validation is None else validation
            train = train.train_dataloader()
        documents = list(read_examples(train, "train"))
        if validation is None:
            return split(documents, self.val_fraction, self.seed)
        return documents, list(read_examples(validation, "val"))

    def test_dataloader(self) -> ResumableLoader:
        """Return the loader of the test examples, of the validation rows if there are none."""
        examples = self._test
        if examples is None and isinstance(self._train, pl.LightningDataModule):
            self._train.setup("test")
            examples = own_examples(self._train.test_dataloader)
        if examples is None:
            return super().test_dataloader()
        return self._loader(self.pack(list(read_examples(examples, "test"))), shuffle=False)

    def pack(self, documents: Sequence[Document]) -> Batch:
        """Return all examples as rows of ``seq_len`` tokens; longer examples are cut to that."""
        cut = [
            Document(ids_T[: self.seq_len], loss_mask_T[: self.seq_len])
            for ids_T, loss_mask_T in documents
        ]
        longer = sum(len(document.ids_T) > self.seq_len for document in documents)
        if longer:
            log.warning(
                "%s cut: data.seq_len is %d tokens", how_many(longer, "example"), self.seq_len
            )
        return pack_whole(cut, self.seq_len)


def own_examples(loader: Callable[[], Any]) -> Examples | None:
    """Return the examples of a data module's loader, None if the module does not define it."""
    try:
        examples: Examples | None = loader()  # Lightning takes an empty list for none
    except MisconfigurationException:  # which Lightning's own method raises
        return None
    return None if isinstance(examples, list) and not examples else examples


def read_examples(examples: Examples, name: str) -> Iterator[Document]:
    """Yield every example, those of batches one by one; ``name`` says in messages whose they are."""
    if isinstance(examples, DataLoader) and isinstance(examples.sampler, RandomSampler):
        examples = DataLoader(
            examples.dataset, examples.batch_size or 1, collate_fn=examples.collate_fn
        )
    for number, example in enumerate(examples):
        try:
            yield from documents_of(example)
        except ValueError as error:
            raise ValueError(f"data.{name}: example {number}: {error}") from error


def documents_of(example: Any) -> Iterator[Document]:
    """Yield the document of an example, or those of a batch, without padding.

    Raises:
        ValueError: it has no token ids, or a mask or labels of another shape.
    """
    if isinstance(example, Document):
        example = {"input_ids": example.ids_T, "loss_mask": example.loss_mask_T}
    if not isinstance(example, Mapping) or "input_ids" not in example:
        fields = f"the keys {', '.join(map(str, example))}" if isinstance(example, Mapping) else ""
        raise ValueError(
            f"a mapping with input_ids is needed, not {fields or type(example).__name__}: tokenize the text first, or "
            "use ChatData or TextData, which do"
        )
    ids = _integers(example, "input_ids")
    if ids.dim() > 2:
        raise ValueError(f"input_ids have {ids.dim()} dimensions: 1 of an example, 2 of a batch")
    real = ids.new_ones(ids.shape)
    if "attention_mask" in example:
        real = _like(ids, example, "attention_mask")
    supervised = ids.new_ones(ids.shape)
    if "labels" in example:
        supervised = _like(ids, example, "labels") != IGNORED
    for mask in MASKS:
        if mask in example:
            supervised = supervised.bool() & _like(ids, example, mask).bool()
    for ids_T, real_T, supervised_T in zip(
        torch.atleast_2d(ids), torch.atleast_2d(real), torch.atleast_2d(supervised), strict=True
    ):
        real_T = real_T.bool()
        yield Document(ids_T[real_T], supervised_T.bool()[real_T])


def _integers(example: Mapping[str, Any], key: str) -> Tensor:
    """Return a column of an example as int64; ValueError if it isn't one."""
    try:
        column = torch.as_tensor(example[key])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{key} are no rectangular numbers: {error}") from error
    if column.is_floating_point() or column.dim() == 0:
        raise ValueError(
            f"{key} are {column.dtype} of {column.dim()} dimensions, not integers in a row"
        )
    return column.long()


def _like(ids: Tensor, example: Mapping[str, Any], key: str) -> Tensor:
    """Return a column of the ids' shape."""
    column = _integers(example, key)
    if column.shape != ids.shape:
        raise ValueError(
            f"{key} have the shape {list(column.shape)}, input_ids {list(ids.shape)}: one for every token"
        )
    return column
