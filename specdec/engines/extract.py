"""``specdec cache``: the target's features of a run's data, stored for training.

The arguments are those of specdec fit for model and data: specdec cache --config RUN.yaml --out DIR stores what
specdec fit --config RUN.yaml --model.features Cached --model.features.directory DIR reads. Killed or interrupted, the
same command goes on after the last whole shard. specdec cache plan, with the same arguments, writes nothing and says
what it would take; specdec cache verify DIR checks every byte.

Example: specdec cache --config RUN.yaml --out features
"""

import contextlib
import dataclasses
import logging
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
import transformers
import yaml
from lightning.pytorch.cli import LightningArgumentParser
from torch import Tensor

from specdec.data import TokenData
from specdec.features.store import CacheWriter, Contract, FeatureStore, PackedRow, packed_rows
from specdec.nn.backend import matmul_backend
from specdec.nn.view import View
from specdec.target import Target
from specdec.training.building import config_for
from specdec.training.module import DEFAULTS, DrafterModule
from specdec.utils.command import fit_options, parse, short
from specdec.utils.config import compose
from specdec.utils.progress import progress

log = logging.getLogger(__name__)

NOT_OURS = ("out", "trainer", "checkpoint", "acceptance", "seed_everything", "ckpt_path")  # of a training run's config
OPTIONS: list[tuple[str, Any, Any, str]] = [
    ("layers", list[int], [], "boundaries to store beside the drafter's, for other designs: [2, 6]"),
    ("first_rows", int | None, None, "store the training rows that an epoch draws first, so many, beside those of "
     "validation; by default all"),
    ("dtype", Literal["target", "float32", "bfloat16", "float16"], "target", "of what is stored"),
    ("engine", Literal["transformers", "vllm"], "transformers", "what runs the target; vllm is the one of the Python "
     "that $SPECDEC_VLLM_PYTHON names, else of this environment"),
    ("vllm_args", dict[str, Any], {}, "more arguments of vLLM's engine: '{tensor_parallel_size: 2}'"),
]  # fmt: skip
SHARD_BYTES = 512_000_000
SPARE = 1.01  # keys and headers


class RowStates(NamedTuple):
    """A row's R tokens: N boundaries and the final state, H wide."""

    row: PackedRow
    aux_RNH: Tensor
    final_RH: Tensor


class FeatureEngine(Protocol):
    """Works out rows in the order given."""

    name: str

    def states(self, rows: Iterable[PackedRow]) -> Iterator[RowStates]:
        """The states of each row."""
        ...


class TransformersEngine:
    """The very forward of :class:`specdec.features.OnTheFly`, so that a cache holds its numbers to the last bit."""

    def __init__(self, target: Target, layers: Sequence[int], products: str) -> None:
        self.target, self.layers = target, layers
        on = f"{target.device.type}, products {products}"
        self.name = f"transformers {transformers.__version__}, torch {torch.__version__}, {on}"

    def states(self, rows: Iterable[PackedRow]) -> Iterator[RowStates]:
        """One forward a row."""
        for row in rows:
            ids_1R, documents_1R = (x[None].to(self.target.device) for x in (row.ids_R, row.documents_R))
            out = self.target.forward(ids_1R, View.packed(documents_1R), self.layers)
            yield RowStates(row, out.aux_BTNH[0].cpu(), out.final_BTH[0].cpu())


class CacheRequest(NamedTuple):
    """What to store."""

    module: DrafterModule
    data: TokenData
    options: Any


def main(argv: list[str]) -> int:
    """Run the command; status 1 if the disk cannot hold the cache.

    Raises:
        ValueError: an argument, the data or the target is wrong, or the cache cannot be written.
    """
    if argv and argv[0] == "verify":
        return _verify(argv[1:])
    planning = bool(argv) and argv[0] == "plan"
    request = read(argv[planning:], "specdec cache plan" if planning else "specdec cache")
    options, data = request.options, request.data
    target = _target(request)
    data.prepare(target.tokenizer)
    data.check_vocabulary(target.vocab_size)
    # all rows are stored under the name of all
    first = None if (options.first_rows or 0) >= len(data.splits.train.ids_BT) else options.first_rows
    rows = rows_of(data, first)
    layers, directory = boundaries(request.module, target, options.layers), Path(options.out)
    with contextlib.nullcontext() if planning else _engine(request, target, layers, rows) as engine:
        contract = Contract.of(target, data, layers, options.dtype, engine.name if engine else "", first)
        tokens, each = sum(row.tokens for row in rows), contract.token_bytes
        size = int(tokens * each * SPARE)
        written = sum(file.stat().st_size for file in directory.glob("shard-*.safetensors"))
        there = next(parent for parent in (directory, *directory.absolute().parents) if parent.exists())
        free = shutil.disk_usage(there).free
        if engine is None:
            sys.stdout.write(
                f"{len(rows):,} rows of {tokens:,} tokens, boundaries {list(contract.layers)} and the final state, "
                f"{contract.hidden_size} wide, {contract.dtype}: {each:,} bytes a token, {size / 1e9:,.3f} GB; "
                f"{written / 1e9:,.3f} GB are written, {free / 1e9:,.1f} GB are free\n"
            )
        if size > written + free:
            sys.stderr.write(
                f"specdec cache: {directory}: the disk cannot hold it: {size / 1e9:,.1f} GB are wanted, "
                f"{free / 1e9:,.1f} GB are free; store fewer boundaries, --dtype bfloat16 or less data\n"
            )
            return 1
        if engine is not None:
            _build(directory, contract, engine, rows)
    return 0


def read(argv: list[str], prog: str) -> CacheRequest:
    """Parse; config files are merged as ``specdec fit`` merges them, and what they say of the trainer is left out.

    Raises:
        ValueError: an argument or a config is wrong.
    """
    config, rest = compose(fit_options(argv))
    config = {key: value for key, value in config.items() if key not in NOT_OURS}
    parser = LightningArgumentParser(
        prog=prog, description=__doc__, exit_on_error=False, allow_abbrev=False, parser_mode="omegaconf+"
    )
    parser.add_argument("--config", action="config", help="a config of specdec fit; several are merged in their order")
    parser.add_lightning_class_args(DrafterModule, "model")
    parser.add_lightning_class_args(TokenData, "data", subclass_mode=True)
    parser.add_argument("--out", type=str, required=True, help="the cache's directory; one that is not finished goes on")  # fmt: skip # noqa: E501
    for name, kind, default, text in OPTIONS:
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    parser.set_defaults(DEFAULTS)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(config, file, sort_keys=False)
        file.flush()
        try:
            found = parse(parser, [*(["--config", file.name] if config else []), *rest])
        except ValueError as error:
            raise ValueError(short(str(error).replace(file.name, "the config"))) from error
    if (found.first_rows or 1) < 1:
        raise ValueError("--first_rows must be at least 1")
    if found.engine != "vllm" and found.vllm_args:
        raise ValueError("--vllm_args needs --engine vllm")
    return CacheRequest(found.model, found.data, found)


def boundaries(module: DrafterModule, target: Target, more: Sequence[int]) -> list[int]:
    """Every boundary that the design taps, and more; the final state, which is always stored, is none.

    Raises:
        ValueError: the design and the target do not go together.
    """
    config = config_for(module.spec, target)
    taps = {b for b in config.aux_layers if b < target.num_layers or not config.fusion.final_norm}
    return sorted(taps | set(more))


def rows_of(data: TokenData, first: int | None = None) -> list[PackedRow]:
    """The rows of training, or of it those drawn first, and of validation, each once."""
    splits = (data.first_rows(first), data.splits.validation)
    return list({row.key: row for split in splits for row in packed_rows(split)}.values())


def _target(request: CacheRequest) -> Target:
    """On the device that runs it; where vLLM does, on the CPU, for tokenizer, norm and fingerprint."""
    if request.options.engine == "vllm":
        return dataclasses.replace(request.module.target_source, device_map=None).load()
    return request.module.target.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


@contextlib.contextmanager
def _engine(
    request: CacheRequest, target: Target, layers: Sequence[int], rows: Sequence[PackedRow]
) -> Iterator[FeatureEngine]:
    if request.options.engine == "vllm":
        from specdec.engines.extract_vllm import VllmEngine

        longest = max(len(piece) for row in rows for piece in row.pieces())
        source = request.module.target_source
        with VllmEngine.started(source, target, layers, longest, request.options.vllm_args) as engine:
            yield engine
        return
    with matmul_backend() as products:  # as in training
        yield TransformersEngine(target, layers, products)


def _build(directory: Path, contract: Contract, engine: FeatureEngine, rows: Sequence[PackedRow]) -> None:
    with CacheWriter.building(directory, contract, SHARD_BYTES) as writer:
        left = [row for row in rows if row.key not in writer.known]
        total = sum(row.tokens for row in rows)
        with progress("features", "tokens", total, total - sum(row.tokens for row in left)) as advance:
            for row, aux_RNH, final_RH in engine.states(left):
                writer.add(row, aux_RNH, final_RH)
                advance(row.tokens)
    size = sum((directory / entry.file).stat().st_size for entry in writer.shards)
    log.info("%s: %s tokens in %d shards, %.2f GB", directory, f"{total:,}", len(writer.shards), size / 1e9)


def _verify(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        raise ValueError("specdec cache verify takes one directory: specdec cache verify DIR")
    store = FeatureStore(Path(argv[0]), {})
    store.verify()
    tokens = sum(entry.tokens for entry in store.entries)
    log.info("%s: %d shards, %s tokens: every byte as written", argv[0], len(store.entries), f"{tokens:,}")
    return 0
