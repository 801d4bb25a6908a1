"""vLLM as the engine of ``specdec cache``: a process in vLLM's own environment, asked through its standard input.

Legend: M tokens of a document's piece, R tokens of a row, N stored boundaries, H hidden.
"""

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdec.engines.extract import RowStates
from specdec.engines.server import VARIABLE, find_vllm
from specdec.features.store import PackedRow
from specdec.target import Target, TargetSource

INSIDE = Path(__file__).parent / "inside_vllm"
KNOWN = "0.32."  # the connector is private to vLLM, and another in every version
TOKENS = 16384  # asked for at once


class VllmEngine:
    """Every piece is a request of its own; the final state is the target's final norm of the last boundary."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path, target: Target, layers: Sequence[int]) -> None:
        self.process, self.log, self.target, self.layers = process, log, target, layers
        self.name = f"vllm {self._answer()['version']}"

    @classmethod
    @contextlib.contextmanager
    def started(
        cls, source: TargetSource, target: Target, layers: Sequence[int], longest: int, more: Mapping[str, Any]
    ) -> Iterator[Self]:
        """vLLM with this target, ready, until the block ends.

        Args:
            layers: boundaries to store.
            longest: tokens of the longest piece.
            more: arguments of vLLM's engine, none of which is set here.

        Raises:
            ValueError: there is no vLLM of a known version, it refuses an argument, or it fails.
        """
        words = find_vllm()
        if len(words) == 1:
            raise ValueError(f"--engine vllm runs a script: name the Python of {words[0]} with {VARIABLE}")
        with tempfile.TemporaryDirectory(prefix="specdec-vllm-") as folder:
            job = {
                "folder": folder,
                "known": KNOWN,
                "layers": [*(b for b in layers if b < target.num_layers), target.num_layers],
                "engine": {
                    "model": source.directory(), "revision": source.revision,
                    "trust_remote_code": source.trust_remote_code, "dtype": str(target.dtype).removeprefix("torch."),
                    "max_model_len": longest + 1,  # and the one token that it has to write
                    "skip_tokenizer_init": True, "seed": 0,
                },
                "more": {"max_num_batched_tokens": max(TOKENS, longest + 1), **more},
            }  # fmt: skip
            path = os.pathsep.join(filter(None, [str(INSIDE), os.environ.get("PYTHONPATH", "")]))
            log = Path(folder) / "vllm.log"
            with log.open("w") as stderr:
                process = subprocess.Popen(
                    [words[0], str(INSIDE / "extract.py"), json.dumps(job)], text=True,
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
        self._ask([ids_M.tolist() for ids_M in pieces])
        files = iter(zip(pieces, self._answer(), strict=True))
        for row in rows:
            found = [self._piece(*next(files)) for _ in row.pieces()]
            aux_RNH, final_RH = (torch.cat(columns) for columns in zip(*found, strict=True))
            yield RowStates(row, aux_RNH, final_RH)

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

    def _ask(self, what: Any) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer tells why
            self.process.stdin.write(json.dumps(what) + "\n")
            self.process.stdin.flush()

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
