"""``specdec cache``: the target's features of a run's data, stored for training.

The options are those of specdec fit and some of its own: specdec cache --config RUN.yaml --out DIR stores what
specdec fit --config RUN.yaml --model.features Cached --model.features.directory DIR reads. Killed or interrupted, the
same command goes on after the last whole shard.

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
from specdec.data import TokenData
from specdec.features.runners import loaded, running
from specdec.features.source import boundaries
from specdec.features.store import DTYPES, Contract, PackedRow, each_row
from specdec.features.writer import SHARD_BYTES, CacheWriter, check_beside, merge, part_folder
from specdec.training.building import config_for
from specdec.training.module import DrafterModule
from specdec.training.run_directory import RunDirectory
from specdec.utils.progress import progress
from specdec.utils.trust import load_yaml

log = logging.getLogger(__name__)

SPARE = 1.01  # keys and headers


def main(argv: list[str]) -> int:
    """Run the command; ValueError if an argument, the data or the target is wrong, or the cache cannot be written."""
    options, model, data = read(argv)
    if model.target_source.parts and options.engine != "vllm":
        raise ValueError(
            "target.parts: specdec cache runs the target's layers: set it to false, or take --engine vllm"
        )
    target = loaded(options.engine, model.target_source)
    data.prepare(target.tokenizer)
    data.check_vocabulary(target.vocab_size)
    # all rows are stored under the name of all
    first = (
        None if (options.first_rows or 0) >= len(data.splits.train.ids_BT) else options.first_rows
    )
    number, parts = options.part
    # tokens of rows by their keys
    tokens = {}
    longest = 0
    folder = part_folder(number, parts)
    for row in rows_of(data, first, number, parts):
        tokens[row.key], longest = row.tokens, max([longest, *map(len, row.pieces())])
    if not tokens:
        raise ValueError(
            f"--part {number + 1}/{parts}: there are no more than {number} rows: make fewer parts"
        )
    # every boundary that the design taps; the final state, which is always stored, is none
    config = config_for(model.spec, target)
    directory = Path(options.out)
    layers = sorted(
        {*boundaries(target, config.aux_layers, config.fusion.final_norm), *options.layers}
    )
    with running(
        options.engine,
        model.target_source,
        target,
        layers,
        longest,
        options.rows,
        options.vllm_args,
    ) as engine:
        contract = Contract.of(target, data, layers, options.dtype, engine.name, first)
        check_beside(directory, folder, contract)
        total = sum(tokens.values())
        size = int(total * contract.token_bytes * SPARE)
        written = sum(
            file.stat().st_size for file in (directory / folder).glob("shard-*.safetensors")
        )
        there = next(
            parent for parent in (directory, *directory.absolute().parents) if parent.exists()
        )
        free = shutil.disk_usage(there).free
        sizes = f"{size / 1e9:,.1f} GB for {total:,} tokens, {written / 1e9:,.1f} written, {free / 1e9:,.1f} free"
        if size > written + free:
            raise ValueError(
                f"{directory}: the disk cannot hold it: {sizes}; store fewer boundaries, --dtype bfloat16 or less data"
            )
        log.info(
            "%s: boundaries %s and the final state: %s", directory, list(contract.layers), sizes
        )
        with CacheWriter.building(directory / folder, contract, SHARD_BYTES) as writer:
            left = (
                row for row in rows_of(data, first, number, parts) if row.key not in writer.known
            )
            done = sum(R for key, R in tokens.items() if key in writer.known)
            with progress("features", "token", total, done) as advance:
                for row, aux_RNH, final_RH in engine.states(left):
                    writer.add(row, aux_RNH, final_RH)
                    advance(row.tokens)
    if folder != ".":
        missing = merge(
            directory, [part_folder(number, options.part[1]) for number in range(options.part[1])]
        )
        log.info(
            "%s: %s",
            directory,
            f"parts still to come: {', '.join(missing)}" if missing else "all parts are there",
        )
    return 0


def part(text: str) -> tuple[int, int]:
    """An option's value as ``2/8``, the second of eight."""
    if not (found := re.fullmatch(r"([1-9]\d{0,3})/([1-9]\d{0,3})", text)) or int(found[1]) > int(
        found[2]
    ):
        raise argparse.ArgumentTypeError(
            f"{text!r:.40} is no part: give it as 2/8, the second of eight"
        )
    return int(found[1]) - 1, int(found[2])


def read(argv: list[str]) -> tuple[argparse.Namespace, DrafterModule, TokenData]:
    """The command's own options, and the model and data of ``specdec fit``'s; ValueError if one is wrong."""
    parser = OwnOptions("cache", __doc__, "all other options are specdec fit's")
    more = parser.add_argument
    more(
        "--out",
        required=True,
        metavar="DIR",
        help="the cache's directory; one that is not finished goes on",
    )
    more(
        "--layers",
        type=int,
        nargs="+",
        default=[],
        help="boundaries to store beside the drafter's own",
    )
    more(
        "--first_rows",
        type=int,
        help="store the training rows that an epoch draws first, so many; by default all",
    )
    more("--part", type=part, default=(0, 1), metavar="I/N", help="store every N-th row, from the I-th on: N machines "
         "that share a disk, or one after another, make one cache; the last to end writes its index")  # fmt: skip
    more("--dtype", choices=("target", *list(DTYPES)[1:]), default="target", help="of what is stored: "
         "float8_e4m3fn keeps a scale for every token's state, which is rounded to 3 bits")  # fmt: skip
    more("--rows", type=int, default=1, help="rows that transformers reads together: with one, the numbers are those "
         "of OnTheFly(rows=1) to the last bit; more are faster on a GPU where rows are short")  # fmt: skip
    more("--engine", choices=("transformers", "vllm"), default="transformers", help="what runs the target; vllm is "
         "the one of the Python that $SPECDEC_VLLM_PYTHON names, else of this environment")  # fmt: skip
    more(
        "--vllm_args",
        type=yaml_mapping,
        default={},
        help="more of vLLM's engine: '{tensor_parallel_size: 2}'",
    )
    options, args = parser.parse_known_args(argv)
    if (options.first_rows or 1) < 1:
        raise ValueError("--first_rows must be at least 1")
    if options.rows < 1:
        raise ValueError("--rows must be at least 1")
    if options.engine != "vllm" and options.vllm_args:
        raise ValueError("--vllm_args needs --engine vllm")
    cli = configured(Configured, "fit", fit_options(args), RunDirectory())
    return options, cli.model, cli.datamodule


def yaml_mapping(text: str) -> dict[str, Any]:
    """An option's value; ValueError if it is none."""
    return dict(load_yaml(text, "--vllm_args"))


def rows_of(
    data: TokenData, first: int | None = None, number: int = 0, parts: int = 1
) -> Iterator[PackedRow]:
    """The rows of training, or of it those drawn first, and of validation, each once; of these every ``parts``-th, from
    ``number`` on."""
    found: set[bytes] = set()
    for row in itertools.chain(each_row(data.first_rows(first)), each_row(data.splits.validation)):
        if row.key not in found:
            found.add(row.key)
            if len(found) % parts == (number + 1) % parts:
                yield row
