"""Checkpoints that are whole or absent, wherever the temporary folder lies, and verified before they are used."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io import TorchCheckpointIO

from specdec.files import staged
from specdec.training.seals import Sealing, plain, verify


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoints, staged beside their target and sealed: Lightning itself stages in ``$TMPDIR`` and then
    copies, which leaves a truncated file under the final name when the copy is cut off."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """Write ``path`` in one rename.

        Raises:
            ValueError: the disk is full or the folder may not be written; an older file of that name is untouched.
        """
        if _remote(path):  # a remote file system has no rename of ours
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with staged(str(path)) as temporary, temporary.open("wb") as stream:
            sealing = Sealing(stream)
            try:
                torch.save(checkpoint, sealing)  # type: ignore[arg-type]  # it wants no more than write and flush
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):  # torch hides the full disk behind its own complaint
                    raise error.__context__ from error
                raise
            sealing.seal(int(checkpoint.get("global_step", 0)))

    def load_checkpoint(self, path: _PATH, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint.

        Raises:
            ValueError: it is missing, damaged, cut off, or holds more than tensors and plain data.
        """
        if Path(path).is_dir():
            raise ValueError(f"{path}: a checkpoint in shards: go on with --trainer.strategy fsdp2")
        if not _remote(path):
            verify(Path(path))
        # Lightning would unpickle anything from an URL, and wherever a config says weights_only: false
        load = super().load_checkpoint
        return plain(path, lambda: load(path, *args, **{**kwargs, "weights_only": True}))

    def remove_checkpoint(self, path: _PATH) -> None:
        """Remove a file, or a sharded checkpoint's directory, which goes aside first: no half of it has its name."""
        if _remote(path) or not Path(path).is_dir():
            super().remove_checkpoint(path)
            return
        aside = Path(tempfile.mkdtemp(prefix=".tmp-", dir=Path(path).parent))
        Path(path).rename(aside / Path(path).name)
        shutil.rmtree(aside, ignore_errors=True)


def _remote(path: _PATH) -> bool:
    return "://" in str(path)
