"""What a server's log says, above all why it fell."""

import contextlib
import re
from pathlib import Path

TAIL = 40  # lines
LONGEST = 400  # letters of a reason
# the last of them: an engine's processes pass an error on, the first of them with a hint at the real one
_ERROR = re.compile(r"(?:\w+Error|Value error)[:,] (?!.*See root cause above).+")


def tail(path: Path, lines: int = TAIL) -> list[str]:
    """The last lines that are not empty; none if the file cannot be read."""
    return _lines(path)[-lines:]


def last(path: Path) -> str:
    """The last line."""
    return next(iter(tail(path, 1)), "it said nothing").strip()


def reason(path: Path) -> str:
    """The last error that the log tells of, else its last line."""
    errors = [found[0] for line in _lines(path) if " WARNING " not in line and (found := _ERROR.search(line))]
    return (errors[-1] if errors else last(path))[:LONGEST]


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return []
