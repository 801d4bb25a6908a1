"""Tiny data and its cache."""

from functools import cache
from pathlib import Path
from typing import Any

import torch

from specdec.data import Document, TokenData
from specdec.engines.extract import stored_rows
from specdec.features.contract import Contract
from specdec.features.runners import TransformersEngine
from specdec.features.writer import CacheWriter
from specdec.target import Target

LAYERS = [2, 3, 4]


class Texts(TokenData):
    """Random documents of 1 to 25 tokens, some of them twice, cut and packed into rows of 32."""

    def __init__(
        self, texts: int = 30, seq_len: int = 32, batch_size: int = 3, seed: int = 0
    ) -> None:
        super().__init__(seq_len, batch_size, seed=seed)
        self.texts = texts

    def documents(self, tokenizer: Any) -> tuple[list[Document], list[Document]]:
        draw = torch.Generator().manual_seed(self.seed)
        made = []
        for _ in range(self.texts):
            length = int(torch.randint(1, 26, (), generator=draw))
            ids = torch.randint(2, 300, (length,), generator=draw)
            made.append(Document(ids, torch.ones(length, dtype=torch.bool)))
        again = [made[0], made[3], *made, made[3], made[0]]
        return again, made[:4]

    def setup(self, stage: str | None = None) -> None:
        self.prepare(None)


@cache
def target_of(directory: Path) -> Target:
    """The tests' target, in float32."""
    return Target.load(directory)


def contract_of(
    target: Target, data: TokenData, layers: list[int] = LAYERS, dtype: str = "target"
) -> Contract:
    data.prepare(None)
    return Contract.of(target, data, layers, dtype, "tests")


def fill(
    directory: Path,
    target: Target,
    data: TokenData,
    layers: list[int] = LAYERS,
    dtype: str = "target",
    shard_bytes: int = 30_000,
) -> Path:
    """A cache of several shards."""
    contract = contract_of(target, data, layers, dtype)
    with CacheWriter.building(directory, contract, shard_bytes) as writer:
        for row, aux, final in TransformersEngine(target, contract.layers, "any").states(
            stored_rows(data)
        ):
            if row.key not in writer.known:
                writer.add(row, aux, final)
    return directory
