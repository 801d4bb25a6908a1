"""Sealed checkpoints: whole, unchanged to the last bit, and of which optimizer step.

A file ends in a line with its step and the SHA-256 of all before the digits; torch reads past it. Being one file it
appears in one rename, hash and all. A checkpoint in shards is a directory that appears in one rename too, with all its
hashes in ``SHA256SUMS``; one of its files is a sealed checkpoint of what every process has alike.
"""

import hashlib
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

from specdec.files import explain
from specdec.sums import SUMS, check_sums

ALIKE = "alike.ckpt"  # in a directory: what every process has alike: loops, schedules, buffers
REMEDY = "use an earlier one, or the newest whole one with --ckpt_path auto"
# a stranger's file may be anything, and so may what its reader stumbles over
UNREADABLE = (RuntimeError, EOFError, pickle.UnpicklingError, LookupError, ValueError, TypeError, AttributeError)
_SEAL = re.compile(rb"\nspecdec checkpoint of step ([0-9]{20}), sha256 ([0-9a-f]{64})\n")
_LENGTH = len(b"\nspecdec checkpoint of step , sha256 \n") + 20 + 64


class Sealing:
    """A stream that is written once, from beginning to end, and then sealed."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream, self._hash = stream, hashlib.sha256()

    def write(self, data: Any) -> int:
        """As the stream's."""
        self._hash.update(data)
        return self.stream.write(data)

    def flush(self) -> None:
        """As the stream's."""
        self.stream.flush()

    def seal(self, step: int) -> None:
        """End the file."""
        self.write(b"\nspecdec checkpoint of step %020d, sha256 " % step)
        self.stream.write(self._hash.hexdigest().encode() + b"\n")


def step_of(path: Path) -> int:
    """The step that a checkpoint says it is of; nothing is verified yet.

    Raises:
        ValueError: it has no seal.
    """
    return int(_seal(path / ALIKE if path.is_dir() else path)[0])


def verify(path: Path) -> None:
    """Read all of a checkpoint.

    Raises:
        ValueError: there is none, or a bit of it is not as it was written.
    """
    if path.is_dir():
        if not (path / SUMS).is_file():
            raise ValueError(f"{path}: an unfinished checkpoint, for want of {SUMS}: {REMEDY}")
        check_sums(path, REMEDY)
        return
    digest = _seal(path)[1]
    with path.open("rb") as stream:
        found, left = hashlib.sha256(), path.stat().st_size - 64 - 1
        while left and (data := stream.read(min(left, 1 << 22))):
            found.update(data)
            left -= len(data)
    if found.hexdigest().encode() != digest:
        raise ValueError(f"{path}: damaged: its SHA-256 is not that at its end; {REMEDY}")


def _seal(path: Path) -> tuple[bytes, bytes]:
    """Step and digest as they stand at the end of the file."""
    if not path.exists():
        raise ValueError(f"{path}: checkpoint not found")
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - _LENGTH))
            match = _SEAL.fullmatch(stream.read())
    except OSError as error:
        raise explain(error, path) from error
    if match is None:
        raise ValueError(f"{path}: damaged, cut off or no checkpoint of specdec: it does not end in its hash; {REMEDY}")
    return match[1], match[2]


def contents(path: Path) -> dict[str, Any]:
    """What a verified checkpoint holds beside shards; tensors stay on the disk until they are used.

    Raises:
        ValueError: it holds more than tensors and plain data, or no checkpoint.
    """
    file = path / ALIKE if path.is_dir() else path
    return plain(file, lambda: torch.load(file, map_location="cpu", weights_only=True, mmap=True))


def plain(path: Any, load: Callable[[], Any]) -> dict[str, Any]:
    """What a reader that unpickles nothing makes of a checkpoint, which may be a stranger's.

    Raises:
        ValueError: it stumbled, or found no checkpoint.
    """
    try:
        found = load()
    except (OSError, *UNREADABLE) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{path}: damaged, or no checkpoint of specdec ({reason}); {REMEDY}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: no checkpoint of specdec: it holds a {type(found).__name__}; {REMEDY}")
    return found
