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
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

log = logging.getLogger(__name__)

SUMS = "SHA256SUMS"
DOCUMENTS = ("README", "LICENSE", "NOTICE")
"""How the names begin of files for people, which may be added and edited: no list of hashes has them."""
TEMPORARY = ".tmp-"
"""How the name of a folder begins in which something is being written; a kill leaves it behind."""
LOCK = ".lock"  # in such a folder: it is held until the writer ends, however that ends
REPLACED = ".replaced"  # in such a folder: what its content takes the place of


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


@contextlib.contextmanager
def _held(parent: Path, prefix: str = TEMPORARY, mode: int = 0o777) -> Iterator[Path]:
    """A new folder in ``parent``, which is made too, while its lock is held; it vanishes in the end.

    What killed processes have left there is removed first, and nothing that a living one holds.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(prefix + "[0-9a-f]" * 12):
        _remove_abandoned(left)
    while True:
        folder = parent / f"{prefix}{secrets.token_hex(6)}"
        folder.mkdir(mode)
        try:
            stream = (folder / LOCK).open("x")
        except FileNotFoundError:  # taken for abandoned meanwhile, as it had no lock yet
            continue
        if _is_lock_of(stream, folder):
            break
        stream.close()
    with stream:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _is_lock_of(stream: IO, folder: Path) -> bool:
    """Whether the open lock file could be locked and is the one that lies in the folder."""
    try:
        alone = lock_now(stream)
    except OSError:  # a file system without locks: nobody takes a folder for abandoned there
        return True
    with contextlib.suppress(FileNotFoundError):
        return alone and os.path.samestat(os.fstat(stream.fileno()), (folder / LOCK).stat())
    return False


def _remove_abandoned(folder: Path) -> None:
    """Remove a temporary folder of this user's whose writer has ended; one that cannot be judged stays."""
    with contextlib.suppress(OSError):
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
            return
        try:
            stream = (folder / LOCK).open("r+")
        except FileNotFoundError:
            folder.rmdir()  # killed before it had a lock, and empty; or none of these
            return
        with stream:
            if not lock_now(stream):
                return
            if (folder / REPLACED).exists():  # killed between two renames: what was to take its place is whole
                for entry in folder.iterdir():
                    if entry.name not in (LOCK, REPLACED) and not (folder.parent / entry.name).exists():
                        entry.rename(folder.parent / entry.name)
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder ``specdec-...`` of this user's alone among the system's temporary ones, which vanishes in the end.

    Those that killed processes have left there are removed.
    """
    with _held(Path(tempfile.gettempdir()), "specdec-", 0o700) as folder:
        yield folder


@contextlib.contextmanager
def staged(path: Path | str) -> Iterator[Path]:
    """A temporary file beside ``path`` that takes its place when the block ends well, and vanishes otherwise.

    It has the same name in a folder of its own, lies on the same file system, is synced to disk before it is renamed,
    and the folder after it. What killed processes have left beside ``path`` is removed. ValueError if the disk is
    full, or ``path`` may not be written; ``path`` is as it was then.
    """
    path = Path(path)
    with explained(path), _held(path.parent) as folder:
        temporary = folder / path.name
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # safetensors writes for its owner alone
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)


@contextlib.contextmanager
def staged_directory(path: Path | str, replace: bool = False) -> Iterator[Path]:
    """As :func:`staged`, for a directory; ValueError also if ``path`` exists and ``replace`` is false."""
    path = Path(path)
    if path.exists() and not replace:
        raise ValueError(f"{path} exists already: choose another place or remove it first")
    with explained(path), _held(path.parent) as folder:
        temporary = folder / path.name
        temporary.mkdir()
        mode = temporary.stat().st_mode
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_symlink():
                continue
            if file.is_file():
                file.chmod(file.stat().st_mode | mode & 0o666)  # safetensors writes for its owner alone
            _sync(file)
        _sync(temporary)
        if replace and path.exists():
            os.replace(path, folder / REPLACED)
        os.replace(temporary, path)
        _sync(path.parent)


def write_text(path: Path | str, text: str) -> None:
    """Write a text file atomically."""
    with staged(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path | str, value: Any) -> None:
    """Write JSON atomically; NaN and infinities are refused, since no standard reader takes them."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path | str) -> Any:
    """What a JSON file holds; ValueError, with file and line, if it is missing, unreadable or not JSON."""
    try:
        with explained(path):
            return json.loads(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}") from error


def sha256(path: Path | str) -> str:
    """Hexadecimal SHA-256 of a file's bytes; ValueError if it cannot be read."""
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
