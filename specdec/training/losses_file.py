"""The file of a run's losses: a line for each batch, with a checksum of what stands before it."""

import zlib
from pathlib import Path

from specdec.utils.journal import whole_lines
from specdec.utils.reading import explained, open_regular


def with_checksum(line: str) -> str:
    """Return a line of ``losses.txt`` with its CRC-32."""
    return f"{line} {zlib.crc32(line.encode()):08x}\n"


def read_losses(path: Path) -> list[str]:
    """Return ``step part loss`` of every whole line of a file of losses; one that a kill cut short counts for nothing.

    Raises:
        ValueError: a line is not what was written; the message names it.
    """
    with open_regular(path) as stream, explained(path):
        return whole_lines(path, stream.read(), _loss)


def _loss(line: bytes) -> str | None:
    text = line.decode("ascii", errors="replace")
    return text[:-9] if with_checksum(text[:-9]) == f"{text}\n" else None
