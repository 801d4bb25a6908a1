"""Checkpoints: whole or absent, verified before use, and of whole optimizer steps alone.

A file appears in one rename. ``torch.save`` writes a zip archive with a CRC-32 of every tensor, which is compared
before anything is loaded. Nothing is saved within a step: a loader has counted the batches of one that has begun, and
the gradients of half a step are in no checkpoint.
"""

import logging
import pickle
import signal
import struct
import threading
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from specdec.utils.files import staged

log = logging.getLogger(__name__)

REMEDY = "use an earlier one, or the newest whole one with --ckpt_path auto"
# a stranger's file may be anything, and so may what its reader stumbles over
UNREADABLE = (
    OSError, RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError,
    pickle.UnpicklingError, zipfile.BadZipFile, zlib.error, struct.error,
)  # fmt: skip
NAME = "step-"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoints, staged beside their place: Lightning itself stages in ``$TMPDIR`` and then copies, which
    leaves a truncated file under the final name when the copy is cut off."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """Write ``path`` in one rename; ValueError if the disk is full, or the folder may not be written."""
        with staged(str(path)) as temporary, temporary.open("wb") as stream:
            try:
                torch.save(checkpoint, stream)
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):  # torch hides the full disk behind its own complaint
                    raise error.__context__ from error
                raise

    def load_checkpoint(self, path: _PATH, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint; ValueError if it is damaged, cut off, or holds more than tensors and plain data."""
        verify(Path(path))
        return contents(Path(path), mmap=False)


def verify(path: Path) -> None:
    """Read all of a checkpoint; ValueError if there is none, or it does not hold what was written."""
    if not path.exists():
        raise ValueError(f"{path}: checkpoint not found")

    def damaged_member() -> str | None:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip()

    if (member := _read(path, damaged_member)) is not None:
        raise ValueError(f"{path}: damaged: the CRC-32 of {member} is another than was written; {REMEDY}")


def contents(path: Path, mmap: bool = True) -> dict[str, Any]:
    """What a checkpoint holds.

    Args:
        mmap: leave the tensors on the disk until they are used.
    """
    found = _read(path, lambda: torch.load(path, map_location="cpu", weights_only=True, mmap=mmap))
    if not isinstance(found, dict) or "global_step" not in found:
        raise ValueError(f"{path}: no checkpoint of specdec; {REMEDY}")
    return found


def _read(path: Path, read: Callable[[], Any]) -> Any:
    """What a reader that unpickles nothing makes of a checkpoint, which may be a stranger's."""
    try:
        return read()
    except UNREADABLE as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{path}: damaged, cut off or no checkpoint of specdec ({reason}); {REMEDY}") from error


def newest(directory: Path) -> Path | None:
    """The checkpoint of the latest step that verifies, or None where there is none yet; refused ones are logged, and
    if all are damaged it is a ValueError."""
    whole: list[tuple[int, bool, Path]] = []
    paths = sorted(directory.glob("*.ckpt"))
    for path in paths:
        try:
            verify(path)
            whole.append((int(contents(path)["global_step"]), path.name != "last.ckpt", path))
        except ValueError as error:
            log.warning("refused: %s", error)
    if paths and not whole:
        raise ValueError(f"{directory}: none of its {len(paths)} checkpoints is whole: train anew with another --out")
    return max(whole)[-1] if whole else None


def ends_all(trainer: pl.Trainer, exception: BaseException) -> bool:
    """Whether an interruption ends all processes of the run after the same step: of SIGTERM Lightning tells them."""
    alone = trainer.world_size == 1 and isinstance(exception, KeyboardInterrupt | SystemExit)
    return alone or isinstance(exception, SIGTERMException)


class RunCheckpoint(ModelCheckpoint):
    """ModelCheckpoint with a drafting run's defaults, which ends a run between two steps and keeps its last state.

    Ctrl-C, SIGTERM and what other callbacks end a run by wait for the optimizer step under way. The first signal
    decides how the run ends; Ctrl-C a second time ends it at once. With several processes no signal is held back, as
    one might leave before a step in which the others wait for it: Lightning handles them. Which checkpoints are kept
    is decided by what lies in the folder: Lightning's own count forgets a file at every crash.

    Args:
        every_n_train_steps: optimizer steps between checkpoints.
        save_top_k: how many of these are kept, the newest; -1 for all.
    """

    def __init__(self, every_n_train_steps: int = 1000, save_top_k: int = 1) -> None:
        super().__init__(
            filename=f"{NAME}{{step}}",
            auto_insert_metric_name=False,
            every_n_train_steps=every_n_train_steps,
            save_top_k=min(save_top_k, 0),
            save_last=True,
            save_on_exception=True,
            enable_version_counter=False,
        )
        self.save_top_k = save_top_k
        self._trainer: pl.Trainer | None = None
        self._between = False  # two steps: no batch of the next one has begun
        self._step = 0  # at which the present batch began
        self._ends = False  # a callback wants the run to end after this step
        self._handlers: dict[signal.Signals, Callable[[int, FrameType | None], Any]] = {}  # Lightning's
        self._held: list[signal.Signals] = []  # in the order in which they came

    @property
    def state_key(self) -> str:
        """One name whatever the interval, so that a resumed run may change it."""
        return "RunCheckpoint"

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the step that a resumed run begins with for saved, which Lightning would save anew after the next batch,
        and stand before Lightning's signal handlers, which it takes away itself."""
        super().on_train_start(trainer, pl_module)
        self._last_global_step_saved = trainer.global_step
        self._trainer, self._ends, self._handlers, self._held = trainer, False, {}, []
        if trainer.world_size > 1 or threading.current_thread() is not threading.main_thread():
            return
        for signum in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(signum)
            if callable(handler):  # else it is ignored or ends the process, as someone wanted
                self._handlers[signum] = handler
                signal.signal(signum, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        assert self._trainer is not None
        signum = signal.Signals(number)
        if signum == signal.SIGINT and signum in self._held:
            self._between = False  # the next batch may have been drawn: nothing is saved
        elif not (self._between and self._trainer.validating):
            self._held.append(signum)
            if signum == signal.SIGINT:
                log.info("stopping after this optimizer step; Ctrl-C again stops at once")
            return
        self._handlers[signum](number, frame)

    def on_train_batch_start(self, trainer: pl.Trainer, *rest: Any) -> None:
        """A step begins with its first batch."""
        self._step, self._between = trainer.global_step, False

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        """Save when it is due, and after the last step: once training has ended Lightning counts the epoch as whole.
        After a whole step, let what was held back take effect."""
        self._between = trainer.global_step != self._step
        super().on_train_batch_end(trainer, *rest)
        self._put_off_the_end(trainer)
        if trainer.should_stop or trainer.global_step == trainer.max_steps:
            self._save_last_state(trainer)
        if self._between:
            self._release()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A validation may lie within a step."""
        super().on_validation_end(trainer, pl_module)
        self._put_off_the_end(trainer)

    def _put_off_the_end(self, trainer: pl.Trainer) -> None:
        self._ends = self._ends or trainer.should_stop
        trainer.should_stop = self._ends and self._between

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the last state, whatever ended the training."""
        self._save_last_state(trainer)
        self._restore()
        self._release()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Keep the state of a run that is stopped between two steps; there is none before the first."""
        self._restore()
        if self._between and trainer.global_step > 0 and ends_all(trainer, exception):
            super().on_exception(trainer, pl_module, exception)
        if self._held[:1] != [signal.SIGINT]:  # the run ends here: Ctrl-C has nothing left to stop, and hides no error
            self._release()
        self._held = []

    def _restore(self) -> None:
        for signum, handler in self._handlers.items():
            if signal.getsignal(signum) == self._receive:  # Lightning ignores Ctrl-C while it shuts down
                signal.signal(signum, handler)

    def _release(self) -> None:
        held, self._held = self._held, []
        if held:
            self._handlers[held[0]](held[0], None)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remove what a run that was killed right after its last save has left no time for."""
        self._prune(trainer)

    def _save_last_state(self, trainer: pl.Trainer) -> None:
        if not self._should_skip_saving_checkpoint(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def _should_skip_saving_checkpoint(self, trainer: pl.Trainer) -> bool:
        return super()._should_skip_saving_checkpoint(trainer) or not self._between

    def _save_topk_checkpoint(self, trainer: pl.Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        if self.save_top_k != 0:
            self._save_checkpoint(trainer, self.format_checkpoint_name(monitor_candidates))

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        try:
            super()._save_checkpoint(trainer, filepath)
        except ValueError as error:
            kept = self._kept(trainer.global_step)
            last = f"the last whole checkpoint is {kept[0]}" if kept else "there is no earlier checkpoint"
            raise ValueError(f"{error}; {last}") from error
        self._prune(trainer)

    def _prune(self, trainer: pl.Trainer) -> None:
        for path in self._kept(trainer.global_step)[self.save_top_k :] if self.save_top_k > 0 else ():
            if trainer.is_global_zero:
                self._remove_checkpoint(trainer, str(path))

    def _kept(self, step: int) -> list[Path]:
        """The numbered checkpoints up to a step, the newest first; to a refused one of a later step the run comes
        again."""
        assert self.dirpath is not None
        found = [(path.stem.removeprefix(NAME), path) for path in Path(self.dirpath).glob(f"{NAME}*.ckpt")]
        numbered = [(int(number), path) for number, path in found if number.isdecimal() and int(number) <= step]
        return [path for _, path in sorted(numbered, reverse=True)]
