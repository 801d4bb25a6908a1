"""The processes of answered features: producers that write answers, and the queue that keeps what was written.

Legend: R tokens of a document.
"""

import asyncio
import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from specdec.answering.settings import AnswerSettings
from specdec.answering.training_rows import AnsweredRow, TrainingRows
from specdec.data.layouts import ChatConversation
from specdec.data.loader import Document
from specdec.data.turns import Turns
from specdec.features.producers import Producer, RowQueue, WantedRow
from specdec.features.runners import EngineSetup
from specdec.features.store import PackedRow


class DueRow(NamedTuple):
    """A conversation that is to be answered."""

    conversation: ChatConversation
    key: bytes  # a hash of its id and all that is said in it

    @classmethod
    def of(cls, row: ChatConversation) -> Self:
        """The row of a conversation."""
        content = json.dumps([row.id, row.messages, row.tools], sort_keys=True)
        return cls(row, hashlib.blake2b(content.encode(), digest_size=16).digest())


class WrittenRow(NamedTuple):
    """A conversation's documents: five bytes a token, of which a second epoch needs nothing else."""

    ids: list[np.ndarray]  # int32, (R,) each
    loss_masks: list[np.ndarray]  # bool, (R,) each
    left_out: str | None  # why there is none

    @classmethod
    def of(cls, row: AnsweredRow) -> Self:
        """What was written of an answered row."""
        ids = [document.ids_T.int().numpy() for document in row.documents]
        loss_masks = [document.loss_mask_T.numpy() for document in row.documents]
        return cls(ids, loss_masks, row.left_out)

    def documents(self) -> list[Document]:
        """The documents, int64 and bool."""
        return [
            Document(torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(mask.copy()))
            for ids, mask in zip(self.ids, self.loss_masks, strict=True)
        ]


@dataclass(frozen=True)
class AnsweringSetup(EngineSetup):
    """What runs a target that answers conversations, too.

    Args:
        settings: what its answers depend on.
        batch: prompts at a time.
        seq_len: tokens of a document at most.
        turns: how the turns of a conversation are put into documents.
        broken: whether a row that cannot be trained on is an error, or is left out.
    """

    settings: AnswerSettings
    batch: int
    seq_len: int
    turns: Turns
    broken: str


class AnsweringProducer(Producer):
    """A copy of the target that takes conversations to answer, and rows whose tokens are known."""

    setup: AnsweringSetup

    def features_of(self, rows: Sequence[Any]) -> list[Any]:
        """Return a receipt, which is small, and each row's states: of a conversation, those of each document.

        The receipt of conversations has what was written.
        """
        if isinstance(rows[0], PackedRow):
            return super().features_of(rows)
        with self._lock:
            answered = self._training_rows().rows([row.conversation for row in rows])
        sent = [
            [
                self.sent(PackedRow.of_document(document.ids_T), *states)
                for document, states in zip(row.documents, row.states, strict=True)
            ]
            for row in answered
        ]
        return [list(map(WrittenRow.of, answered)), *sent]

    def _training_rows(self) -> TrainingRows:
        setup = self.setup
        return TrainingRows(
            self._loaded().target, setup.settings, setup.batch, self.contract.layers, setup.seq_len, setup.turns,
            setup.broken,
        )  # fmt: skip


class AnswerQueue(RowQueue):
    """Which conversations and rows are wanted, and what was written; ``rows``: conversations that a producer takes at
    once. Of rows whose tokens are known it takes one, as :class:`specdec.features.OnTheFly` does with ``rows=1``."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._written: dict[bytes, WrittenRow] = {}
        # of conversations that are being answered, or wait for it
        self._due: dict[bytes, asyncio.Future[Any]] = {}

    async def written(self) -> tuple[int, int, dict[str, int]]:
        """Return how many conversations have answers, their tokens, and how many have none, by the reason."""
        rows = self._written.values()
        tokens = sum(len(ids) for row in rows for ids in row.ids)
        reasons = Counter(row.left_out for row in rows if row.left_out is not None)
        return len(rows) - reasons.total(), tokens, dict(reasons.most_common())

    async def answers_of(self, batch: int, rows: Sequence[DueRow], with_states: bool) -> Any:
        """Wait for the answers to conversations; return what was written of each and references to its states, or why
        not. What is written already is not answered again: one pass gives the states of each document.

        Args:
            batch: as of :meth:`features_of`.
            with_states: without, there are no references.
        """
        wanted: list[list[asyncio.Future[Any]]] = []
        for row in rows:
            if row.key not in self._written:
                wanted.append([self._answer_due(batch, row)])
            elif with_states:
                documents = self._written[row.key].documents()
                known = [PackedRow.of_document(document.ids_T) for document in documents]
                wanted.append([self._want(batch, packed) for packed in known])
            else:
                wanted.append([])
        self._hand_out()
        answers = []
        try:
            for row, futures in zip(rows, wanted, strict=True):
                references = [await done for done in futures]
                if wrong := [answer for answer in references if isinstance(answer, str)]:
                    return wrong[0]
                answers.append((self._written[row.key], references if with_states else []))
            return answers
        finally:  # also where nobody waits any more
            for done in (done for futures in wanted for done in futures):
                done.cancel()

    def _answer_due(self, batch: int, row: DueRow) -> asyncio.Future[Any]:
        """Put a conversation among those that are wanted, once for all calls that ask for it at a time."""
        under_way = self._due.get(row.key)
        if under_way is not None and not under_way.done():
            return asyncio.shield(under_way)
        self._due[row.key] = self._want(batch, row)
        return self._due[row.key]

    def _next_rows(self) -> list[WantedRow]:
        """Take the first rows: conversations, as many as are answered at once, or a row whose tokens are known."""
        rows: list[WantedRow] = []
        while self._wanted:
            first = self._wanted[0]
            if not first.done.done():
                is_due = isinstance(first.row, DueRow)
                is_other = bool(rows) and is_due != isinstance(rows[0].row, DueRow)
                if is_other or len(rows) >= (self.rows if is_due else 1):
                    break
                rows.append(first)
            heapq.heappop(self._wanted)
        return rows

    def _note(self, wanted: Sequence[WantedRow], receipt: Any) -> None:
        """Keep what was written."""
        if not isinstance(receipt, list):
            return
        for request, row in zip(wanted, receipt, strict=True):
            self._written[request.row.key] = row
            self._due.pop(request.row.key, None)
