"""Features of answers that the target writes while the drafter trains: producers answer the data's conversations, and
hand over the states that they computed for it.

Legend: B rows of a batch, T tokens of a row, R tokens of a document.
"""

import dataclasses
import hashlib
import itertools
import json
import logging
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from specdec.answering.settings import AnswerSettings
from specdec.data import Batch, TokenData, UnansweredData
from specdec.data.layouts import ChatConversation
from specdec.features.answering_actors import (
    AnsweringProducer,
    AnsweringSetup,
    AnswerQueue,
    DueRow,
    WrittenRow,
)
from specdec.features.producers import MAX_IN_FLIGHT, Sent, unpack
from specdec.features.producing import ProducedFeatures
from specdec.features.source import FeatureSource, row_keys, spot_check
from specdec.features.store import PackedRow, each_row
from specdec.features.streamed import StreamedSource
from specdec.target import Target, TargetSource
from specdec.utils.numbers import Side
from specdec.utils.progress import progress
from specdec.utils.text import how_many

log = logging.getLogger(__name__)

Calls = deque[tuple[Future[tuple[Batch, list[Tensor]]], Any]]


@dataclass(frozen=True, kw_only=True)
class Answered(ProducedFeatures, AnswerSettings):
    """The target answers the conversations of ``data=UnansweredData`` in separate processes, a few batches ahead, and
    hands over the states that it computed for it.

    The tokens are those of ``specdec regenerate`` with the same settings. They depend neither on the producer nor on
    the moment. In a second epoch nothing is answered again.

    Args:
        batch_size: conversations that a producer answers at a time.
    """

    answers: ClassVar[bool] = True
    batch_size: Side = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sampling()  # refuses what cannot be

    @property
    def rows_at_once(self) -> int:
        return self.batch_size

    def setup_of(self, source: TargetSource, data: TokenData) -> AnsweringSetup:
        """What a producer runs the target with, and how it answers this data."""
        assert isinstance(data, UnansweredData)
        return AnsweringSetup(
            "transformers", source, 1, {}, self.settings(), self.batch_size, data.seq_len, data.turns, data.broken
        )  # fmt: skip

    def settings(self) -> AnswerSettings:
        """What the answers depend on."""
        names = [field.name for field in dataclasses.fields(AnswerSettings)]
        return AnswerSettings(**{name: getattr(self, name) for name in names})

    def open(
        self, target: Target, data: TokenData, layers: Sequence[int], final_norm: bool
    ) -> FeatureSource:
        """Start the producers, answer the validation conversations, and compare states with the target where it is
        whole.

        Raises:
            ValueError: as of :meth:`specdec.features.Streamed.open`; or no validation conversation has an answer.
        """
        self.check_data(data)
        return AnsweredSource(self, target, data, layers, final_norm)


class AnsweredSource(StreamedSource):
    """Asks the queue for answers ahead, and packs them into batches; ValueError as :meth:`Answered.open`."""

    producer_kind = AnsweringProducer
    queue_kind = AnswerQueue
    features: Answered
    data: UnansweredData

    def __init__(
        self,
        features: Answered,
        target: Target,
        data: TokenData,
        layers: Sequence[int],
        final_norm: bool,
    ) -> None:
        settings = json.dumps(dataclasses.asdict(features.settings()), sort_keys=True)
        self.settings_digest = hashlib.sha256(settings.encode()).hexdigest()[:16]
        # by the keys of their conversations, batches that are to come
        self._coming: defaultdict[tuple[bytes, ...], Calls] = defaultdict(deque)
        self._first_states: tuple[PackedRow, Sent] | None = None  # of an answer
        super().__init__(features, target, data, layers, final_norm)

    # what the loader of training conversations asks for

    def ask(self, rows: Sequence[ChatConversation]) -> None:
        """A batch of these conversations comes: have them answered, and have the thread pack what comes."""
        self._start_again()
        due = list(map(DueRow.of, rows))
        number = next(self._batches)
        call = self._ask_for_answers(number, due) if due else None
        packing = self._thread.submit(self._pack, number, due, call)
        self._coming[keys_of(due)].append((packing, call))

    def answered(self, rows: Sequence[ChatConversation]) -> Batch:
        """Wait for the batch of these conversations that was asked for first, and return it."""
        keys = keys_of(map(DueRow.of, rows))
        packing, _ = self._coming[keys].popleft()
        self._forget(keys)
        batch, columns = packing.result()
        self._prefetched[row_keys(batch)] = ready(columns)
        return batch

    def drop(self, rows: Sequence[ChatConversation]) -> None:
        """The batch of these conversations that was asked for last does not come."""
        keys = keys_of(map(DueRow.of, rows))
        packing, call = self._coming[keys].pop()
        self._forget(keys)
        packing.cancel()
        if call is not None:
            self._ray.cancel(call, recursive=False)

    def _forget(self, keys: tuple[bytes, ...]) -> None:
        """Keep nothing of a batch that is asked for no more: each epoch has other batches."""
        if not self._coming[keys]:
            del self._coming[keys]

    def _ask_for_answers(self, number: int, due: Sequence[DueRow], states: bool = True) -> Any:
        return self._queue.answers_of.remote(number, due, states)

    def _answers(
        self, number: int, due: Sequence[DueRow], call: Any, states: bool = True
    ) -> list[tuple[WrittenRow, list[Sent]]]:
        """Return what was written of conversations, and the states of each document."""

        def fetch(answers: list[tuple[WrittenRow, list[list[Any]]]]) -> Any:
            return [
                (row, list(flattened(self._wait(reference) for (reference,) in references)))
                for row, references in answers
            ]

        answers: list[tuple[WrittenRow, list[Sent]]] = self._result(
            call, lambda: self._ask_for_answers(number, due, states), fetch
        )
        return answers

    def _pack(self, number: int, due: Sequence[DueRow], call: Any) -> tuple[Batch, list[Tensor]]:
        """Return the rows of a batch of conversations, and their columns."""
        documents = []
        sent: dict[bytes, Sent] = {}
        for row, sent_documents in self._answers(number, due, call) if due else ():
            documents += row.documents()
            sent |= {states.key: states for states in sent_documents}
        batch = self.data.rows_of(documents).int64()
        columns = self.empty_columns(batch)
        for n, packed in enumerate(each_row(batch)):
            self._place(packed, sent, [column[n] for column in columns])
        return batch, columns

    def _place(
        self, row: PackedRow, sent: Mapping[bytes, Sent], columns_T: Sequence[Tensor]
    ) -> None:
        """Write the states of a row's documents to where these stand in it."""
        start = 0
        for ids_R in row.pieces() if row.tokens else ():
            document = PackedRow.of_document(ids_R)
            place = [column_T[start:] for column_T in columns_T]
            unpack(self.contract, sent[document.key], document, place)
            start += document.tokens

    # validation

    def _begin(self) -> None:
        """Answer the validation conversations, which every process validates on from now on."""
        documents = []
        rows = list(map(DueRow.of, self.data.validation_conversations))
        with progress("answering validation", "conversation", len(rows), 0) as advance:
            for row, sent in self._validation_answers(rows):
                documents += row.documents()
                if sent and self._first_states is None:
                    document = PackedRow.of_document(row.documents()[0].ids_T)
                    self._first_states = document, sent[0]
                advance(1)
        self._log_written()
        self.data.answered_validation(documents)

    def _validation_answers(
        self, rows: Sequence[DueRow]
    ) -> Iterator[tuple[WrittenRow, list[Sent]]]:
        """Answer conversations, a few calls ahead; only those of the first call come with their states."""
        size = self.features.batch_size
        calls: deque[tuple[int, Sequence[DueRow], Any, bool]] = deque()
        groups = (rows[start : start + size] for start in range(0, len(rows), size))
        while True:
            room = MAX_IN_FLIGHT * self.features.producers - len(calls)
            for group in itertools.islice(groups, room):
                number = next(self._batches)
                states = group[0] is rows[0]
                calls.append((number, group, self._ask_for_answers(number, group, states), states))
            if not calls:
                return
            yield from self._answers(*calls.popleft())

    def _check(self) -> None:
        """Compare with the target the states of a row that is read, and of one that was written."""
        super()._check()
        if self._first_states is None:
            return
        row, sent = self._first_states
        columns = self.contract.empty(row.tokens)
        unpack(self.contract, sent, row, columns)
        spot_check(self.contract, self.where, columns, self.target, row)

    # beginning and end

    def _rows_to_make(self) -> tuple[int, set[bytes]]:
        """Return the longest document's tokens; no row is stored."""
        return self.data.seq_len, set()

    def close(self, failed: bool = False) -> None:
        """End producers, queue and what was asked for; a new batch starts them again."""
        super().close(failed)
        self._coming.clear()

    def _log_totals(self) -> None:
        super()._log_totals()
        self._log_written()

    def _log_written(self) -> None:
        """Log how much was written, and why conversations have no answer to train on."""
        rows, tokens, reasons = self._ray.get(self._queue.written.remote())
        log.info("answered %s in %s", how_many(rows, "conversation"), how_many(tokens, "token"))
        for reason, count in reasons.items():
            log.warning("left out %s: %s", how_many(count, "conversation"), reason)


def keys_of(rows: Iterator[DueRow] | Sequence[DueRow]) -> tuple[bytes, ...]:
    """The keys of conversations."""
    return tuple(row.key for row in rows)


def flattened(sent: Iterator[Sent | list[Sent]]) -> Iterator[Sent]:
    """The states of documents, which come one by one or as lists."""
    for states in sent:
        yield from states if isinstance(states, list) else [states]


def ready(columns: list[Tensor]) -> Future[list[Tensor]]:
    """What is there already, as something to wait for."""
    future = Future[list[Tensor]]()
    future.set_result(columns)
    return future
