"""Checkpoints, whole or absent and verified to the last bit before use, and what may change when a run goes on.

A file ends in a line with its step and the SHA-256 of all before the digits; torch reads past it. Being one file it
appears in one rename, hash and all. A checkpoint in shards is a directory that appears in one rename too, with all its
hashes in ``SHA256SUMS``; one of its files is a checkpoint of what every process has alike.
"""

import hashlib
import logging
import pickle
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io import TorchCheckpointIO

from specdec.utils.config_diff import canonical, keys, pairs, words
from specdec.utils.files import SUMS, check_sums, explain, staged

log = logging.getLogger(__name__)

ALIKE = "alike.ckpt"  # in a directory: what every process has alike: loops, schedules, buffers
REMEDY = "use an earlier one, or the newest whole one with --ckpt_path auto"
# a stranger's file may be anything, and so may what its reader stumbles over
UNREADABLE = (RuntimeError, EOFError, pickle.UnpicklingError, LookupError, ValueError, TypeError, AttributeError)
_END = re.compile(rb"\nspecdec checkpoint of step ([0-9]{20}), sha256 ([0-9a-f]{64})\n")
_LENGTH = len(b"\nspecdec checkpoint of step , sha256 \n") + 20 + 64
AUTO = "auto"
CONFIG = "specdec_config"  # in a checkpoint: the run's resolved config
LENGTH = ("trainer.max_steps", "trainer.max_epochs", "trainer.min_steps", "trainer.min_epochs")
NUMBERLESS = (
    "out", "ckpt_path", "weights_only", "allow_changes", "acceptance", "checkpoint",  # what is written and measured
    "data.cache", "data.num_workers", "model.features.directory", "model.features.verify",  # how data are had
    "trainer.enable_", "trainer.log", "trainer.limit_val", "trainer.limit_test", "trainer.limit_predict",
    "trainer.val_", "trainer.check_val", "trainer.num_sanity", "trainer.inference_mode", "trainer.profiler",
    "trainer.barebones", "trainer.detect_anomaly", "trainer.default_root_dir", "trainer.max_time",
)  # fmt: skip
"""How the names begin of all settings that cannot change a trained number; every other one counts as one that can."""


def changes_numbers(key: str) -> bool:
    """Whether a setting, such as ``model.optimizer.lr``, has a say in what is trained."""
    return not key.startswith(NUMBERLESS)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoints, staged beside their target and ending in their hash: Lightning itself stages in
    ``$TMPDIR`` and then copies, which leaves a truncated file under the final name when the copy is cut off."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """Write ``path`` in one rename; ValueError if the disk is full, or the folder may not be written."""
        if "://" in str(path):  # a remote file system has no rename of ours
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with staged(str(path)) as temporary, temporary.open("w+b") as stream:
            try:
                torch.save(checkpoint, stream)
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):  # torch hides the full disk behind its own complaint
                    raise error.__context__ from error
                raise
            stream.seek(0, 2)
            stream.write(b"\nspecdec checkpoint of step %020d, sha256 " % int(checkpoint.get("global_step", 0)))
            stream.seek(0)
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            stream.write(digest.encode() + b"\n")

    def load_checkpoint(self, path: _PATH, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint; ValueError if it is damaged, cut off, or holds more than tensors and plain data."""
        if Path(path).is_dir():
            raise ValueError(f"{path}: a checkpoint in shards: go on with --trainer.strategy fsdp2")
        if "://" not in str(path):
            verify(Path(path))
        # Lightning would unpickle anything from an URL, and wherever a config says weights_only: false
        load = super().load_checkpoint
        return _plain(path, lambda: load(path, *args, **{**kwargs, "weights_only": True}))

    def remove_checkpoint(self, path: _PATH) -> None:
        """Remove a file, or a sharded checkpoint's directory, which goes aside first: no half of it has its name."""
        if "://" in str(path) or not Path(path).is_dir():
            super().remove_checkpoint(path)
            return
        aside = Path(tempfile.mkdtemp(prefix=".tmp-", dir=Path(path).parent))
        Path(path).rename(aside / Path(path).name)
        shutil.rmtree(aside, ignore_errors=True)


def step_of(path: Path) -> int:
    """The step that a checkpoint says it is of; nothing is verified yet."""
    return int(_end(path / ALIKE if path.is_dir() else path)[0])


def verify(path: Path) -> None:
    """Read all of a checkpoint; ValueError if there is none, or a bit of it is not as it was written."""
    if path.is_dir():
        if not (path / SUMS).is_file():
            raise ValueError(f"{path}: an unfinished checkpoint, for want of {SUMS}: {REMEDY}")
        check_sums(path, REMEDY)
        return
    digest = _end(path)[1]
    with path.open("rb") as stream:
        found, left = hashlib.sha256(), path.stat().st_size - 64 - 1
        while left and (data := stream.read(min(left, 1 << 22))):
            found.update(data)
            left -= len(data)
    if found.hexdigest().encode() != digest:
        raise ValueError(f"{path}: damaged: its SHA-256 is not that at its end; {REMEDY}")


def _end(path: Path) -> tuple[bytes, bytes]:
    """Step and digest as they stand at the end of the file."""
    if not path.exists():
        raise ValueError(f"{path}: checkpoint not found")
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - _LENGTH))
            match = _END.fullmatch(stream.read())
    except OSError as error:
        raise explain(error, path) from error
    if match is None:
        raise ValueError(f"{path}: damaged, cut off or no checkpoint of specdec: it does not end in its hash; {REMEDY}")
    return match[1], match[2]


def contents(path: Path) -> dict[str, Any]:
    """What a verified checkpoint holds beside shards; tensors stay on the disk until they are used."""
    file = path / ALIKE if path.is_dir() else path
    return _plain(file, lambda: torch.load(file, map_location="cpu", weights_only=True, mmap=True))


def _plain(path: Any, load: Callable[[], Any]) -> dict[str, Any]:
    """What a reader that unpickles nothing makes of a checkpoint, which may be a stranger's."""
    try:
        found = load()
    except (OSError, *UNREADABLE) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{path}: damaged, or no checkpoint of specdec ({reason}); {REMEDY}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: no checkpoint of specdec: it holds a {type(found).__name__}; {REMEDY}")
    return found


def newest(directory: Path) -> Path | None:
    """The checkpoint of the latest step that verifies, or None where there is none yet; refused ones are logged, and
    if all are damaged it is a ValueError."""
    paths, steps = sorted(directory.glob("*.ckpt")), dict[Path, int]()
    for path in paths:
        try:
            steps[path] = step_of(path)
        except ValueError as error:
            log.warning("refused: %s", error)
    for path in sorted(steps, key=lambda path: (steps[path], path.name != "last.ckpt"), reverse=True):
        try:
            verify(path)
        except ValueError as error:
            log.warning("refused: %s", error)
        else:
            return path
    if paths:
        raise ValueError(f"{directory}: none of its {len(paths)} checkpoints is whole: train anew with another --out")
    return None


class Change(NamedTuple):
    """A setting that is not what it was."""

    key: str
    before: Any
    now: Any

    def among(self, keys: Sequence[str]) -> bool:
        """Whether it is one of the keys, or lies below one."""
        return any(self.key == key or self.key.startswith(f"{key}.") for key in keys)

    def __str__(self) -> str:
        return f"{self.key} was {words(self.before)}, is {words(self.now)}"


def compare(checkpoint: Path, now: dict[str, Any], allowed: Sequence[str]) -> list[Change]:
    """What differs between the config that a verified checkpoint was trained under and the present one.

    ValueError for what changes what is trained, each logged on a line, and is not below a key that is ``allowed``.
    """
    before = contents(checkpoint).get(CONFIG)
    if not isinstance(before, dict):
        raise ValueError(f"{checkpoint}: it holds no config: it was not written by specdec fit")
    one, two = canonical(before), canonical(now)
    known = {*keys(one), *keys(two)}
    if unknown := [key for key in allowed if key not in known]:
        raise ValueError(f"--allow_changes {unknown[0]!r}: no setting has that name")
    changes, refused = [Change(*found) for found in pairs(one, two)], []
    for change in changes:
        if change.among(LENGTH):
            log.warning(
                "resuming: %s; the learning rate's schedule depends on the run's length, so from here on it is that "
                "of a run of the new length", change,
            )  # fmt: skip
        elif change.among(allowed):
            log.warning("resuming, allowed: %s", change)
        elif changes_numbers(change.key):
            refused.append(change.key)
            log.error("  %s", change)
        elif change.key not in ("out", "ckpt_path", "allow_changes", "trainer.default_root_dir"):
            log.info("resuming: %s; what is trained does not depend on it", change)
    if refused:
        names = ",".join(refused)
        raise ValueError(
            f"{checkpoint} was trained under other settings, listed above ({names}): go on with those, or allow the "
            f"change with --allow_changes '[{names}]'"
        )
    return changes


class SetAside(pl.Callback):
    """Renames the checkpoints of later steps in ``directory`` when a run goes back to one that was named, so that
    ``auto`` does not go on with them; nothing is removed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for path in sorted(self.directory.glob("*.ckpt")) if trainer.is_global_zero else []:
            try:
                later = step_of(path) > trainer.global_step
            except ValueError:  # damaged: auto refuses it
                continue
            if later:
                names = (path.with_name(f"{path.name}.abandoned{f'-{i}' if i else ''}") for i in range(10**6))
                aside = next(name for name in names if not name.exists())
                path.rename(aside)
                log.warning("going back to step %d: %s is now %s", trainer.global_step, path, aside.name)
