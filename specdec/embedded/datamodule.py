"""The standard library's sources as training data."""

from typing import Any

import torch

from specdec.data.batch import Document
from specdec.data.datamodule import TokenData
from specdec.embedded.config import EmbeddedConfig
from specdec.embedded.corpus import Source, corpus
from specdec.embedded.rows import stream_rows


class EmbeddedData(TokenData):
    """The corpus that the embedded target was trained on: the same split by file and the same kind of rows, each of
    which starts with ``<s>``."""

    def documents(self, tokenizer: Any) -> tuple[list[Document], list[Document]]:
        """Rows of the training and of the held-out files."""
        if tokenizer.bos_token_id is None or tokenizer.eos_token_id is None:
            raise ValueError(
                "EmbeddedData is for targets whose tokenizer begins and ends texts (<s>, </s>), as the embedded one: "
                "choose --data TextData or ChatData"
            )
        files = corpus(EmbeddedConfig().seed)
        return self._rows(files.train, tokenizer), self._rows(files.held_out, tokenizer)

    def _rows(self, sources: list[Source], tokenizer: Any) -> list[Document]:
        rows_RT = stream_rows(tokenizer, [source.text for source in sources], self.seq_len - 1)  # and <s>
        return [Document(row_T, torch.ones_like(row_T, dtype=torch.bool)) for row_T in rows_RT]
