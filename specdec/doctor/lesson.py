"""A sample, trained on by the set-up's own module under Lightning, and looked at on the way.

Legend: B rows, T tokens, K unroll steps.
"""

import time
from enum import StrEnum
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch

from specdec.data import Batch, TokenData
from specdec.data.datamodule import Splits
from specdec.doctor.sample import Decoded, Sample, decode
from specdec.doctor.subject import Subject
from specdec.features import OnTheFly
from specdec.fit import quiet_torch
from specdec.optimizers import AdamW
from specdec.training.module import DrafterModule
from specdec.training.noise import NoNoise
from specdec.training.objective import Teacher, objective, teach
from specdec.training.schedule import WarmupCosine
from specdec.training.ttt import reachable, shift

MOST = 4000  # steps of one optimizer
EVERY = 5  # steps between looks
FIRST = 0.25  # of the time is the set-up's own rate's
LEARNT = 0.98  # of the drafts right in training: then decoding must show it
TRIES = 2  # decodings of a sample that training has right, before the two are told apart
PATIENCE = 40  # looks without progress: in drafts, or by a hundredth of the loss


class Ended(StrEnum):
    """Why the training did."""

    LEARNT = "learnt"
    STALLED = "stalled"
    LATE = "late"


class Look(NamedTuple):
    """How far training had come."""

    step: int
    seconds: float
    loss: float
    right: float  # share of the drafts that are the target's token, in training
    optimizer: str


class Curve(NamedTuple):
    """What came of it, for the report."""

    looks: list[Look]
    decoded: Decoded
    ended: Ended


class One(TokenData):
    """The sample, as often as there are steps."""

    def __init__(self, sample: Sample) -> None:
        ids_1T = torch.tensor([[*sample.prompt, *sample.answer]])
        super().__init__(ids_1T.shape[1], 1)
        mask_1T = torch.arange(ids_1T.shape[1])[None] >= len(sample.prompt)
        self.row = Batch(ids_1T, mask_1T, torch.zeros_like(ids_1T))
        many = Batch(*(column.expand(MOST, -1) for column in self.row))
        self._splits = Splits(many, self.row, self.row)

    def setup(self, stage: str | None = None) -> None:
        """There is nothing to read."""


class Watch(pl.Callback):
    """Looks at the drafter now and then, and ends the training when the sample is learnt or the time is up."""

    def __init__(self, subject: Subject, sample: Sample, one: One, begun: float, until: float, name: str) -> None:
        self.subject, self.sample, self.begun, self.until, self.name = subject, sample, begun, until, name
        self.batch = Batch(*(column.to(subject.target.device) for column in one.row))
        self.looks: list[Look] = []
        self.decoded, self.ended = Decoded(0, 1), Ended.STALLED
        self.tries = self.told = self.idle = 0
        self.best = (0.0, float("inf"))
        self.teacher: Teacher | None = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """At every fifth step."""
        late = time.monotonic() - self.begun >= self.until
        if trainer.global_step % EVERY and not late:
            return
        right, loss = self._look(trainer, pl_module)
        progress = right > self.best[0] or loss < 0.99 * self.best[1]
        self.idle = 0 if progress else self.idle + 1
        self.best = max(self.best[0], right), min(self.best[1], loss)
        stalled = self.idle >= PATIENCE
        if right >= LEARNT or late or stalled:
            self.decoded = decode(self.subject, self.sample)
            self.tries += right >= LEARNT
        if not self.decoded.refused or self.tries >= TRIES * (1 if right == 1 else 2):
            self.ended, trainer.should_stop = Ended.LEARNT, True
        elif late or stalled:
            self.ended, trainer.should_stop = Ended.LATE if late else Ended.STALLED, True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Where it begins."""
        self._look(trainer, pl_module)

    def _look(self, trainer: pl.Trainer, module: pl.LightningModule) -> tuple[float, float]:
        assert isinstance(module, DrafterModule)
        right, loss = self._right(module)
        seconds = time.monotonic() - self.begun
        self.looks.append(Look(trainer.global_step, seconds, loss, right, self.name))
        self.subject.on_step(int(seconds) - self.told)
        self.told = int(seconds)
        return right, loss

    @torch.no_grad()
    def _right(self, module: DrafterModule) -> tuple[float, float]:
        """Drafts that are the target's token, of those that can be; and the loss."""
        assert module.drafter is not None
        if self.teacher is None:  # the sample's stays what it is
            self.teacher = teach(module.target, module.drafter, self.batch, module.recipe, True)
        found = objective(module.drafter, self.batch, self.teacher, module.recipe)
        assert found.counts is not None
        known = [False] * len(self.sample.prompt) + self.sample.known
        known_1T = torch.tensor([known], device=self.batch.ids_BT.device)
        mask, documents, K = self.batch.loss_mask_BT, self.batch.documents_BT, module.ttt_steps
        can = sum(int((reachable(mask, documents, k) & shift(known_1T, 2 + k)).sum()) for k in range(K))
        return float(found.counts.hits_K.sum()) / max(can, 1), float(found.loss)


def trained(subject: Subject, sample: Sample) -> Curve:
    """Train; the set-up's optimizer first."""
    module, one, begun = subject.module, One(sample), time.monotonic()
    module.drafter, module.source, module.noise = subject.drafter, OnTheFly(), NoNoise()
    module.compile_parts, module.schedule = False, WarmupCosine(0.0, 1.0)
    module.drafter.train()
    looks: list[Look] = []
    own = module.make_optimizer
    rate = min(1e-2, max(2e-4, 0.5 / subject.drafter.config.hidden_size))
    ways = ((own, "the set-up's optimizer", FIRST), (lambda p: AdamW(p, lr=rate), f"AdamW at {rate:.2g}", 1.0))
    for make, name, share in ways:
        module.make_optimizer = make
        watch = Watch(subject, sample, one, begun, share * subject.seconds, name)
        _fit(subject, one, watch)
        looks += watch.looks
        if watch.ended is Ended.LEARNT:
            break
    return Curve(looks, watch.decoded, watch.ended)


def _fit(subject: Subject, one: One, watch: Watch) -> None:
    given = subject.trainer
    with quiet_torch():
        trainer = pl.Trainer(
            accelerator=given.accelerator, devices=1, precision=given.precision, max_steps=MOST, max_epochs=-1,
            gradient_clip_val=given.gradient_clip_val, gradient_clip_algorithm=given.gradient_clip_algorithm,
            callbacks=[watch], logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=0, use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(subject.module, datamodule=one)
    assert subject.module.drafter is not None
    subject.module.drafter.to(subject.target.device)
