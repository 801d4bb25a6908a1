"""Checkpoints: whole or absent, verified before use, and of whole optimizer steps alone.

A file appears in one rename. Its SHA-256 stands in the comment that ends the zip archive of ``torch.save``, and is
compared before anything is loaded. Nothing is saved within a step: a loader has counted the batches of one that has
begun, and the gradients of half a step are in no checkpoint.
"""

import contextlib
import hashlib
import logging
import os
import signal
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import SIGTERMException

from specdec.utils.files import staged
from specdec.utils.numbers import FromMinusOne, Whole, check_numbers
from specdec.utils.places import is_inside
from specdec.utils.reading import open_regular, regular
from specdec.utils.text import how_many

log = logging.getLogger(__name__)

REMEDY = "use an earlier one, or the newest whole one with --ckpt_path auto"
NAME = "step-"
DIGEST = 64  # letters of a SHA-256


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoints, staged next to their place: Lightning itself stages in ``$TMPDIR`` and then copies,
    which leaves a truncated file under the final name when the copy is cut off.

    Args:
        folders: gives the folders in which checkpoints may lie, asked whenever one is written or removed: Lightning
            chooses some as training begins; anywhere if there are none.
    """

    def __init__(self, folders: Callable[[], Sequence[Path | str]] = list) -> None:
        super().__init__()
        self.folders = folders

    def check(self, path: _PATH) -> None:
        """Raise ValueError if a checkpoint, whose name a template may have made, lies outside the folders."""
        folders = self.folders()
        if folders and not any(is_inside(str(path), folder) for folder in folders):
            places = ", ".join(dict.fromkeys(map(os.path.abspath, folders)))
            raise ValueError(
                f"{path}: a checkpoint outside {places}: change the filename of the callback that writes it, or if you "
                "trust the config, add --allow_keys filename"
            )

    def remove_checkpoint(self, path: _PATH) -> None:
        """Remove a checkpoint; ValueError if it lies elsewhere."""
        self.check(path)
        super().remove_checkpoint(path)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None
    ) -> None:
        """Write ``path`` in one rename; ValueError if the disk is full, or the folder may not be written."""
        self.check(path)
        with staged(str(path)) as temporary, temporary.open("w+b") as stream:
            try:
                torch.save(checkpoint, stream)
            except RuntimeError as error:
                # torch hides the full disk behind its own complaint
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from error
                raise
            stream.seek(-2, os.SEEK_END)  # the length of the archive's comment
            stream.write(DIGEST.to_bytes(2, "little"))
            stream.write(_digest(stream, stream.tell()))

    def load_checkpoint(self, path: _PATH, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint; ValueError if it is damaged, cut off, or holds more than tensors and plain data."""
        verify(Path(path))
        return read_training_checkpoint(Path(path), mmap=False)


def verify(path: Path) -> None:
    """Read all of a checkpoint; ValueError if there is none, or it does not hold what was written."""
    if not path.exists():
        raise ValueError(f"{path}: checkpoint not found")
    with _readable(path), open_regular(path) as stream:
        size = stream.seek(-DIGEST, os.SEEK_END)
        digest = stream.read()
        if digest.endswith(b"\0\0"):  # no comment, as torch.save leaves it: CRC-32 of every tensor
            with zipfile.ZipFile(stream) as archive:
                whole = archive.testzip() is None
        else:
            whole = digest == _digest(stream, size)
    if not whole:
        raise ValueError(
            f"{path}: damaged, cut off or no checkpoint of specdec: its SHA-256 differs; {REMEDY}"
        )


def _digest(stream: IO[bytes], size: int) -> bytes:
    """SHA-256, hexadecimal, of the first bytes of a file, which is left at their end."""
    digest = hashlib.sha256()
    left = size
    stream.seek(0)
    while left and (read := stream.read(min(left, 1 << 24))):
        digest.update(read)
        left -= len(read)
    return digest.hexdigest().encode()


def read_training_checkpoint(path: Path, mmap: bool = True) -> dict[str, Any]:
    """Read what a checkpoint holds.

    Args:
        mmap: leave the tensors on the disk until they are used.
    """
    regular(path)
    with _readable(path):
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    if not isinstance(checkpoint, dict) or "global_step" not in checkpoint:
        raise ValueError(f"{path}: no checkpoint of specdec; {REMEDY}")
    return checkpoint


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise ValueError(
            f"{path}: damaged, cut off or no checkpoint of specdec ({reason}); {REMEDY}"
        ) from error


def newest(directory: Path) -> Path | None:
    """The checkpoint of the latest step that verifies, or None where there is none yet; refused ones are logged, and
    if all are damaged it is a ValueError."""
    whole: list[tuple[int, bool, Path]] = []
    paths = sorted(directory.glob("*.ckpt"))
    for path in paths:
        try:
            verify(path)
            whole.append(
                (int(read_training_checkpoint(path)["global_step"]), path.name != "last.ckpt", path)
            )
        except ValueError as error:
            log.warning("refused: %s", error)
    if paths and not whole:
        raise ValueError(
            f"{directory}: of its {how_many(len(paths), 'checkpoint')} none is whole: start again with another --out"
        )
    return max(whole)[-1] if whole else None


def ends_all(trainer: pl.Trainer, exception: BaseException) -> bool:
    """Return whether an interruption ends all processes after the same step; on SIGTERM Lightning sees to that."""
    alone = trainer.world_size == 1 and isinstance(exception, KeyboardInterrupt | SystemExit)
    return alone or isinstance(exception, SIGTERMException)


class RunCheckpoint(Checkpoint):
    """Saves a run between two optimizer steps, and ends it there.

    ``step-N.ckpt`` and ``last.ckpt`` are written every N steps, ``last.ckpt`` too when training ends or is
    interrupted. Ctrl-C, SIGTERM and what other callbacks end a run by wait for the optimizer step under way; Ctrl-C
    after either signal ends the run at once. With several processes no signal is held back, as one might leave before
    a step in which the others wait for it: Lightning handles them. What is kept is decided by what lies in the folder,
    after any number of kills.

    Args:
        every_n_train_steps: optimizer steps between checkpoints; 0: none but the last.
        save_top_k: how many numbered ones are kept, the newest; -1 for all.
    """

    def __init__(self, every_n_train_steps: Whole = 1000, save_top_k: FromMinusOne = 1) -> None:
        check_numbers(RunCheckpoint.__init__, locals(), "checkpoint.")
        self.every_n_train_steps = every_n_train_steps
        self.save_top_k = save_top_k
        self.dirpath: Path | None = None
        # what log_model of loggers reads
        self.last_model_path = ""
        self.best_model_path = ""
        self.current_score = None
        self._trainer: pl.Trainer | None = None
        self._between = False  # two steps: no batch of the next one has begun
        self._step = self._saved = 0  # at which the present batch began, and of the last checkpoint
        self._ends = False  # a callback wants the run to end after this step
        # Lightning's
        self._handlers: dict[signal.Signals, Callable[[int, FrameType | None], Any]] = {}
        self._held: signal.Signals | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Receive signals before Lightning's handlers, which Lightning removes itself."""
        self.dirpath = self.dirpath or Path(trainer.default_root_dir) / "checkpoints"
        # what a resumed run begins with is saved
        self._trainer = trainer
        self._saved = trainer.global_step
        self._between = False
        self._ends = False
        self._handlers = {}
        self._held = None
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
        if self._held is None and not (self._between and self._trainer.validating):
            self._held = signum
            log.info("stopping after this optimizer step; Ctrl-C again stops at once")
            return
        if self._held is not None:
            if signum == signal.SIGTERM:
                return
            self._between = False  # the next batch may have been drawn: nothing is saved
        self._handlers[signum](number, frame)

    def on_train_batch_start(self, trainer: pl.Trainer, *rest: Any) -> None:
        """A step begins with its first batch."""
        self._step = trainer.global_step
        self._between = False

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        """After a whole step: save when it is due, and after the last step, as once training has ended Lightning counts
        the epoch as whole; then let what was held back take effect."""
        step = trainer.global_step
        self._between = step != self._step
        self._ends = self._ends or trainer.should_stop
        trainer.should_stop = self._ends and self._between
        due = self.every_n_train_steps > 0 and step % self.every_n_train_steps == 0
        if due or trainer.should_stop or step == trainer.max_steps:
            self._save(trainer, due)
        if self._between and self._held is not None:
            self._release()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A validation may lie within a step, which a callback that ends the run then has to wait for."""
        self._ends = self._ends or trainer.should_stop
        trainer.should_stop = self._ends and self._between

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the last state, whatever ended the training."""
        self._save(trainer)
        self._restore()
        if self._held is not None:
            self._release()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Keep the state of a run that is stopped between two steps."""
        self._restore()
        if ends_all(trainer, exception):
            self._save(trainer)

    def _restore(self) -> None:
        for signum, handler in self._handlers.items():
            # Lightning ignores Ctrl-C while it shuts down
            if signal.getsignal(signum) == self._receive:
                signal.signal(signum, handler)

    def _release(self) -> None:
        assert self._held is not None
        held = self._held
        self._held = None
        self._handlers[held](held, None)

    def _save(self, trainer: pl.Trainer, numbered: bool = False) -> None:
        """Write the present state once, if it is one between two steps, and remove what is not kept."""
        step = trainer.global_step
        folder = self.dirpath
        if not self._between or step == self._saved or folder is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if numbered and self.save_top_k:
            trainer.save_checkpoint(folder / f"{NAME}{step}.ckpt")
        trainer.save_checkpoint(folder / "last.ckpt")
        self._saved = step
        self.last_model_path = str(folder / "last.ckpt")
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.after_save_checkpoint(self)  # type: ignore[arg-type]
        if trainer.is_global_zero and self.save_top_k > 0:
            numbered_paths = [
                (path.stem.removeprefix(NAME), path) for path in folder.glob(f"{NAME}*.ckpt")
            ]
            # to a later one, which was refused, the run comes again
            earlier = sorted(
                (int(n), path) for n, path in numbered_paths if n.isdecimal() and int(n) <= step
            )
            for _, path in earlier[: -self.save_top_k]:
                path.unlink(missing_ok=True)
