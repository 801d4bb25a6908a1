"""Files that are whole or absent: atomic writes, hashes, and locks; directories are never overwritten silently."""

import contextlib
import errno
import fnmatch
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from specdec.utils.locks import claim_message, claim_of, lock_now, release_claim, take_claim
from specdec.utils.reading import SUMS, TEMPORARY, _listed, _name, _sums, digest, explained

LOCK = ".lock"  # in such a folder: it is held until the writer ends, however that ends
REPLACED = ".replaced"  # in such a folder: what its content takes the place of


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
    """A temporary file next to ``path`` that takes its place when the block ends well, and vanishes otherwise.

    It has the same name in a separate folder, lies on the same file system, is synced to disk before it is renamed,
    and the folder after it. What killed processes have left next to ``path`` is removed. ValueError if the disk is
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
        for file in (written := sorted(temporary.rglob("*"))):
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
        if gone := [file for file in written if not (path / file.relative_to(temporary)).exists()]:
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
        raise ValueError(claim_message(path, claim))
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


def write_sums(directory: Path, *patterns: str) -> None:
    """List a directory's files of these names, or all, with their hashes, except sub-directories, names with a dot
    first, and documents. What the list says of other files stays: it is another writer's."""
    lines = _sums(directory, *patterns) + _sums_of_others(directory, patterns)
    write_text(directory / SUMS, "".join(sorted(lines, key=_name)))


def drop_sums(directory: Path, *patterns: str) -> None:
    """Take the files of these names, which are about to change, off a directory's list."""
    if others := _sums_of_others(directory, patterns):
        write_text(directory / SUMS, "".join(others))
    else:
        (directory / SUMS).unlink(missing_ok=True)


def _sums_of_others(directory: Path, patterns: Sequence[str]) -> list[str]:
    """The lines of a directory's list that are of no file of these names."""
    names = patterns or ("*",)
    listed = [line.rstrip("\n") for line in _listed(directory / SUMS)]
    return [
        f"{line}\n"
        for line in listed
        if not any(fnmatch.fnmatchcase(_name(line), name) for name in names)
    ]


def cache_directory() -> Path:
    """``$SPECDEC_CACHE``, else ``$XDG_CACHE_HOME/specdec``, else ``~/.cache/specdec``."""
    if directory := os.environ.get("SPECDEC_CACHE"):
        return Path(directory).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specdec"


def cache_place(kind: str, determined_by: Any) -> Path:
    """The path in the cache of what is determined by this, which JSON can hold."""
    return cache_directory() / kind / digest(determined_by)[:16]
