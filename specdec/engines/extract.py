"""``specdec cache``: the target's features of a run's data, stored for training.

The options are those of specdec fit and a few more: specdec cache --config RUN.yaml --out DIR stores what
specdec fit --config RUN.yaml --model.features Cached --model.features.directory DIR reads. Killed or interrupted,
the same command resumes after the last complete shard.

Example: specdec cache --config RUN.yaml --out features
"""

import argparse
import itertools
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdec.commands.fit import Configured, configured
from specdec.commands.parser import OwnOptions, fit_options
from specdec.data import Batch, TokenData
from specdec.features.contract import DTYPES, Contract
from specdec.features.runners import EngineSetup
from specdec.features.source import stored_boundaries
from specdec.features.store import PackedRow, each_row
from specdec.features.writer import SHARD_BYTES, CacheWriter, check_beside, merge, part_folder
from specdec.training.building import config_for
from specdec.training.module import DrafterModule
from specdec.training.run_directory import RunDirectory
from specdec.utils.progress import progress
from specdec.utils.trust import load_yaml

log = logging.getLogger(__name__)

SPARE = 1.01  # keys and headers


def cache(argv: list[str]) -> int:
    """Run the command.

    Raises:
        ValueError: an argument, the data or the target is wrong, or the cache cannot be written.
    """
    options, model, data = parse_options(argv)
    if model.target_source.parts and options.engine != "vllm":
        raise ValueError(
            "target.parts: specdec cache runs the target's layers: set it to false, or take --engine vllm"
        )
    setup = EngineSetup(options.engine, model.target_source, options.rows, options.vllm_args)
    target = setup.load()
    data.prepare(target.tokenizer)
    data.check_vocabulary(target.vocab_size)
    first = _fewer(options.first_rows, data.splits.train)
    first_val = _fewer(options.first_val_rows, data.splits.validation)
    number, parts = options.part
    tokens_by_key = {}
    longest = 0
    for row in stored_rows(data, first, first_val, number, parts):
        tokens_by_key[row.key] = row.tokens
        longest = max([longest, *map(len, row.pieces())])
    if not tokens_by_key:
        raise ValueError(
            f"--part {number + 1}/{parts}: there are no more than {number} rows: make fewer parts"
        )
    # Every boundary that the design reads. The final state is none, and is always stored.
    config = config_for(model.spec, target)
    tapped = stored_boundaries(target, config.aux_layers, config.fusion.final_norm)
    layers = sorted({*tapped, *options.layers})
    directory = Path(options.out)
    folder = part_folder(number, parts)
    with setup.run(target, layers, longest) as engine:
        contract = Contract.of(target, data, layers, options.dtype, engine.name, first, first_val)
        check_beside(directory, folder, contract)
        sizes = _check_space(directory, folder, sum(tokens_by_key.values()), contract)
        boundaries_text = list(contract.layers)
        log.info("%s: boundaries %s and the final state: %s", directory, boundaries_text, sizes)
        rows = stored_rows(data, first, first_val, number, parts)
        _write_rows(directory / folder, contract, rows, tokens_by_key, engine)
    if folder != ".":
        missing = merge(directory, [part_folder(n, parts) for n in range(parts)])
        state = f"parts still to come: {', '.join(missing)}" if missing else "all parts are there"
        log.info("%s: %s", directory, state)
    return 0


def _fewer(count: int | None, rows: Batch) -> int | None:
    """Return the count of rows to store, None for all: whatever count was given, a cache of all has one contract."""
    return None if count is None or count >= len(rows.ids_BT) else count


def _check_space(directory: Path, folder: str, tokens: int, contract: Contract) -> str:
    """Return the sizes in words; ValueError if the disk cannot hold the cache."""
    size = int(tokens * contract.token_bytes * SPARE)
    shards = (directory / folder).glob("shard-*.safetensors")
    written = sum(file.stat().st_size for file in shards)
    parents = (directory, *directory.absolute().parents)
    free = shutil.disk_usage(next(parent for parent in parents if parent.exists())).free
    sizes = f"{size / 1e9:,.1f} GB for {tokens:,} tokens, {written / 1e9:,.1f} written, {free / 1e9:,.1f} free"
    if size > written + free:
        raise ValueError(
            f"{directory}: the disk cannot hold it: {sizes}; store fewer boundaries, --dtype bfloat16 or less data"
        )
    return sizes


def _write_rows(
    folder: Path, contract: Contract, rows: Iterator[PackedRow], tokens_by_key: dict[bytes, int], engine: Any
) -> None:  # fmt: skip
    """Store the states of the rows that the cache does not have yet."""
    with CacheWriter.building(folder, contract, SHARD_BYTES) as writer:
        new_rows = (row for row in rows if row.key not in writer.known)
        done = sum(tokens for key, tokens in tokens_by_key.items() if key in writer.known)
        with progress("features", "token", sum(tokens_by_key.values()), done) as advance:
            for row, aux_RNH, final_RH in engine.states(new_rows):
                writer.add(row, aux_RNH, final_RH)
                advance(row.tokens)


def part(text: str) -> tuple[int, int]:
    """Parse an option's value such as ``2/8``, the second of eight: its number from 0, and how many there are."""
    match = re.fullmatch(r"([1-9]\d{0,3})/([1-9]\d{0,3})", text)
    if not match or int(match[1]) > int(match[2]):
        raise argparse.ArgumentTypeError(
            f"{text!r:.40} is no part: give it as 2/8, the second of eight"
        )
    return int(match[1]) - 1, int(match[2])


def parse_options(argv: list[str]) -> tuple[argparse.Namespace, DrafterModule, TokenData]:
    """Return the command's own options, and the model and data of ``specdec fit``'s; ValueError if one is wrong."""
    parser = OwnOptions("cache", __doc__, "all other options are specdec fit's")
    add = parser.add_argument
    add(
        "--out",
        required=True,
        metavar="DIR",
        help="the cache's directory; an unfinished one is resumed",
    )
    add(
        "--layers",
        type=int,
        nargs="+",
        default=[],
        help="boundaries to store in addition to the drafter's",
    )
    add(
        "--first_rows",
        type=int,
        help="store only this many training rows, those that an epoch draws first; by default all",
    )
    add(
        "--first_val_rows",
        type=int,
        help="store only this many validation rows, those of the first batches; by default all",
    )
    add("--part", type=part, default=(0, 1), metavar="I/N", help="store every N-th row, from the I-th on: N machines "
         "that share a disk, or one after another, make one cache; the last to end writes its index")  # fmt: skip
    add("--dtype", choices=("target", *list(DTYPES)[1:]), default="target", help="of what is stored: "
         "float8_e4m3fn keeps a scale for every token's state, which is rounded to 3 bits")  # fmt: skip
    add("--rows", type=int, default=1, help="rows that transformers reads together: with one, the numbers are those "
         "of OnTheFly(rows=1) to the last bit; more are faster on a GPU where rows are short")  # fmt: skip
    add("--engine", choices=("transformers", "vllm"), default="transformers", help="what runs the target; vllm is "
         "the one of the Python that $SPECDEC_VLLM_PYTHON names, else of this environment")  # fmt: skip
    add(
        "--vllm_args",
        type=yaml_mapping,
        default={},
        help="more of vLLM's engine: '{tensor_parallel_size: 2}'",
    )
    options, args = parser.parse_known_args(argv)
    if options.first_rows is not None and options.first_rows < 1:
        raise ValueError("--first_rows must be at least 1")
    if (options.first_val_rows or 0) < 0:
        raise ValueError("--first_val_rows must be at least 0")
    if options.rows < 1:
        raise ValueError("--rows must be at least 1")
    if options.engine != "vllm" and options.vllm_args:
        raise ValueError("--vllm_args needs --engine vllm")
    cli = configured(Configured, "fit", fit_options(args), RunDirectory())
    return options, cli.model, cli.datamodule


def yaml_mapping(text: str) -> dict[str, Any]:
    """Parse an option's value; ValueError if it is no mapping."""
    return dict(load_yaml(text, "--vllm_args"))


def stored_rows(
    data: TokenData,
    first: int | None = None,
    first_val: int | None = None,
    number: int = 0,
    parts: int = 1,
) -> Iterator[PackedRow]:
    """Yield the rows of training and of validation, each once.

    Args:
        first: only this many rows of training, those drawn first.
        first_val: only this many rows of validation, those of the first batches.
        number: from 0; only every ``parts``-th row is given, from this one on.
    """
    keys: set[bytes] = set()
    stages = data.first_rows(first), data.first_validation_rows(first_val)
    for row in itertools.chain(*map(each_row, stages)):
        if row.key not in keys:
            keys.add(row.key)
            if len(keys) % parts == (number + 1) % parts:
                yield row
