"""Plain text as training data: every token is supervised."""

from collections.abc import Sequence
from typing import Any

import torch

from specdec.data.batch import Document
from specdec.data.datamodule import TokenData
from specdec.data.documents import as_list, find_files, read_texts, warn_of_overlap
from specdec.data.split import split

CHUNK = 256  # texts tokenised in one call


def encode_texts(texts: Sequence[str], tokenizer: Any) -> list[Document]:
    """Texts with the tokenizer's special tokens, closed by its end-of-sequence token where it has one."""
    documents: list[Document] = []
    for start in range(0, len(texts), CHUNK):
        encoded = tokenizer(
            list(texts[start : start + CHUNK]), add_special_tokens=True, return_attention_mask=False, verbose=False
        )
        for ids in encoded["input_ids"]:
            if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
                ids.append(tokenizer.eos_token_id)
            ids_T = torch.tensor(ids, dtype=torch.long)
            documents.append(Document(ids_T, torch.ones_like(ids_T, dtype=torch.bool)))
    return documents


class TextData(TokenData):
    """Text files: a ``.jsonl`` file holds one document a line (field ``text``), any other file is one document.

    Args:
        train: paths and globs.
        val: paths and globs; None sets ``val_fraction`` of the training documents aside.
        test: paths and globs; None tests on the validation documents.
        val_fraction: share of documents set aside, chosen by ``seed``; at least one. No file of plain text is
            ever cut in two by it.
    """

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        val_fraction: float = 0.05,
        seq_len: int = 512,
        batch_size: int = 8,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(seq_len, batch_size, num_workers, seed)
        self.train, self.val, self.test, self.val_fraction = train, val, test, val_fraction

    def _read(self, patterns: str | list[str], tokenizer: Any) -> list[Document]:
        return encode_texts([item.text for item in read_texts(as_list(patterns))], tokenizer)

    def documents(self, tokenizer: Any) -> tuple[list[Document], list[Document]]:
        """(training, validation) documents."""
        train = self._read(self.train, tokenizer)
        if self.val is None:
            return split(train, self.val_fraction, self.seed)
        warn_of_overlap(find_files(self.train), find_files(self.val))
        return train, self._read(self.val, tokenizer)

    def test_documents(self, tokenizer: Any) -> list[Document] | None:
        """Documents of the test files, if any were given."""
        return None if self.test is None else self._read(self.test, tokenizer)
