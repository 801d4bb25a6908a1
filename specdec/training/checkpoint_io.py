"""Checkpoints that are whole or absent, wherever the temporary folder lies."""

import pickle
from typing import Any

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io import TorchCheckpointIO

from specdec.files import staged


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoints, staged beside their target: Lightning itself stages in ``$TMPDIR`` and then copies,
    which leaves a truncated file under the final name when the copy is cut off."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """Write ``path`` in one rename.

        Raises:
            ValueError: the disk is full or the folder may not be written; an older file of that name is untouched.
        """
        if "://" in str(path):  # a remote file system has no rename of ours
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with staged(str(path)) as temporary, temporary.open("wb") as stream:
            try:
                torch.save(checkpoint, stream)
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):  # torch hides the full disk behind its own complaint
                    raise error.__context__ from error
                raise

    def load_checkpoint(self, path: _PATH, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint.

        Raises:
            ValueError: it is damaged, cut off, or holds more than tensors and plain data.
        """
        try:
            # Lightning would unpickle anything from an URL, and wherever a config says weights_only: false
            return super().load_checkpoint(path, *args, **{**kwargs, "weights_only": True})
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ValueError(f"{path}: damaged, or no checkpoint of specdec ({reason}); use an earlier one") from error
