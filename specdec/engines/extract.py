"""``specdec cache``: the target's features of a run's data, stored for training.

The options are those of specdec fit and some of its own: specdec cache --config RUN.yaml --out DIR stores what
specdec fit --config RUN.yaml --model.features Cached --model.features.directory DIR reads. Killed or interrupted, the
same command goes on after the last whole shard.

Example: specdec cache --config RUN.yaml --out features
"""

# Legend: M tokens of a document's piece, R tokens of a row, N stored boundaries, H hidden.

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdec.data import TokenData
from specdec.engines.server import find_vllm
from specdec.export.formats import servable
from specdec.features.store import CacheWriter, Contract, PackedRow, check_beside, merge, packed_rows
from specdec.fit import Configured, configured
from specdec.nn.backend import matmul_backend
from specdec.nn.view import View
from specdec.target import Target, TargetSource
from specdec.training.building import config_for
from specdec.training.module import DrafterModule
from specdec.training.run_directory import RunDirectory
from specdec.utils.command import OwnOptions, fit_options
from specdec.utils.files import scratch_folder
from specdec.utils.progress import progress
from specdec.utils.trust import load_yaml

log = logging.getLogger(__name__)

SHARD_BYTES = 512_000_000
SPARE = 1.01  # keys and headers
INSIDE = Path(__file__).parent / "inside_vllm"
KNOWN = "0.32.", "0.33."  # versions of one connector, to the byte, which is private to vLLM
TOKENS = 16384  # of rows that vLLM works out at once

RowStates = tuple[PackedRow, Tensor, Tensor]  # a row, its boundaries' states (R, N, H) and its final one (R, H)


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
            yield row, out.aux_BTNH[0].cpu(), out.final_BTH[0].cpu()


class VllmEngine:
    """vLLM in its own environment, which gets token ids through its standard input and answers with names of files.

    Every piece is a request of its own; the final state is the target's final norm of the last boundary.
    """

    def __init__(self, process: "subprocess.Popen[str]", log: Path, target: Target, layers: Sequence[int]) -> None:
        self.process, self.log, self.target, self.layers = process, log, target, layers
        self.name = f"vllm {self._answer()['version']}"

    @classmethod
    @contextlib.contextmanager
    def started(
        cls, source: TargetSource, target: Target, layers: Sequence[int], longest: int, more: Mapping[str, Any]
    ) -> Iterator[Self]:
        """vLLM with this target, for pieces of up to ``longest`` tokens and with ``more`` arguments of its engine.

        ValueError if there is none of a known version, it refuses an argument, or it fails.
        """
        python = find_vllm()[0]
        with scratch_folder() as folder:
            job = {
                "folder": str(folder),
                "known": KNOWN,
                "layers": [*(b for b in layers if b < target.num_layers), target.num_layers],
                "engine": {
                    "model": servable(source), "revision": source.revision,
                    "trust_remote_code": source.trust_remote_code, "dtype": str(target.dtype).removeprefix("torch."),
                    "max_model_len": longest + 1,  # and the one token that it has to write
                    "skip_tokenizer_init": True, "seed": 0,
                },
                "more": {"max_num_batched_tokens": max(TOKENS, longest + 1), **more},
            }  # fmt: skip
            path = os.pathsep.join(filter(None, [str(INSIDE), os.environ.get("PYTHONPATH", "")]))
            log = folder / "vllm.log"
            with log.open("w") as stderr:
                process = subprocess.Popen(
                    [python, str(INSIDE / "extract.py"), json.dumps(job)], text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
                    env={**os.environ, "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": path},
                )  # fmt: skip
            try:
                yield cls(process, log, target, layers)
            finally:
                process.kill()
                process.communicate()

    def states(self, rows: Iterable[PackedRow]) -> Iterator[RowStates]:
        """Many rows at a time."""
        group: list[PackedRow] = []
        for row in rows:
            if group and sum(one.tokens for one in group) + row.tokens > TOKENS:
                yield from self._group(group)
                group = []
            group.append(row)
        if group:
            yield from self._group(group)

    def _group(self, rows: list[PackedRow]) -> Iterator[RowStates]:
        pieces = [ids_M for row in rows for ids_M in row.pieces()]
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer tells why
            self.process.stdin.write(json.dumps([ids_M.tolist() for ids_M in pieces]) + "\n")
            self.process.stdin.flush()
        files = iter(zip(pieces, self._answer(), strict=True))
        for row in rows:
            found = [self._piece(*next(files)) for _ in row.pieces()]
            aux_RNH, final_RH = (torch.cat(columns) for columns in zip(*found, strict=True))
            yield row, aux_RNH, final_RH

    def _piece(self, ids_M: Tensor, file: str) -> tuple[Tensor, Tensor]:
        """(M, N, H) and (M, H) of one request, whose file is removed."""
        try:
            found = load_file(file)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"vLLM's {file} cannot be read: {error}") from error
        states, width = found["hidden_states"], sum(b < self.target.num_layers for b in self.layers) + 1
        wanted = (len(ids_M), width, self.target.hidden_size)
        if not torch.equal(found["token_ids"], ids_M) or states.shape != wanted:
            raise ValueError(f"vLLM's {file} holds other tokens than were asked for, or states of another shape")
        Path(file).unlink()
        with torch.no_grad():
            final_MH = self.target.final_norm(states[:, -1].to(self.target.device)).cpu()
        return states[:, : len(self.layers)], final_MH

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
            raise ValueError(f"vLLM ended: {' | '.join(lines[-5:])}")
        answer = json.loads(line)
        if isinstance(answer, dict) and "refused" in answer:
            raise ValueError(f"--engine vllm: {answer['refused']}")
        return answer


def main(argv: list[str]) -> int:
    """Run the command; ValueError if an argument, the data or the target is wrong, or the cache cannot be written."""
    options, model, data = read(argv)
    if options.engine == "vllm":  # its layers run there; here are its tokenizer, final norm and parts' fingerprint
        servable(model.target_source)
        target = dataclasses.replace(model.target_source, device_map=None, parts=True).load()
    elif model.target_source.parts:
        raise ValueError("target.parts: specdec cache runs the target's layers: set it to false, or take --engine vllm")
    else:
        target = model.target.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    data.prepare(target.tokenizer)
    data.check_vocabulary(target.vocab_size)
    # all rows are stored under the name of all
    first = None if (options.first_rows or 0) >= len(data.splits.train.ids_BT) else options.first_rows
    number, parts = options.part
    rows, folder = rows_of(data, first)[number::parts], part_folder(number, parts)
    if not rows:
        raise ValueError(f"--part {number + 1}/{parts}: there are no more than {number} rows: make fewer parts")
    # every boundary that the design taps; the final state, which is always stored, is none
    config, directory = config_for(model.spec, target), Path(options.out)
    taps = {b for b in config.aux_layers if b < target.num_layers or not config.fusion.final_norm}
    layers = sorted(taps | set(options.layers))
    with _engine(options, model, target, layers, rows) as engine:
        contract = Contract.of(target, data, layers, options.dtype, engine.name, first)
        check_beside(directory, folder, contract)
        total = sum(row.tokens for row in rows)
        size = int(total * contract.token_bytes * SPARE)
        written = sum(file.stat().st_size for file in (directory / folder).glob("shard-*.safetensors"))
        there = next(parent for parent in (directory, *directory.absolute().parents) if parent.exists())
        free = shutil.disk_usage(there).free
        sizes = f"{size / 1e9:,.1f} GB for {total:,} tokens, {written / 1e9:,.1f} written, {free / 1e9:,.1f} free"
        if size > written + free:
            raise ValueError(
                f"{directory}: the disk cannot hold it: {sizes}; store fewer boundaries, --dtype bfloat16 or less data"
            )
        log.info("%s: boundaries %s and the final state: %s", directory, list(contract.layers), sizes)
        with CacheWriter.building(directory / folder, contract, SHARD_BYTES) as writer:
            left = [row for row in rows if row.key not in writer.known]
            with progress("features", "token", total, total - sum(row.tokens for row in left)) as advance:
                for row, aux_RNH, final_RH in engine.states(left):
                    writer.add(row, aux_RNH, final_RH)
                    advance(row.tokens)
    if folder != ".":
        missing = merge(directory, [part_folder(number, options.part[1]) for number in range(options.part[1])])
        log.info(
            "%s: %s", directory, f"parts still to come: {', '.join(missing)}" if missing else "all parts are there"
        )
    return 0


def part(text: str) -> tuple[int, int]:
    """An option's value as ``2/8``, the second of eight."""
    if not (found := re.fullmatch(r"([1-9]\d{0,3})/([1-9]\d{0,3})", text)) or int(found[1]) > int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no part: give it as 2/8, the second of eight")
    return int(found[1]) - 1, int(found[2])


def part_folder(number: int, parts: int) -> str:
    """Where a part is written, within the cache's directory."""
    return "." if parts == 1 else f"part-{number + 1}-of-{parts}"


def read(argv: list[str]) -> tuple[argparse.Namespace, DrafterModule, TokenData]:
    """The command's own options, and the model and data of ``specdec fit``'s; ValueError if one is wrong."""
    parser = OwnOptions("cache", __doc__, "all other options are specdec fit's")
    more = parser.add_argument
    more("--out", required=True, metavar="DIR", help="the cache's directory; one that is not finished goes on")
    more("--layers", type=int, nargs="+", default=[], help="boundaries to store beside the drafter's own")
    more("--first_rows", type=int, help="store the training rows that an epoch draws first, so many; by default all")
    more("--part", type=part, default=(0, 1), metavar="I/N", help="store every N-th row, from the I-th on: N machines "
         "that share a disk, or one after another, make one cache; the last to end writes its index")  # fmt: skip
    more("--dtype", choices=("target", "float32", "bfloat16", "float16"), default="target", help="of what is stored")
    more("--engine", choices=("transformers", "vllm"), default="transformers", help="what runs the target; vllm is "
         "the one of the Python that $SPECDEC_VLLM_PYTHON names, else of this environment")  # fmt: skip
    more("--vllm_args", type=yaml_mapping, default={}, help="more of vLLM's engine: '{tensor_parallel_size: 2}'")
    options, args = parser.parse_known_args(argv)
    if (options.first_rows or 1) < 1:
        raise ValueError("--first_rows must be at least 1")
    if options.engine != "vllm" and options.vllm_args:
        raise ValueError("--vllm_args needs --engine vllm")
    cli = configured(Configured, "fit", fit_options(args), RunDirectory())
    return options, cli.model, cli.datamodule


def yaml_mapping(text: str) -> dict[str, Any]:
    """An option's value; ValueError if it is none."""
    return dict(load_yaml(text, "--vllm_args"))


def rows_of(data: TokenData, first: int | None = None) -> list[PackedRow]:
    """The rows of training, or of it those drawn first, and of validation, each once."""
    splits = (data.first_rows(first), data.splits.validation)
    return list({row.key: row for split in splits for row in packed_rows(split)}.values())


@contextlib.contextmanager
def _engine(
    options: argparse.Namespace, model: DrafterModule, target: Target, layers: Sequence[int], rows: Sequence[PackedRow]
) -> Iterator[TransformersEngine | VllmEngine]:
    if options.engine == "transformers":
        with matmul_backend() as products:  # as in training
            yield TransformersEngine(target, layers, products)
        return
    longest = max(len(piece) for row in rows for piece in row.pieces())
    with VllmEngine.started(model.target_source, target, layers, longest, options.vllm_args) as engine:
        yield engine
