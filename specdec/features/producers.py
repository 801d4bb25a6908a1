"""The processes of streamed features: producers, the queue that hands them rows, and the tee that stores them.

Legend: R tokens of a row, T of a row with its padding.
"""

import asyncio
import contextlib
import heapq
import itertools
import logging
import os
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.features.contract import Contract
from specdec.features.runners import (
    Engine,
    EngineSetup,
)
from specdec.features.store import PackedRow, crc32, raw
from specdec.features.writer import SHARD_BYTES, CacheWriter
from specdec.utils.cluster import last_line
from specdec.utils.text import how_many
from specdec.utils.vllm import VllmEndedError

log = logging.getLogger(__name__)

NAMESPACE = "specdec"
# calls of a producer: it works at one while the states of the other are put into the store
MAX_IN_FLIGHT = 2
CALLS = 100_000  # rows that the queue is asked for at a time, at most
POLL = 1.0  # seconds
TRIES = 5  # at loading a target again


class Sent(NamedTuple):
    """A row's states on their way."""

    key: bytes
    crc32: int
    columns: list[Any]  # bytes of each, as arrays, which Ray hands over without a copy


class WantedRow(NamedTuple):
    """A row that a process waits for; the first in order is made first."""

    batch: int
    ticket: int  # a running number
    row: Any  # a PackedRow, or what else the producers take
    done: asyncio.Future[Any]


class Producer:
    """A copy of the target, in a separate process. It is loaded at the first call, and again after its death.

    Args:
        longest: tokens of the longest document's piece.
        folder: the folder that relative paths start from; None: Ray's.
    """

    def __init__(
        self, setup: EngineSetup, contract: Contract, longest: int, folder: str | None = None
    ) -> None:
        if folder is not None:
            os.chdir(folder)
        self.setup = setup
        self.contract = contract
        self.longest = longest
        self._lock = threading.Lock()
        self._open = contextlib.ExitStack()
        self._running: Engine | None = None

    def about(self) -> tuple[dict[str, Any], str]:
        """Return the target's identity, and what runs it."""
        with self._lock:
            engine = self._loaded()
        return engine.target.identity, engine.name

    def features_of(self, rows: Sequence[PackedRow]) -> list[Any]:
        """Return a receipt, which is small, and each row's states."""
        with self._lock:
            try:
                states = list(self._loaded().states(rows))
            except VllmEndedError as error:  # once: rows that end it again end the run
                log.warning("it starts again: %s", error)
                self._open.close()
                self._running = None
                states = list(self._loaded().states(rows))
        return [len(states), *(self.sent(row, *outputs) for row, *outputs in states)]

    def sent(self, row: PackedRow, aux_RNH: Tensor, final_RH: Tensor) -> Sent:
        """A row's states as they are sent."""
        columns = self.contract.encode(aux_RNH, final_RH)
        return Sent(row.key, crc32(*columns), list(map(raw, columns)))

    def _loaded(self) -> Engine:
        if self._running is None:
            target = self.setup.load()
            opening = self.setup.run(target, self.contract.layers, self.longest)
            self._running = self._open.enter_context(opening)
        return self._running


class RowQueue:
    """Which rows are wanted, and which producer works at which.

    Args:
        producers: their names.
        rows: that each takes at once.
        tee: the name of what stores them, too.
    """

    def __init__(
        self, contract: Contract, producers: Sequence[str], rows: int, tee: str | None
    ) -> None:
        self.contract = contract
        self.rows = rows
        self.tee = tee
        self.done = self.again = 0  # rows
        self._wanted: list[WantedRow] = []  # a heap
        self._in_flight = dict.fromkeys(producers, 0)
        self._work: set[asyncio.Task[None]] = set()
        self._tickets = itertools.count()

    async def about(self) -> Contract:
        """Return the contract of what is streamed."""
        return self.contract

    async def counts(self) -> dict[str, int]:
        """Return how many rows are done, were begun again, and wait."""
        return {"done": self.done, "again": self.again, "waiting": len(self._wanted)}

    async def features_of(self, batch: int, row: PackedRow) -> Any:
        """Wait for a row's states; return a reference to them, in a list so that Ray does not fetch them, or why not.

        Args:
            batch: its number in the process that asks: those of lower ones are done first.
        """
        done = self._want(batch, row)
        self._hand_out()
        return await done

    def _want(self, batch: int, row: Any) -> asyncio.Future[Any]:
        """Put a row among those that are wanted; return what becomes its answer."""
        done = asyncio.get_running_loop().create_future()
        heapq.heappush(self._wanted, WantedRow(batch, next(self._tickets), row, done))
        return done

    def _hand_out(self) -> None:
        """Hand the first rows to the producer that has least to do, until none has a free place."""
        while True:
            name = min(self._in_flight, key=self._in_flight.__getitem__)
            rows = [] if self._in_flight[name] >= MAX_IN_FLIGHT else self._next_rows()
            if not rows:
                return
            self._in_flight[name] += 1
            task = asyncio.create_task(self._make(name, rows))
            self._work.add(task)  # asyncio itself would forget it
            task.add_done_callback(self._work.discard)

    def _next_rows(self) -> list[WantedRow]:
        """Take the first rows that a producer is to make at once, without those that are no longer needed."""
        rows: list[WantedRow] = []
        while self._wanted and len(rows) < self.rows:
            row = heapq.heappop(self._wanted)
            if not row.done.done():
                rows.append(row)
        return rows

    async def _make(self, name: str, wanted: list[WantedRow]) -> None:
        """Have a producer make rows, and hand them out; nothing holds their states after that."""
        import ray

        producer = ray.get_actor(name, NAMESPACE)
        try:
            rows = [request.row for request in wanted]
            receipt, *sent = producer.features_of.options(num_returns=1 + len(rows)).remote(rows)
            self._note(wanted, await receipt)
            # before they are handed out: a slow disk stalls the producers, not the memory
            if self.tee:
                try:
                    await ray.get_actor(self.tee, NAMESPACE).store.remote(rows, sent)
                except ray.exceptions.RayActorError as error:
                    raise ValueError(f"the tee does not start again: {last_line(error)}") from error
            self.done += len(wanted)
            self._answer(wanted, [[reference] for reference in sent])
        except (ray.exceptions.RayTaskError, ValueError) as error:
            self._answer(wanted, [f"{name}: {last_line(error)}"] * len(wanted))
        except ray.exceptions.RayError:  # it starts again; meanwhile others take its rows
            for request in wanted:
                heapq.heappush(self._wanted, request)
            self.again += len(wanted)
            self._hand_out()
            await self._alive(producer)
        finally:
            self._in_flight[name] -= 1
            self._hand_out()

    def _note(self, wanted: Sequence[WantedRow], receipt: Any) -> None:
        """Keep of a producer's receipt what is needed later."""

    @staticmethod
    def _answer(wanted: list[WantedRow], answers: Sequence[Any]) -> None:
        for request, answer in zip(wanted, answers, strict=True):
            if not request.done.done():  # cancelled meanwhile
                request.done.set_result(answer)

    @staticmethod
    async def _alive(producer: Any) -> None:
        """Wait for a producer that has died; one that fails to load its target says so with its next row."""
        import ray

        failed = 0
        while failed < TRIES:
            try:
                await producer.about.remote()
                return
            except ray.exceptions.RayTaskError:  # as where its GPU is not free yet
                failed += 1
            except ray.exceptions.RayError:
                pass
            await asyncio.sleep(POLL)


class Tee:
    """Writes what is streamed as a cache."""

    def __init__(self, directory: str, contract: Contract) -> None:
        self._open = contextlib.ExitStack()
        self._writer = self._open.enter_context(
            CacheWriter.building(Path(directory), contract, SHARD_BYTES)
        )

    def known(self) -> int:
        """Return how many rows there are: it has started."""
        return len(self._writer.known)

    def store(self, rows: Sequence[PackedRow], sent: Sequence[Any]) -> None:
        """Write rows that are not written."""
        import ray

        contract = self._writer.contract
        for row, reference in zip(rows, sent, strict=True):
            if row.key not in self._writer.known:
                columns = contract.empty(row.tokens)
                unpack(contract, ray.get(reference), row, columns)
                self._writer.add_columns(row, tuple(columns))

    def finish(self, keys: set[bytes]) -> int:
        """Write what has gathered and, if no row of these is missing, the index; how many are missing."""
        missing = len(keys - self._writer.known)
        if missing:
            self._writer.flush()
        else:
            self._open.close()
        return missing


def unpack(contract: Contract, sent: Sent, row: PackedRow, columns_T: Sequence[Tensor]) -> None:
    """Write a row's states into the first R tokens, and the first boundaries.

    Raises:
        ValueError: they are another row's, or not what was sent.
    """
    crc = 0
    for column in sent.columns:
        crc = zlib.crc32(column, crc)
    if sent.key != row.key or crc != sent.crc32:
        raise ValueError(
            f"a row of {how_many(row.tokens, 'token')} was changed on its way from a producer"
        )
    for name, column, column_T in zip(contract.columns(), sent.columns, columns_T, strict=True):
        place = column_T[: row.tokens]
        if name.startswith("aux"):
            place = place[:, : len(contract.layers)]
        if place.numel():
            place = place.view(torch.uint8)
            place.numpy()[...] = column.reshape(place.shape)
