"""``specdec cache``: the target's features of a run's data, stored for training.

The arguments are those of specdec fit for model and data: specdec cache --config RUN.yaml --out DIR stores what
specdec fit --config RUN.yaml --model.features Cached --model.features.directory DIR reads. Killed or interrupted, the
same command goes on after the last whole shard. specdec cache plan, with the same arguments, writes nothing and says
what it would take; specdec cache verify DIR checks every byte.
"""

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from specdec.extraction.asked import Asked, boundaries, device_of, read
from specdec.extraction.engines import Engine, TransformersEngine
from specdec.extraction.plan import Plan, rows_of, tokens_per_second
from specdec.extraction.vllm.engine import VllmEngine
from specdec.features.contract import Contract
from specdec.features.pieces import PackedRow
from specdec.features.store import Store
from specdec.features.writer import CacheWriter
from specdec.nn.products import fast_products
from specdec.progress import progress
from specdec.target import Target

log = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """Run the command; status 1 if the disk cannot hold the cache.

    Raises:
        ValueError: an argument, the data or the target is wrong, or the cache cannot be written.
    """
    if argv and argv[0] == "verify":
        return _verify(argv[1:])
    planning = bool(argv) and argv[0] == "plan"
    asked = read(argv[planning:], "specdec cache plan" if planning else "specdec cache", __doc__ or "")
    target = _target(asked)
    asked.data.prepare(target.tokenizer)
    asked.data.check_vocabulary(target.vocab_size)
    first = asked.options.first_rows
    if first is not None and first >= len(asked.data.splits.train.ids_BT):
        first = None  # that is all of them
    rows = rows_of(asked.data, first)
    layers = boundaries(target, [asked.module.spec, *asked.options.drafters], asked.options.layers)
    directory, shard_bytes = Path(asked.options.out), int(asked.options.shard_mb * 1e6)
    with _engine(asked, target, layers, rows) as engine:
        contract = Contract.of(target, asked.data, layers, asked.options.dtype, engine.name, first)
        plan = Plan.of(rows, contract, shard_bytes, directory)
        if planning:
            _say(plan, contract, tokens_per_second(engine, rows))
        if plan.missing_bytes:
            sys.stderr.write(
                f"specdec cache: {directory}: the disk cannot hold it: {plan.bytes / 1e9:,.1f} GB are wanted, "
                f"{plan.free_bytes / 1e9:,.1f} GB are free; store fewer boundaries, --dtype bfloat16 or less data\n"
            )
            return 1
        return 0 if planning else _build(directory, contract, shard_bytes, engine, rows)


def _target(asked: Asked) -> Target:
    """On the device that runs it; where vLLM does, on the CPU, for tokenizer, norm and fingerprint."""
    if asked.options.engine == "vllm":
        return dataclasses.replace(asked.module.target_source, device_map=None).load()
    device = device_of(asked.options.device)
    return asked.module.target.to(device)


@contextlib.contextmanager
def _engine(asked: Asked, target: Target, layers: Sequence[int], rows: Sequence[PackedRow]) -> Iterator[Engine]:
    if asked.options.engine == "vllm":
        longest = max((end - start for row in rows for start, end in row.spans), default=1)
        source, options = asked.module.target_source, asked.options
        with VllmEngine.started(source, target, layers, longest, options.vllm, options.vllm_args) as engine:
            yield engine
        return
    with fast_products() as products:  # as in training
        yield TransformersEngine(target, layers, products)


def _build(directory: Path, contract: Contract, shard_bytes: int, engine: Engine, rows: Sequence[PackedRow]) -> int:
    with CacheWriter.building(directory, contract, shard_bytes) as writer:
        left = [row for row in rows if not writer.holds(row)]
        total = sum(row.tokens for row in rows)
        try:
            with progress("features", "tokens", total, total - sum(row.tokens for row in left)) as advance:
                for row, aux_MNH, final_MH in engine.states(left):
                    writer.add(row, aux_MNH, final_MH)
                    advance(row.tokens)
        except KeyboardInterrupt:
            log.info("%s: %d whole shards are kept; the same command goes on after them", directory, len(writer.shards))
            raise
    size = sum((directory / entry.file).stat().st_size for entry in writer.shards)
    log.info("%s: %s tokens in %d shards, %.2f GB", directory, f"{total:,}", len(writer.shards), size / 1e9)
    return 0


def _say(plan: Plan, contract: Contract, rate: float) -> None:
    states = f"boundaries {list(contract.layers)} and the final state, {contract.hidden_size} wide, {contract.dtype}"
    lines = {
        "rows": f"{plan.rows:,} of {plan.pieces:,} pieces",
        "tokens": f"{plan.tokens:,}",
        "states": states,
        "bytes per token": f"{plan.token_bytes:,}",
        "total": f"{plan.bytes / 1e9:,.3f} GB in {plan.shards} shards of {plan.shard_bytes / 1e6:,.0f} MB",
        "free on the disk": f"{plan.free_bytes / 1e9:,.1f} GB",
        "already written": f"{plan.written_bytes / 1e9:,.3f} GB",
        "hours": f"{plan.tokens / rate / 3600:,.2f} at {rate:,.0f} tokens/s, measured with {contract.engine}",
    }
    table = Table(show_header=False, box=None)
    for name, value in lines.items():
        table.add_row(name, value)
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150).print(table)


def _verify(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        raise ValueError("specdec cache verify takes one directory: specdec cache verify DIR")
    store = Store(Path(argv[0]), {})
    store.verify()
    tokens = sum(entry.tokens for entry in store.index.shards)
    log.info("%s: %d shards, %s tokens: every byte as written", argv[0], len(store.index.shards), f"{tokens:,}")
    return 0
