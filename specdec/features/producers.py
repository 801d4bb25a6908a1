"""The processes of streamed features: producers, the ledger that lends them rows, and the tee that stores them.

Legend: R tokens of a row, T of a row with its padding.
"""

import asyncio
import contextlib
import heapq
import itertools
import logging
import threading
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.features.runners import Engine, EngineDeadError, EngineName, loaded, running
from specdec.features.store import Contract, PackedRow, crc32, raw
from specdec.features.writer import SHARD_BYTES, CacheWriter
from specdec.target import TargetSource
from specdec.utils.cluster import last_line
from specdec.utils.text import how_many

log = logging.getLogger(__name__)

NAMESPACE = "specdec"
LEASES = 2  # of a producer: it works at one while the states of the other are put into the store
CALLS = 100_000  # rows that the ledger is asked for at a time, at most
POLL = 1.0  # seconds
TRIES = 5  # at loading a target again


class Sent(NamedTuple):
    """A row's states on their way."""

    key: bytes
    crc32: int
    columns: list[Any]  # bytes of each, as arrays, which Ray hands over without a copy


# the batch's number, a running one, and who waits
Wanted = tuple[int, int, PackedRow, asyncio.Future[Any]]


class Producer:
    """A copy of the target, in a process of its own. It is loaded at the first call, and again after its death."""

    def __init__(
        self, engine: EngineName, source: TargetSource, contract: Contract, longest: int, rows: int,
        more: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.engine = engine
        self.source = source
        self.contract = contract
        self._given = longest, rows, more  # of :func:`running`
        self._lock = threading.Lock()
        self._open = contextlib.ExitStack()
        self._running: Engine | None = None

    def about(self) -> tuple[dict[str, Any], str]:
        """The target's identity, and what runs it."""
        with self._lock:
            engine = self._loaded()
        return engine.target.identity, engine.name

    def features_of(self, rows: Sequence[PackedRow]) -> list[Any]:
        """A receipt, which is small, and each row's states."""
        with self._lock:
            try:
                states = list(self._loaded().states(rows))
            except EngineDeadError as error:  # once: rows that end it again end the run
                log.warning("it starts again: %s", error)
                self._open.close()
                self._running = None
                states = list(self._loaded().states(rows))
        sent: list[Any] = [len(states)]
        for row, *found in states:
            columns = self.contract.encode(*found)
            sent.append(Sent(row.key, crc32(*columns), list(map(raw, columns))))
        return sent

    def _loaded(self) -> Engine:
        if self._running is None:
            target = loaded(self.engine, self.source)
            opening = running(self.engine, self.source, target, self.contract.layers, *self._given)
            self._running = self._open.enter_context(opening)
        return self._running


class Ledger:
    """Which rows are wanted, and which producer works at which.

    Args:
        producers: names of theirs.
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
        self._wanted: list[Wanted] = []  # a heap
        self._leases = dict.fromkeys(producers, 0)
        self._work: set[asyncio.Task[None]] = set()
        self._tickets = itertools.count()

    async def about(self) -> Contract:
        """Of what is streamed."""
        return self.contract

    async def counts(self) -> dict[str, int]:
        """Rows that are done, that were begun again, and that wait."""
        return {"done": self.done, "again": self.again, "waiting": len(self._wanted)}

    async def features_of(self, batch: int, row: PackedRow) -> Any:
        """A reference to a row's states, in a list so that Ray does not fetch them, once they are there; or why not.

        Args:
            batch: its number in the process that asks: those of lower ones are done first.
        """
        done = asyncio.get_running_loop().create_future()
        heapq.heappush(self._wanted, (batch, next(self._tickets), row, done))
        self._lend()
        return await done

    def _lend(self) -> None:
        """The first rows to the producer that has least to do, as long as one has nothing behind what it works at."""
        while self._leases[name := min(self._leases, key=self._leases.__getitem__)] < LEASES:
            lease: list[Wanted] = []
            while self._wanted and len(lease) < self.rows:
                # it is where who asked has forgotten it
                if not (one := heapq.heappop(self._wanted))[3].done():
                    lease.append(one)
            if not lease:
                return
            self._leases[name] += 1
            task = asyncio.create_task(self._make(name, lease))
            self._work.add(task)  # asyncio itself would forget it
            task.add_done_callback(self._work.discard)

    async def _make(self, name: str, lease: list[Wanted]) -> None:
        """Have a producer make rows, and hand them out; nothing holds their states after that."""
        import ray

        producer = ray.get_actor(name, NAMESPACE)
        try:
            rows = [row for _, _, row, _ in lease]
            receipt, *sent = producer.features_of.options(num_returns=1 + len(rows)).remote(rows)
            await receipt
            # before they are handed out: a slow disk stalls the producers, not the memory
            if self.tee:
                try:
                    await ray.get_actor(self.tee, NAMESPACE).store.remote(rows, sent)
                except ray.exceptions.RayActorError as error:
                    raise ValueError(f"the tee does not start again: {last_line(error)}") from error
            self.done += len(lease)
            self._answer(lease, [[one] for one in sent])
        except (ray.exceptions.RayTaskError, ValueError) as error:
            self._answer(lease, [f"{name}: {last_line(error)}"] * len(lease))
        except ray.exceptions.RayError:  # it starts again; meanwhile others take its rows
            for one in lease:
                heapq.heappush(self._wanted, one)
            self.again += len(lease)
            self._lend()
            await self._alive(producer)
        finally:
            self._leases[name] -= 1
            self._lend()

    @staticmethod
    def _answer(lease: list[Wanted], answers: Sequence[Any]) -> None:
        for (_, _, _, done), answer in zip(lease, answers, strict=True):
            if not done.done():  # forgotten meanwhile
                done.set_result(answer)

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
        """How many rows there are: it has started."""
        return len(self._writer.known)

    def store(self, rows: Sequence[PackedRow], sent: Sequence[Any]) -> None:
        """Write rows that are not written."""
        import ray

        contract = self._writer.contract
        for row, one in zip(rows, sent, strict=True):
            if row.key not in self._writer.known:
                unpack(contract, ray.get(one), row, columns := contract.empty(row.tokens))
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
    """Into the first R tokens, and the first boundaries; ValueError if they are another row's, or not what was sent."""
    crc = 0
    for column in sent.columns:
        crc = zlib.crc32(column, crc)
    if sent.key != row.key or crc != sent.crc32:
        raise ValueError(
            f"a row of {how_many(row.tokens, 'token')} was changed on its way from a producer"
        )
    for name, column, there in zip(contract.columns(), sent.columns, columns_T, strict=True):
        place = (
            there[: row.tokens, : len(contract.layers)]
            if name.startswith("aux")
            else there[: row.tokens]
        )
        if place.numel():
            place = place.view(torch.uint8)
            place.numpy()[...] = column.reshape(place.shape)
