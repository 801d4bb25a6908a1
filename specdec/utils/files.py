"""Files that are whole or absent: atomic writes, hashes, and locks; directories are never overwritten silently."""

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

log = logging.getLogger(__name__)

SUMS = "SHA256SUMS"
_SUM = re.compile(r"([0-9a-f]{64})  ([^\s/\\][^/\\\0]*)")


def explain(error: OSError, path: Path | str) -> ValueError:
    """Say in one line why ``path`` could not be read or written."""
    known = {
        errno.EEXIST: "a part of the path is a file, not a directory",
        errno.ENOTDIR: "a part of the path is a file, not a directory",
        errno.EISDIR: "it is a directory",
    }
    said = error.strerror or str(error)
    return ValueError(f"{path}: {known.get(error.errno or 0, said[:1].lower() + said[1:])}")


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
def _told(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Turn an OSError about ``path``, or about what is staged for it, into a ValueError that names ``path``."""
    try:
        yield
    except OSError as error:
        culprit = Path(error.filename) if isinstance(error.filename, str) else path
        ours = temporary is None or culprit in (path, temporary) or temporary in culprit.parents
        raise explain(error, path if ours else culprit) from error


def _mode(base: int) -> int:
    mask = os.umask(0)
    os.umask(mask)
    return base & ~mask


@contextlib.contextmanager
def staged(path: Path | str) -> Iterator[Path]:
    """A temporary sibling of ``path`` that takes its place when the block ends well, and vanishes otherwise.

    The sibling lies on the same file system, is synced to disk before it is renamed, and the folder after it.

    Raises:
        ValueError: the disk is full, or ``path`` may not be written; ``path`` is as it was.
    """
    path = Path(path)
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)
        os.close(handle)
    temporary = Path(name)
    try:
        with _told(path, temporary):
            yield temporary
            _sync(temporary)
            temporary.chmod(_mode(0o666))
            os.replace(temporary, path)
            _sync(path.parent)
    finally:
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
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".tmp-", dir=path.parent))
    try:
        with _told(path, temporary):
            yield temporary
            for file in temporary.rglob("*"):
                if file.is_file() and not file.is_symlink():
                    file.chmod(file.stat().st_mode | _mode(0o666))  # safetensors writes for its owner alone
                if not file.is_symlink():
                    _sync(file)
            temporary.chmod(_mode(0o777))
            _sync(temporary)
            _put(temporary, path)
            _sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _put(temporary: Path, path: Path) -> None:
    if not path.exists():
        os.replace(temporary, path)
        return
    aside = Path(tempfile.mkdtemp(prefix=".tmp-", dir=path.parent)) / path.name
    os.replace(path, aside)
    try:
        os.replace(temporary, path)
    except OSError:
        os.replace(aside, path)
        raise
    finally:
        if path.exists():
            shutil.rmtree(aside.parent, ignore_errors=True)


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
    """Hexadecimal SHA-256 of a file's bytes.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        with Path(path).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise explain(error, path) from error


def write_sums(directory: Path) -> None:
    """List a directory's files, itself without sub-directories, as ``sha256sum -c`` reads them; the last act."""
    files = sorted(file for file in directory.iterdir() if file.is_file() and file.name != SUMS)
    write_text(directory / SUMS, "".join(f"{sha256(file)}  {file.name}\n" for file in files))


def check_sums(directory: Path, remedy: str) -> None:
    """Compare every file with its hash; sub-directories, and files with a dot at their front, are not looked at.

    Args:
        remedy: what to do where one differs.

    Raises:
        ValueError: there is no list, it is damaged, or a file is missing, was changed or is not in it.
    """
    where = directory / SUMS
    try:
        *lines, end = where.read_text(encoding="ascii").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: missing or damaged: {remedy}") from error
    listed = {match[2]: match[1] for line in lines if (match := _SUM.fullmatch(line))}
    if not lines or end or len(listed) < len(lines):
        raise ValueError(f"{where}: damaged or cut off: {remedy}")
    there = sorted(file.name for file in directory.iterdir() if file.is_file() and not file.name.startswith("."))
    if more := [name for name in there if name not in listed and name != SUMS]:
        raise ValueError(f"{directory / more[0]}: not in {SUMS}, which is cut off, or it came later: {remedy}")
    for name, digest in listed.items():
        if not (directory / name).is_file() or sha256(directory / name) != digest:
            raise ValueError(f"{directory / name}: its SHA-256 is not that in {SUMS}: changed or damaged; {remedy}")


def cache_directory() -> Path:
    """``$SPECDEC_CACHE``, else ``$XDG_CACHE_HOME/specdec``, else ``~/.cache/specdec``."""
    if own := os.environ.get("SPECDEC_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specdec"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``, waiting for whoever holds it; it ends with the process, however that ends.

    The file stays: were it removed, two processes could hold a lock of the same name.

    Raises:
        ValueError: ``path`` may not be written.
    """
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("a")
    with stream:
        if not lock_now(stream):
            log.info("waiting for another process that holds %s", path)
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def lock_now(stream: IO, shared: bool = False) -> bool:
    """Whether the lock of an open file could be had without waiting.

    It lasts until this process, and all that have inherited the open file, have closed it or ended.

    Args:
        shared: beside others that ask for no more.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(stream, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
