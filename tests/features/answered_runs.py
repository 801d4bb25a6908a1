"""Conversations for the small chat target, and the ordinary way to train on them: regenerate first, and then fit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.answering.settings import AnswerSettings
from specdec.cli import main
from specdec.data import Batch, Document, TokenData
from specdec.data.chat import encode, read_conversations
from specdec.data.loader import PAD_DOCUMENT
from specdec.data.token_data import Splits
from specdec.features.store import each_row
from specdec.target import Target, TargetOutput
from specdec.target.rounding import compare_boundary, median_error, own_states
from tests.data.tiny import write_jsonl
from tests.engines.chats import LEARNT, SYSTEM, asked

ROW = 96
SETTINGS = AnswerSettings(max_new_tokens=32, temperature=2.0, seed=5)


def write_conversations(folder: Path, copies: int = 3) -> tuple[Path, Path]:
    """Files to train and to validate on: several turns, system prompts, rows that are skipped."""
    rows: list[dict[str, Any]] = []
    for copy in range(copies):
        for number, said in enumerate(LEARNT):
            first = [SYSTEM] if copy % 2 else []
            rows.append({"id": f"row-{copy}-{number}", "messages": [*first, *asked(said)]})
    rows.insert(2, {"id": "nobody", "messages": [{"role": "assistant", "content": "four"}]})
    validation = [row | {"id": f"val-{row['id']}"} for row in rows[1:6]]
    return write_jsonl(folder / "train.jsonl", rows), write_jsonl(folder / "val.jsonl", validation)


def regenerate(target: Path, data: Path, out: Path, settings: AnswerSettings = SETTINGS) -> Path:
    """The file that ``specdec regenerate`` writes."""
    argv = ["regenerate", "--target", str(target), "--data", str(data), "--out", str(out)]
    for name, value in vars(settings).items():
        argv += [] if value is None else [f"--{name}", str(value).lower()]
    assert main([*argv, "--batch_size", "3"]) == 0
    return out


class RegeneratedData(TokenData):
    """Training rows of one conversation each, in the order of the conversations that were answered; one that has no
    answer to train on is a row of padding."""

    def __init__(self, data: Path, own: Path, **more: Any) -> None:
        super().__init__(seq_len=ROW, **more)
        self.data = data
        self.own = own

    def packed(self, tokenizer: Any) -> Splits:
        written = {row.id: row for row in read_conversations(str(self.own))}
        rows = []
        for conversation in read_conversations(str(self.data)):
            documents = []
            if conversation.id in written:
                documents = list(encode([written[conversation.id]], tokenizer, ROW))
            rows.append(
                row_of(
                    [
                        Document(document.ids_T.long(), document.loss_mask_T)
                        for document in documents
                    ]
                )
            )
        columns = [torch.cat(column) for column in zip(*rows, strict=True)]
        batch = Batch(*columns)
        return Splits(batch, Batch(*(column[:1] for column in batch)))


def row_of(documents: Sequence[Document]) -> Batch:
    """One row of documents."""
    ids_1T = torch.zeros(1, ROW, dtype=torch.int64)
    mask_1T = torch.zeros(1, ROW, dtype=torch.bool)
    documents_1T = torch.full((1, ROW), PAD_DOCUMENT)
    start = 0
    for number, document in enumerate(documents):
        place = slice(start, start + len(document.ids_T))
        ids_1T[0, place] = document.ids_T
        mask_1T[0, place] = document.loss_mask_T
        documents_1T[0, place] = number
        start = place.stop
    return Batch(ids_1T, mask_1T, documents_1T)


def documents_of_batch(batch: Batch) -> list[tuple[list[int], list[bool]]]:
    """The documents of a batch, in a fixed order, with their loss masks."""
    documents = []
    for ids_T, mask_T, documents_T in zip(*batch, strict=True):
        for number in range(int(documents_T.max()) + 1):
            here_T = documents_T == number
            documents.append((ids_T[here_T].tolist(), mask_T[here_T].tolist()))
    return sorted(documents)


def check_states(
    target: Target, batch: Batch, states: TargetOutput, layers: Sequence[int], own: TargetOutput
) -> None:
    """Compare the states of a batch with ``own``, those of all boundaries by one pass over each row.

    Of a document's last token there need be none. What is allowed is what the model differs from itself by when it
    runs with its cache, four times.
    """
    *allowed, allowed_final, _ = own_states(target).allowed
    for row, (packed, states_TNH, final_TH) in enumerate(
        zip(each_row(batch), *states, strict=True)
    ):
        start = 0
        for ids_R in packed.pieces() if packed.tokens else ():
            place = slice(start, start + len(ids_R) - 1)
            start += len(ids_R)

            def at(
                state_BTNH: Tensor, boundary: int, place: slice = place, row: int = row
            ) -> Tensor:
                return state_BTNH[row, place, boundary]

            by_boundary = {b: [at(own.aux_BTNH, b)] for b in range(target.num_layers + 1)}
            for n, boundary in enumerate(layers):
                difference = compare_boundary(boundary, [states_TNH[place, n]], by_boundary)
                assert difference.fits(allowed[boundary]), (boundary, difference)
            assert median_error(final_TH[place], own.final_BTH[row, place]) <= allowed_final
