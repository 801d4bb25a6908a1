"""Files that are whole or absent: atomic writes, hashes, and directories that are never overwritten silently."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def explain(error: OSError, path: Path | str) -> ValueError:
    """Say in one line why ``path`` could not be read or written."""
    reason = {
        errno.ENOSPC: "no space left on the device",
        errno.EDQUOT: "the disk quota is used up",
        errno.EACCES: "permission denied",
        errno.EPERM: "permission denied",
        errno.EROFS: "the file system is read-only",
        errno.ENOENT: "no such file or directory",
        errno.ENOTDIR: "a part of the path is a file, not a directory",
        errno.EISDIR: "it is a directory",
    }.get(error.errno or 0, error.strerror or str(error))
    return ValueError(f"{path}: {reason}")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def staged(path: Path | str) -> Iterator[Path]:
    """A temporary sibling of ``path`` that takes its place when the block ends well, and vanishes otherwise.

    The sibling lies on the same file system, is synced to disk before it is renamed, and the folder after it.

    Raises:
        ValueError: the disk is full, or ``path`` may not be written; ``path`` is as it was.
    """
    path = Path(path)
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".tmp-{path.name}-", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        yield temporary
        _sync(temporary)
        temporary.chmod(0o644)
        os.replace(temporary, path)
        _sync(path.parent)
    except OSError as error:
        raise explain(error, path) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def staged_directory(path: Path | str, replace: bool = False) -> Iterator[Path]:
    """As :func:`staged`, for a directory that appears whole or not at all.

    Raises:
        ValueError: ``path`` exists and ``replace`` is false, the disk is full, or ``path`` may not be written.
    """
    path = Path(path)
    if path.exists() and not replace:
        raise ValueError(f"{path} exists already: choose another place or remove it first")
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".tmp-{path.name}-", dir=path.parent))
        yield temporary
        for file in temporary.rglob("*"):
            _sync(file)
        temporary.chmod(0o755)
        if path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".tmp-old-{path.name}-", dir=path.parent))
            os.replace(path, old / path.name)
            os.replace(temporary, path)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(temporary, path)
        _sync(path.parent)
    except OSError as error:
        raise explain(error, path) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path | str, text: str) -> None:
    """Write a text file atomically."""
    with staged(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path | str, value: Any) -> None:
    """Write JSON atomically; NaN and infinities are refused, since no standard reader takes them."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path | str) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: the file is missing, unreadable or not JSON; the message names file and line.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise explain(error, path) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}") from error


def sha256(path: Path | str) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
