"""What a cache will take, before anything is written."""

import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from specdec.data import TokenData
from specdec.extraction.engines import Engine
from specdec.features.contract import Contract
from specdec.features.pieces import PackedRow, packed_rows

SECONDS, ROWS = 10.0, 32  # no row begins after so long, and at most so many are measured
SPARE = 1.01  # keys and headers


def rows_of(data: TokenData, first: int | None = None) -> list[PackedRow]:
    """The rows of training, or of it those drawn first, of validation and test, each once."""
    found: dict[bytes, PackedRow] = {}
    for split in (data.first_rows(first), data.splits.validation, data.splits.test):
        for row in packed_rows(split):
            if row.tokens:
                found.setdefault(row.key, row)
    return list(found.values())


class Plan(NamedTuple):
    """How much there is to store."""

    rows: int
    pieces: int
    tokens: int
    token_bytes: int
    shard_bytes: int
    free_bytes: int
    written_bytes: int  # of an earlier, unfinished run

    @classmethod
    def of(cls, rows: Sequence[PackedRow], contract: Contract, shard_bytes: int, directory: Path) -> "Plan":
        """For these rows in this directory, which need not exist."""
        there = directory.absolute()
        while not there.exists():
            there = there.parent
        written = sum(file.stat().st_size for file in directory.glob("shard-*.safetensors"))
        tokens, pieces = sum(row.tokens for row in rows), sum(len(row.spans) for row in rows)
        free = shutil.disk_usage(there).free
        return cls(len(rows), pieces, tokens, contract.token_bytes, shard_bytes, free, written)

    @property
    def bytes(self) -> int:
        """Of the whole cache."""
        return int(self.tokens * self.token_bytes * SPARE)

    @property
    def shards(self) -> int:
        """About how many."""
        return max(1, -(-self.tokens * self.token_bytes // self.shard_bytes))

    @property
    def missing_bytes(self) -> int:
        """What the disk lacks, if anything."""
        return max(0, self.bytes - self.written_bytes - self.free_bytes)


def tokens_per_second(engine: Engine, rows: Sequence[PackedRow]) -> float:
    """Measured on some rows behind the first, which warms up; from what an engine is asked to its last answer."""
    for _ in engine.states(rows[:1]):
        pass
    begin = time.perf_counter()

    def asked() -> Iterator[PackedRow]:
        for row in rows[1 : ROWS + 1] or rows:
            if time.perf_counter() - begin > SECONDS:
                return
            yield row

    tokens = sum(found.row.tokens for found in engine.states(asked()))
    return tokens / (time.perf_counter() - begin)
