"""What runs the target for features that are made ahead of training: transformers here, or vLLM as a child process.

Legend: M tokens of a document's piece, R tokens of a row, N boundaries, H hidden.
"""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from specdec.data.loader import PAD_DOCUMENT
from specdec.features.store import PackedRow
from specdec.nn.backend import matmul_backend
from specdec.nn.view import View
from specdec.target import Target, TargetSource
from specdec.target.source import AUTO
from specdec.utils.files import scratch_folder
from specdec.utils.vllm import VllmChild

INSIDE = Path(__file__).parent / "inside_vllm"
KNOWN = "0.32.", "0.33."  # versions of one connector, to the byte, which is private to vLLM
TOKENS = 16384  # of rows that vLLM works out at once

# a row, its boundaries' states (R, N, H) and its final one (R, H)
RowStates = tuple[PackedRow, Tensor, Tensor]


class TransformersEngine:
    """The very forward of :class:`specdec.features.OnTheFly`: with one row at a time, its numbers to the last bit."""

    def __init__(self, target: Target, layers: Sequence[int], products: str, rows: int = 1) -> None:
        self.target = target
        self.layers = layers
        self.rows = rows
        on = f"{target.device.type}, products {products}" + (
            f", {rows} rows at a time" if rows > 1 else ""
        )
        self.name = f"transformers {transformers.__version__}, torch {torch.__version__}, {on}"

    def states(self, rows: Iterable[PackedRow]) -> Iterator[RowStates]:
        """A forward for every ``self.rows`` of them."""
        left = iter(rows)
        while group := list(itertools.islice(left, self.rows)):
            ids_BT = nn.utils.rnn.pad_sequence([row.ids_R for row in group], True)
            documents_BT = nn.utils.rnn.pad_sequence(
                [row.documents_R for row in group], True, PAD_DOCUMENT
            )
            ids_BT, documents_BT = (x_BT.to(self.target.device) for x_BT in (ids_BT, documents_BT))
            out = self.target.forward(ids_BT, View.packed(documents_BT), self.layers)
            for row, aux_TNH, final_TH in zip(group, *out, strict=True):
                yield row, aux_TNH[: row.tokens].cpu(), final_TH[: row.tokens].cpu()


class VllmEngine:
    """vLLM in its own environment, which gets token ids through its standard input and answers with names of files.

    Every piece is a separate request; the final state is the target's final norm of the last boundary.
    """

    def __init__(self, child: VllmChild, target: Target, layers: Sequence[int]) -> None:
        self.child = child
        self.target = target
        self.layers = layers
        self.name = f"vllm {child.version}"

    def states(self, rows: Iterable[PackedRow]) -> Iterator[RowStates]:
        """Many rows at a time."""
        group: list[PackedRow] = []
        for row in rows:
            if group and sum(member.tokens for member in group) + row.tokens > TOKENS:
                yield from self._group(group)
                group = []
            group.append(row)
        if group:
            yield from self._group(group)

    def _group(self, rows: list[PackedRow]) -> Iterator[RowStates]:
        pieces = [ids_M for row in rows for ids_M in row.pieces()]
        answer = self.child.ask([ids_M.tolist() for ids_M in pieces])
        files = iter(zip(pieces, answer, strict=True))
        for row in rows:
            states = [self._piece(*next(files)) for _ in row.pieces()]
            aux_RNH, final_RH = (torch.cat(columns) for columns in zip(*states, strict=True))
            yield row, aux_RNH, final_RH

    def _piece(self, ids_M: Tensor, file: str) -> tuple[Tensor, Tensor]:
        """(M, N, H) and (M, H) of one request, whose file is removed."""
        try:
            tensors = load_file(file)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"vLLM's {file} cannot be read: {error}") from error
        states = tensors["hidden_states"]
        width = sum(b < self.target.num_layers for b in self.layers) + 1
        wanted = (len(ids_M), width, self.target.hidden_size)
        if not torch.equal(tensors["token_ids"], ids_M) or states.shape != wanted:
            raise ValueError(
                f"vLLM's {file} holds other tokens than were asked for, or states of another shape"
            )
        Path(file).unlink()
        with torch.no_grad():
            final_MH = self.target.final_norm(states[:, -1].to(self.target.device)).cpu()
        return states[:, : len(self.layers)], final_MH


Engine = TransformersEngine | VllmEngine
EngineName = Literal["transformers", "vllm"]


@dataclass(frozen=True)
class EngineSetup:
    """What runs a target.

    Args:
        source: the target.
        rows: of one forward of transformers; vLLM makes its batches itself.
        more: arguments of vLLM's engine.
    """

    engine: EngineName
    source: TargetSource
    rows: int
    more: Mapping[str, Any]

    def load(self) -> Target:
        """What an engine needs of the target in this process: with vLLM, its final norm, its tokenizer and who it is.

        Raises:
            ValueError: the target cannot be had, or not by this engine.
        """
        if self.engine == "vllm":
            self.source.servable()
            return dataclasses.replace(self.source, device_map=None, parts=True).load()
        target = self.source.load(AUTO)
        target.prove()
        return target

    @contextlib.contextmanager
    def run(self, target: Target, layers: Sequence[int], longest: int) -> Iterator[Engine]:
        """An engine for the loaded target, boundaries, and documents' pieces of up to ``longest`` tokens.

        ValueError if there is no vLLM of a known version, it refuses an argument, or it fails.
        """
        if self.engine == "transformers":
            with matmul_backend(target.device) as products:  # as in training
                yield TransformersEngine(target, layers, products, self.rows)
            return
        source = self.source
        with scratch_folder() as folder:
            job = {
                "folder": str(folder),
                "known": KNOWN,
                "layers": [*(b for b in layers if b < target.num_layers), target.num_layers],
                "engine": {
                    "model": source.servable(), "revision": source.revision,
                    "trust_remote_code": source.trust_remote_code, "dtype": str(target.dtype).removeprefix("torch."),
                    "max_model_len": longest + 1,  # and the one token that it has to write
                    "skip_tokenizer_init": True, "seed": 0,
                },
                "more": {"max_num_batched_tokens": max(TOKENS, longest + 1), **self.more},
            }  # fmt: skip
            with VllmChild.started(INSIDE / "extract.py", json.dumps(job)) as child:
                yield VllmEngine(child, target, layers)
