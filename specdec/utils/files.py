"""Files that are whole or absent: atomic writes, hashes, and locks; directories are never overwritten silently."""

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TextIO

log = logging.getLogger(__name__)

SUMS = "SHA256SUMS"
DOCUMENTS = ("README", "LICENSE", "NOTICE")
"""How the names begin of files for people, which may be added and edited: no list of hashes has them."""
TEMPORARY = ".tmp-"
"""How the name of a folder begins in which something is being written; a kill leaves it behind."""
LOCK = ".lock"  # in such a folder: it is held until the writer ends, however that ends
REPLACED = ".replaced"  # in such a folder: what its content takes the place of
MOST_JSON = 2**26
"""Bytes of the largest JSON file that is read: parsed, it takes ten times as much memory."""


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # some network file systems sync no folders
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def explained(path: Path | str) -> Iterator[None]:
    """Turn an OSError into a ValueError that names its file, or ``path`` where it names none or a temporary one."""
    try:
        yield
    except OSError as error:
        culprit = str(error.filename or path)
        reason = error.strerror or str(error)
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
    remove_abandoned(parent, prefix)
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


def remove_abandoned(parent: Path, prefix: str = TEMPORARY) -> None:
    """Remove what killed processes have left in a folder, and nothing that a living one holds."""
    for left in parent.glob(prefix + "[0-9a-f]" * 12):
        _remove_abandoned(left)


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
            # killed between two renames: what was to take its place is whole
            if (folder / REPLACED).exists():
                for entry in folder.iterdir():
                    if (
                        entry.name not in (LOCK, REPLACED)
                        and not (folder.parent / entry.name).exists()
                    ):
                        entry.rename(folder.parent / entry.name)
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
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
    """As :func:`staged`, for a directory, whose files are listed with their hashes; see :func:`check_sums`.

    ValueError also if ``path`` exists and ``replace`` is false, or another process is about to make it.
    """
    path = Path(path)
    with (
        contextlib.nullcontext() if replace else claimed(path),
        explained(path),
        _held(path.parent) as folder,
    ):
        temporary = folder / path.name
        temporary.mkdir()
        mode = temporary.stat().st_mode
        yield temporary
        (temporary / SUMS).write_text("".join(_sums(temporary)), encoding="utf-8")
        for file in (made := sorted(temporary.rglob("*"))):
            if file.is_symlink():
                continue
            if file.is_file():
                # safetensors writes for its owner alone
                file.chmod(file.stat().st_mode | mode & 0o666)
            _sync(file)
        _sync(temporary)
        if replace and path.exists():
            os.replace(path, folder / REPLACED)
        os.replace(temporary, path)
        _sync(path.parent)
        if gone := [file for file in made if not (path / file.relative_to(temporary)).exists()]:
            shutil.rmtree(path, ignore_errors=True)
            if (folder / REPLACED).exists():
                os.replace(folder / REPLACED, path)
            raise ValueError(
                f"{path}: {gone[0].name} was removed while it was written: run the command again"
            )


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Hold the claim of a directory that is yet to be made; ValueError if it exists, or another process holds it."""
    there = f"{path} exists already: choose another place or remove it first"
    if path.exists():  # nothing is written beside it
        remove_abandoned(path.parent)  # by a kill just after it was made
        raise ValueError(there)
    claim = claim_of(path)
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = take_claim(claim)
    if stream is None:
        raise ValueError(is_claimed(path, claim))
    try:
        if path.exists():  # another has just made it; from here on none does
            raise ValueError(there)
        yield
    finally:
        release_claim(claim, stream)


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
        raise ValueError(
            f"{path}: {size:,} bytes, and no JSON file of more than {MOST_JSON:,} is read"
        )
    with explained(path):
        raw = read_bytes(path)
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: not UTF-8 text ({error.reason} at byte {error.start})"
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}") from error
    except (RecursionError, ValueError) as error:  # lists in lists without end; thousands of digits
        raise ValueError(
            f"{path}: not JSON of a sane size: {str(error).partition(';')[0]}"
        ) from error


def sha256(path: Path | str) -> str:
    """Hexadecimal SHA-256 of a file's bytes; ValueError if it cannot be read."""
    regular(path)
    with explained(path), Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_sum(path: Path | str) -> None:
    """ValueError if :data:`SUMS` in a file's folder, or ``FILE.sha256`` beside it, lists another hash for it."""
    path = Path(path)
    place = path.with_name(SUMS)
    beside = path.with_name(f"{path.name}.sha256")
    if any(line[66:] == f"{path.name}\n" and line[:64] != sha256(path) for line in _listed(place)):
        raise _damaged(path, place)
    # as sha256sum writes it, of a file in any folder; PowerShell writes capitals
    if beside.is_file():
        found = re.fullmatch(r"(\w+)(?: [ *](?:.*/)?(.+))?\n?", "".join(_listed(beside)))
        digest = sha256(path)
        if (
            not found
            or found[1] not in (digest, digest.upper())
            or found[2] not in (None, path.name)
        ):
            raise _damaged(path, beside)


def read_bytes(path: Path | str) -> bytes:
    """What a file holds, once :func:`check_sum` has looked at it."""
    check_sum(path)
    return Path(path).read_bytes()


def _sums(directory: Path, *patterns: str) -> list[str]:
    """A line for each of a directory's files, as ``sha256sum -c`` reads it."""
    names = sorted(
        {
            file
            for pattern in patterns or ("*",)
            for file in directory.glob(pattern)
            if file.is_file()
        }
    )
    files = [file for file in names if not file.name.startswith((".", *DOCUMENTS))]
    return [f"{sha256(file)}  {file.name}\n" for file in files if file.name != SUMS]


def _listed(place: Path) -> list[str]:
    """The lines of a list of hashes; none where there is none."""
    if not place.is_file():
        return []
    return place.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)


def _damaged(path: Path, place: Path, remedy: str | None = None) -> ValueError:
    remedy = remedy or f"make it again or, if you changed it on purpose, remove {place.name}"
    return ValueError(
        f"{path}: its SHA-256 is not that in {place.name}: one of the two was changed, damaged or cut off; {remedy}"
    )


def write_sums(directory: Path, *patterns: str) -> None:
    """List a directory's files of these names, or all, with their hashes, but for sub-directories, names with a dot
    first, and documents."""
    write_text(directory / SUMS, "".join(_sums(directory, *patterns)))


def check_sums(directory: Path, remedy: str | None = None, partial: bool = False) -> dict[str, str]:
    """Compare every file with its hash in the list that :func:`write_sums` has written, where there is one.

    Returns the hashes of the files that are there, by name; none where there is no list.

    ValueError, with ``remedy``, if the list cannot be read, or a file is missing, was changed or, unless the list is
    ``partial``, is not in it.
    """
    with explained(directory / SUMS):
        listed = set(_listed(directory / SUMS))
    if not listed and not (directory / SUMS).exists():
        return {}
    found = set(_sums(directory))
    if differing := {
        line.partition("  ")[2].strip() for line in (listed - found if partial else listed ^ found)
    }:
        raise _damaged(directory / min(differing), directory / SUMS, remedy)
    return {line[66:-1]: line[:64] for line in found}


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


def claim_of(path: Path) -> Path:
    """The claim of a directory that is yet to be made: a file beside it."""
    return path.with_name(f".{path.name}.claimed")


def take_claim(path: Path, patience: float = 0.0) -> TextIO | None:
    """Claim what the file ``path`` stands for: an open file whose lock ends with the last process that has inherited
    it. None: a living process has it, after so many seconds too, or the folder is gone."""
    end = time.monotonic() + patience
    while True:
        with explained(path.parent):
            try:
                stream = path.open("a+")
                # unless its last holder has just removed the file that was opened here
                if (
                    lock_now(stream)
                    and path.exists()
                    and os.path.samestat(os.fstat(stream.fileno()), path.stat())
                ):
                    stream.truncate(0)
                    stream.write(f"process {os.getpid()} on {socket.gethostname()}\n")
                    stream.flush()
                    return stream
            except FileNotFoundError:
                return None  # whoever had the folder gave it up just now
        stream.close()
        if time.monotonic() >= end:
            return None
        log.info("waiting for the run that has %s", path.parent)
        time.sleep(0.5)


def release_claim(path: Path, claim: TextIO) -> None:
    """Remove the file, then let go: from here on the place may be another's."""
    path.unlink(missing_ok=True)
    fcntl.flock(claim, fcntl.LOCK_UN)  # workers that still end hold the same lock
    claim.close()


def is_held(claim: Path) -> bool:
    """Whether a living process has a claim."""
    try:
        with claim.open() as stream:
            return not lock_now(stream)
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_claimed(path: Path, claim: Path) -> str:
    """What is said of a claim that another has."""
    holder = "" if not claim.exists() else f" ({claim.read_text(encoding='utf-8').strip()})"
    return f"{path} is claimed by another run{holder}: wait for its end, or choose another --out"
