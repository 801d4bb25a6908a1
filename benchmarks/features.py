"""Reading cached features as training does, beside the disk's own speed and beside hashing whole shards. Linux only.

A cache of random states at an 8B target's width is written, dropped from the page cache where the system allows, and
read row by row in random order by one thread: a rank's first epoch. In turns with it, and of the same bytes: the files
read from end to end, and the same rows after a SHA-256 of every shard, as a cache that checks shards would.

``python benchmarks/features.py --out FILE.md``
"""

import argparse
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# the folder of `benchmarks`, which is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import harness
from specdec.features.contract import Contract
from specdec.features.store import FeatureStore, PackedRow
from specdec.features.writer import CacheWriter

ROW, LAYERS, ROUNDS = 2048, (2, 16, 29), 3
WANTED = 20_000  # tokens a second of a rank


def write(
    directory: Path, tokens: int, hidden: int, shard_bytes: int, dtype: str
) -> tuple[list[PackedRow], float]:
    """A cache of rows of :data:`ROW` tokens; the rows, and the seconds that it took."""
    contract = Contract(
        layers=LAYERS,
        dtype=dtype,
        target_dtype="bfloat16",
        hidden_size=hidden,
        target={},
        data={},
        engine="random",
    )
    draw, rows = torch.Generator().manual_seed(0), []
    aux_RNH = torch.randn(ROW, len(LAYERS), hidden, generator=draw).bfloat16()
    begin = time.perf_counter()
    with CacheWriter.building(directory, contract, shard_bytes) as writer:
        for number in range(tokens // ROW):
            row = PackedRow(
                torch.full((ROW,), number),
                torch.zeros(ROW, dtype=torch.int64),
                number.to_bytes(16, "big"),
            )
            writer.add(row, aux_RNH, aux_RNH[:, number % len(LAYERS)])
            rows.append(row)
    return rows, time.perf_counter() - begin


def dropped(directory: Path) -> None:
    """Ask the system to forget what it keeps of the files; it forgets pages that are on the disk alone."""
    for path in directory.glob("shard-*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def end_to_end(directory: Path) -> None:
    """Every byte, and nothing made of it."""
    buffer = bytearray(2**24)
    for path in sorted(directory.glob("shard-*")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def rows_of(directory: Path, rows: list[PackedRow], hashed: bool) -> None:
    """Every row, in random order, each compared with its checksum; ``hashed``: every shard's SHA-256 before."""
    store = FeatureStore(directory, {})
    if hashed:
        for path in sorted(directory.glob("shard-*")):
            with path.open("rb") as file:
                hashlib.file_digest(file, "sha256")
    found = [
        torch.empty(ROW, *column.shape, dtype=column.dtype)
        for column in store.contract.columns().values()
    ]
    for number in torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist():
        store.read(rows[number], range(len(LAYERS)), *found)


def measure(tokens: int, hidden: int, shard_bytes: int, folder: Path, dtype: str) -> dict[str, Any]:
    """Tokens a second of each way, round by round, cold and warm; and CPU seconds for a million tokens."""
    cache = folder / dtype
    rows, seconds = write(cache, tokens, hidden, shard_bytes, dtype)
    acts: dict[str, Callable[[], None]] = {
        "the files, end to end": lambda: end_to_end(cache),
        "rows with their CRC-32": lambda: rows_of(cache, rows, False),
        "the same behind a SHA-256 of every shard": lambda: rows_of(cache, rows, True),
    }
    counted = len(rows) * ROW
    found: dict[str, Any] = {name: {"cold": [], "warm": [], "cpu": []} for name in acts}
    for _ in range(ROUNDS):
        for name, act in acts.items():
            dropped(cache)
            for when in ("cold", "warm"):
                begin = time.process_time()
                _, timed = harness.timed(act)
                found[name][when].append(counted / timed["seconds"])
                found[name]["cpu"] += (
                    [(time.process_time() - begin) / counted * 1e6] if when == "warm" else []
                )
        harness.tell("a round is done")
    size = sum(path.stat().st_size for path in cache.glob("shard-*"))
    return {
        "read": found,
        "bytes_a_token": size / counted,
        "written": counted / seconds,
        "tokens": counted,
    }


def main(argv: list[str]) -> int:
    """Measure, print, and keep; the exit status is 1 if rows are read neither at the rate wanted nor at the disk's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=int, default=65_536, help="of the cache, at 32 KiB each (65536)"
    )
    parser.add_argument("--hidden", type=int, default=4096, help="the target's width (4096)")
    parser.add_argument("--shard_bytes", type=int, default=2**29, help="of a shard (512 MiB)")
    parser.add_argument(
        "--folder",
        type=Path,
        help="on the disk that is meant; by default the system's temporary one",
    )
    parser.add_argument(
        "--out", type=Path, help="a report, .md; raw figures go to the .json beside it"
    )
    parser.add_argument("--force", action="store_true", help="write over one that is there")
    options = parser.parse_args(argv)
    harness.check_out(options.out, options.force)
    torch.set_num_threads(1)
    about = harness.machine(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        given = options.tokens, options.hidden, options.shard_bytes, Path(folder)
        found, small = (measure(*given, dtype) for dtype in ("bfloat16", "float8_e4m3fn"))
    best = {
        name: {when: max(each[when]) for when in ("cold", "warm")}
        for name, each in found["read"].items()
    }
    disk, ours, hashed = best.values()
    lines = [
        "# Cached features, read", "",
        f"{found['tokens']:,} tokens at hidden {options.hidden}, {len(LAYERS)} boundaries and the final state in "
        f"bfloat16, {found['bytes_a_token']:,.0f} bytes a token, one thread; the best of {ROUNDS} rounds in turns. "
        "Cold: the page cache was asked to forget the files. Beside a SHA-256 of every shard before its first row, an "
        f"epoch's reading takes {hashed['warm'] / ours['warm']:.2f} of the time (warm).", "",
        *harness.conditions(about, {"torch": torch.__version__}), "",
        *harness.table(
            ("read", "cold, tokens/s", "warm, tokens/s", "CPU s for 1M tokens"),
            [(name, f"{best[name]['cold']:,.0f}", f"{best[name]['warm']:,.0f}", f"{min(each['cpu']):.0f}")
             for name, each in found["read"].items()],
        ), "",
        f"Written at {found['written']:,.0f} tokens/s, checksums included.", "",
        f"In float8_e4m3fn with a scale for every token's state: {small['bytes_a_token']:,.0f} bytes a token; rows "
        f"with their CRC-32 read at {max(small['read']['rows with their CRC-32']['cold']):,.0f} tokens/s cold, "
        f"{max(small['read']['rows with their CRC-32']['warm']):,.0f} warm; written at {small['written']:,.0f}.",
    ]  # fmt: skip
    harness.keep(options.out, lines, found | {"float8": small, "about": about})
    return 0 if min(WANTED, 0.9 * disk["cold"]) <= ours["cold"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
