"""Training steps with features on the fly and cached, and plain reading of the same bytes.

Legend: T tokens, N boundaries, H hidden.
"""

import logging
import random
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch

from benchmarks.features.pages import drop, forget
from specdec.data import Batch, Document
from specdec.data.loader import Companion
from specdec.drafter import DrafterSpec
from specdec.embedded.datamodule import EmbeddedData
from specdec.extraction.engines import TransformersEngine
from specdec.extraction.plan import rows_of
from specdec.features import Features, Source
from specdec.features.contract import Contract
from specdec.features.pieces import packed_rows
from specdec.features.store import Store
from specdec.features.writer import CacheWriter
from specdec.nn.products import fast_products
from specdec.training.module import DrafterModule

CHUNK = 8 * 2**20


class Some(EmbeddedData):
    """The first rows of the embedded target's own text."""

    def __init__(self, rows: int = 256, seq_len: int = 512, batch_size: int = 8) -> None:
        super().__init__(seq_len, batch_size)
        self.rows = rows

    def documents(self, tokenizer: Any) -> tuple[list[Document], list[Document]]:
        train, held_out = super().documents(tokenizer)
        return train[: self.rows], held_out[:8]


class Timed(Companion):
    """Times how long a loader waits for features.

    Args:
        cold: the cache whose pages are let go of before every batch is announced.
    """

    def __init__(self, source: Source, cold: Store | None) -> None:
        self.source, self.cold, self.waited = source, cold, 0.0

    def announce(self, batch: Batch) -> None:
        if self.cold is not None:
            forget(self.cold)
        self.source.announce(batch)

    def ready(self, batch: Batch) -> None:
        begin = time.perf_counter()
        self.source.ready(batch)
        self.waited += time.perf_counter() - begin


class Steps(pl.Callback):
    """Seconds from the start of a step to the start of the next, of these spent waiting, and losses."""

    def __init__(self, skip: int, cold: bool) -> None:
        self.skip, self.cold = skip, cold
        self.seconds: list[float] = []
        self.waits: list[float] = []
        self.losses: list[float] = []
        self._begun: float | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        source = pl_module.source
        self.timed = trainer.train_dataloader.companion = Timed(source, source.store if self.cold else None)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        if self._begun is not None and trainer.global_step > self.skip:
            self.seconds.append(now - self._begun)
            self.waits.append(self.timed.waited)
        self._begun, self.timed.waited = now, 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


class Run(NamedTuple):
    steps: list[float]
    waits: list[float]
    losses: list[float]


def build(directory: Path, data: Some, module: DrafterModule, layers: list[int], shard_mb: float) -> float:
    """Fill the cache; tokens a second."""
    target = module.target
    data.prepare(target.tokenizer)
    rows = rows_of(data)
    begin = time.perf_counter()
    with fast_products() as products:
        engine = TransformersEngine(target, layers, products)
        contract = Contract.of(target, data, layers, "target", engine.name)
        with CacheWriter.building(directory, contract, int(shard_mb * 1e6)) as writer:
            for row, aux, final in engine.states([row for row in rows if not writer.holds(row)]):
                writer.add(row, aux, final)
    return sum(row.tokens for row in rows) / (time.perf_counter() - begin)


def train(features: Features, data: Some, steps: int, skip: int, cold: bool) -> Run:
    """A short run of EAGLE-3.1; an optimizer step a batch."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(0, verbose=False)
    module = DrafterModule(drafter=DrafterSpec(draft_vocab_size="all"), features=features)
    found = Steps(skip, cold)
    trainer = pl.Trainer(
        max_steps=skip + steps + 2, max_epochs=-1, accelerator="cpu", devices=1, logger=False, num_sanity_val_steps=0,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
        use_distributed_sampler=False, callbacks=[found], log_every_n_steps=10**6,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    return Run(found.seconds[:steps], found.waits[:steps], found.losses)


def read_rows(directory: Path, data: Some, layers: list[int], cold: bool) -> float:
    """MB/s of all rows in random order, each copied out of the mapping; nothing is verified on the way."""
    store = Store(directory, {})
    store.verify()
    rows = packed_rows(data.splits.train)
    random.Random(0).shuffle(rows)
    H = store.contract.hidden_size
    aux_TNH, final_TH = torch.zeros(data.seq_len, len(layers), H), torch.zeros(data.seq_len, H)
    if cold:
        forget(store)
    begin = time.perf_counter()
    for row in rows:
        store.read(row, list(range(len(layers))), aux_TNH, final_TH)
    seconds = time.perf_counter() - begin
    return sum(row.tokens for row in rows) * store.contract.token_bytes / seconds / 1e6


def read_files(directory: Path, cold: bool) -> float:
    """MB/s of the shards from end to end, in large pieces: what the disk gives, or the system's memory."""
    files = sorted(directory.glob("shard-*"))
    if cold:
        drop(files)
    buffer, total = bytearray(CHUNK), 0
    begin = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while found := stream.readinto(buffer):
                total += found
    return total / (time.perf_counter() - begin) / 1e6
