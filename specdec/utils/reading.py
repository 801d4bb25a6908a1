"""Files read safely: hashes are compared, and every error names its file."""

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

SUMS = "SHA256SUMS"


DOCUMENTS = ("README", "LICENSE", "NOTICE")
"""How the names begin of files for people, which may be added and edited: no list of hashes has them."""


TEMPORARY = ".tmp-"
"""How the name of a folder begins in which something is being written; a kill leaves it behind."""


MOST_JSON = 2**26
"""Bytes of the largest JSON file that is read: parsed, it takes ten times as much memory."""


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


def regular(path: Path | str) -> int:
    """Bytes of a file; ValueError if there is none, or it is a directory, pipe or device, which may never end."""
    with open_regular(path) as stream:
        return os.fstat(stream.fileno()).st_size


def open_regular(path: Path | str) -> BufferedReader:
    """Open a file to read its bytes, as every file of a stranger is opened.

    ValueError if there is none, or it is a directory, pipe or device: opening or reading one may never end.
    """
    with explained(path):
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        what = "a directory" if stat.S_ISDIR(mode) else "a pipe or device, no regular file"
        raise ValueError(f"{path}: it is {what}")
    return open(handle, "rb")


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


def digest(value: Any) -> str:
    """SHA-256, hexadecimal, of JSON-able data; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def sha256(path: Path | str) -> str:
    """Hexadecimal SHA-256 of a file's bytes; ValueError if it cannot be read."""
    with open_regular(path) as stream, explained(path):
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_sum(path: Path | str) -> None:
    """ValueError if :data:`SUMS` in a file's folder, or ``FILE.sha256`` next to it, lists another hash for it."""
    path = Path(path)
    place = path.with_name(SUMS)
    beside = path.with_name(f"{path.name}.sha256")
    lines = (line for line in _listed(place) if _name(line).removeprefix("./") == f"{path.name}\n")
    if any(line[:64] != sha256(path) for line in lines):
        raise _damaged(path, place)
    # as sha256sum writes it, of a file in any folder; PowerShell writes capitals
    if beside.exists():
        match = re.fullmatch(r"(\w+)(?: [ *](?:.*/)?(.+))?\n?", "".join(_listed(beside)))
        digest = sha256(path)
        if (
            not match
            or match[1] not in (digest, digest.upper())
            or match[2] not in (None, path.name)
        ):
            raise _damaged(path, beside)


def read_bytes(path: Path | str) -> bytes:
    """What a file holds, once :func:`check_sum` has looked at it."""
    check_sum(path)
    with open_regular(path) as stream, explained(path):
        return stream.read()


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


def _name(line: str) -> str:
    """The file of a line that :func:`_sums` wrote, behind 64 digits and two spaces; its end too, if it has one."""
    return line[66:]


def _listed(place: Path) -> list[str]:
    """The lines of a list of hashes; none where there is none."""
    if not place.exists():
        return []
    with open_regular(place) as stream:
        text = stream.read().decode(errors="replace")
    return re.sub("\r\n?", "\n", text).splitlines(keepends=True)


def _damaged(path: Path, place: Path, remedy: str | None = None) -> ValueError:
    remedy = remedy or f"make it again or, if you changed it on purpose, remove {place.name}"
    return ValueError(
        f"{path}: its SHA-256 is not that in {place.name}: one of the two was changed, damaged or cut off; {remedy}"
    )


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
    lines = set(_sums(directory))
    if differing := {
        line.partition("  ")[2].strip() for line in (listed - lines if partial else listed ^ lines)
    }:
        raise _damaged(directory / min(differing), directory / SUMS, remedy)
    return {_name(line)[:-1]: line[:64] for line in lines}


LISTED = re.compile(
    r"\\?(?:([0-9a-fA-F]{64}) [ *](.+)|SHA256 \((.+)\) = ([0-9a-fA-F]{64}))\r?", re.DOTALL
)
"""A line of sha256sum, the second form with ``--tag``."""
ESCAPES = {"\\n": "\n", "\\r": "\r", "\\\\": "\\"}


def check_listed(directory: Path) -> None:
    """Compare the files that a list of somebody else names with their hashes, as ``sha256sum -c SHA256SUMS`` does.

    ValueError if a line is not one of sha256sum's, or its file was changed, is missing or lies elsewhere. The list
    itself, which ``sha256sum *`` may name too, does not count.
    """
    place = directory / SUMS
    if not place.exists():
        return
    with open_regular(place) as stream:
        lines = os.fsdecode(stream.read()).split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = LISTED.fullmatch(line)
        if match is None:
            raise ValueError(
                f"{place}, line {number}: not a hash and a file, as sha256sum writes them"
            )
        digest = match[1] or match[4]
        name = match[2] or match[3]
        if line.startswith("\\"):
            name = re.sub(r"\\[nr\\]", lambda escape: ESCAPES[escape[0]], name)
        file = Path(os.path.normpath(name))
        if str(file) == SUMS:
            continue
        inside = not file.is_absolute() and ".." not in file.parts
        path = directory / file
        if not inside or not path.is_file() or sha256(path) != digest.lower():
            raise _damaged(path, place)
