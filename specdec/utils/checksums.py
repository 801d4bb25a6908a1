"""SHA256SUMS: the hashes of a directory's files, as ``sha256sum -c`` reads them."""

import re
from pathlib import Path

from specdec.utils.files import sha256, write_text

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([^\s/\\][^/\\\0]*)")


def write_sums(directory: Path) -> None:
    """List the files of a directory, itself without sub-directories; the last act, so that the list vouches for all."""
    files = sorted(file for file in directory.iterdir() if file.is_file() and file.name != SUMS)
    write_text(directory / SUMS, "".join(f"{sha256(file)}  {file.name}\n" for file in files))


def check_sums(directory: Path, remedy: str) -> None:
    """Compare every file with its hash; sub-directories, and files with a dot at their front, are not looked at.

    Args:
        remedy: what to do where one differs.

    Raises:
        ValueError: there is no list, it is damaged, or a file is missing, was changed or is not in it; the message
            names it.
    """
    where = directory / SUMS
    try:
        lines = where.read_text(encoding="ascii").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: missing or damaged: {remedy}") from error
    found = [_LINE.fullmatch(line) for line in lines[:-1]]
    if not found or lines[-1] or None in found:
        raise ValueError(f"{where}: damaged or cut off: {remedy}")
    listed = {match[2]: match[1] for match in found if match is not None}
    there = sorted(file.name for file in directory.iterdir() if file.is_file())
    if more := [name for name in there if name not in listed and name != SUMS and not name.startswith(".")]:
        raise ValueError(f"{directory / more[0]}: not in {SUMS}, which is cut off, or it came later: {remedy}")
    for name, digest in listed.items():
        if not (directory / name).is_file() or sha256(directory / name) != digest:
            raise ValueError(
                f"{directory / name}: its SHA-256 is not that in {SUMS}: it was changed or damaged; {remedy}"
            )
