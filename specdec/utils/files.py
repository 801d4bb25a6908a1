"""Files that are whole or absent: atomic writes, hashes, and locks; directories are never overwritten silently."""

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

log = logging.getLogger(__name__)

SUMS = "SHA256SUMS"
DOCUMENTS = ("README", "LICENSE", "NOTICE")
"""How the names begin of files for people, which may be added and edited: no list of hashes has them."""
TEMPORARY = ".tmp-"
"""How the name of what is being written begins; a kill leaves it behind."""
MOST_JSON = 2**26
"""Bytes of the largest JSON file that is read: parsed, it takes ten times as much memory."""


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems sync no folders
            raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def explained(path: Path | str) -> Iterator[None]:
    """Turn an OSError into a ValueError that names its file, or ``path`` where it names none or a temporary one."""
    try:
        yield
    except OSError as error:
        culprit, reason = str(error.filename or path), error.strerror or str(error)
        if isinstance(error, FileExistsError | NotADirectoryError):
            reason = "a part of the path is a file, not a directory"
        elif isinstance(error, IsADirectoryError):
            reason = "it is a directory"
        named = path if TEMPORARY in culprit else culprit
        raise ValueError(f"{named}: {reason[:1].lower()}{reason[1:]}") from error


def _temporary(path: Path) -> Path:
    """A new name beside ``path``, whose folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.parent / f"{TEMPORARY}{secrets.token_hex(6)}"


@contextlib.contextmanager
def staged(path: Path | str) -> Iterator[Path]:
    """A temporary sibling of ``path`` that takes its place when the block ends well, and vanishes otherwise.

    The sibling lies on the same file system, is synced to disk before it is renamed, and the folder after it.
    ValueError if the disk is full, or ``path`` may not be written; ``path`` is as it was then.
    """
    path = Path(path)
    with explained(path):
        temporary = _temporary(path)
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode
        try:
            yield temporary
            temporary.chmod(mode)  # safetensors writes for its owner alone
            _sync(temporary)
            os.replace(temporary, path)
            _sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def staged_directory(path: Path | str, replace: bool = False) -> Iterator[Path]:
    """As :func:`staged`, for a directory; ValueError also if ``path`` exists and ``replace`` is false."""
    path = Path(path)
    if path.exists() and not replace:
        raise ValueError(f"{path} exists already: choose another place or remove it first")
    with explained(path):
        temporary, old = _temporary(path), _temporary(path)
        temporary.mkdir()
        mode = temporary.stat().st_mode
        try:
            yield temporary
            for file in temporary.rglob("*"):
                if file.is_symlink():
                    continue
                if file.is_file():
                    file.chmod(file.stat().st_mode | mode & 0o666)  # safetensors writes for its owner alone
                _sync(file)
            _sync(temporary)
            if replace and path.exists():
                os.replace(path, old)
            os.replace(temporary, path)
            _sync(path.parent)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path | str, text: str) -> None:
    """Write a text file atomically."""
    with staged(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path | str, value: Any) -> None:
    """Write JSON atomically; NaN and infinities are refused, since no standard reader takes them."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def regular(path: Path | str) -> int:
    """Bytes of a file; ValueError if there is none, or it is a directory, pipe or device, which may never end."""
    with explained(path):
        about = Path(path).stat()
    if not stat.S_ISREG(about.st_mode):
        what = "a directory" if stat.S_ISDIR(about.st_mode) else "a pipe or device, no regular file"
        raise ValueError(f"{path}: it is {what}")
    return about.st_size


def read_json(path: Path | str) -> Any:
    """What a JSON file holds; ValueError, with file and line, if it is missing, unreadable, too large or not JSON."""
    if (size := regular(path)) > MOST_JSON:
        raise ValueError(f"{path}: {size:,} bytes, and no JSON file of more than {MOST_JSON:,} is read")
    with explained(path):
        raw = Path(path).read_bytes()
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}") from error
    except (RecursionError, ValueError) as error:  # lists in lists without end; thousands of digits
        raise ValueError(f"{path}: not JSON of a sane size: {str(error).partition(';')[0]}") from error


def sha256(path: Path | str) -> str:
    """Hexadecimal SHA-256 of a file's bytes; ValueError if it cannot be read."""
    regular(path)
    with explained(path), Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sums(directory: Path) -> list[str]:
    """A line for each of a directory's files, as ``sha256sum -c`` reads it."""
    names = sorted(file for file in directory.iterdir() if file.is_file())
    files = [file for file in names if not file.name.startswith((".", *DOCUMENTS))]
    return [f"{sha256(file)}  {file.name}\n" for file in files if file.name != SUMS]


def write_sums(directory: Path) -> None:
    """List a directory's files with their hashes, but for sub-directories, names with a dot first, and documents."""
    write_text(directory / SUMS, "".join(_sums(directory)))


def check_sums(directory: Path, remedy: str) -> None:
    """Compare every file with its hash in the list that :func:`write_sums` has written.

    ValueError, with ``remedy``, if the list cannot be read, or a file is missing, was changed or is not in it.
    """
    with explained(directory / SUMS):
        listed = (directory / SUMS).read_text(encoding="ascii", errors="replace").splitlines(keepends=True)
    differing = {line.partition("  ")[2].strip() for line in set(listed) ^ set(_sums(directory))}
    if differing:
        raise ValueError(
            f"{directory / min(differing)}: its SHA-256 is not that in {SUMS}: one of the two was changed, damaged or "
            f"cut off; {remedy}"
        )


def cache_directory() -> Path:
    """``$SPECDEC_CACHE``, else ``$XDG_CACHE_HOME/specdec``, else ``~/.cache/specdec``."""
    if own := os.environ.get("SPECDEC_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specdec"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``, waiting for whoever holds it; it ends with the process, however that ends.

    The file stays: were it removed, two processes could hold a lock of the same name. ValueError if it cannot be made.
    """
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("a")
    with stream:
        if not lock_now(stream):
            log.info("waiting for another process that holds %s", path)
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def lock_now(stream: IO, shared: bool = False) -> bool:
    """Whether the lock of an open file could be had without waiting, ``shared`` beside others that ask for no more.

    It lasts until this process, and all that have inherited the open file, have closed it or ended. OSError if the file
    system has no locks.
    """
    try:
        fcntl.flock(stream, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
