"""What the running jobs of a sweep do: on a terminal below one headline, elsewhere as lines of the log now and then."""

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from specdec.utils.text import printable

log = logging.getLogger(__name__)

# seconds to the first lines, between lines at most: each takes twice as long as the one before
FIRST = 15.0
EVERY = 120.0
TAIL = 4096  # bytes of a log that are read
STARTING = "starting"  # of a job that has printed nothing


class SweepProgress:
    """Shows how many jobs are done, the time left, and the last line of every running job's log.

    Args:
        console: where it is shown; one that is no terminal shows nothing, and lines are logged.
    """

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, transient=True, auto_refresh=False)
        self._is_terminal = console.is_terminal
        self._wait = FIRST
        self._logged_at = time.monotonic()
        self._logged: dict[str, str] = {}

    def __enter__(self) -> Self:
        if self._is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    def show(self, headline: str, running: Mapping[str, Path]) -> None:
        """Show the present state; call it about every second.

        Args:
            headline: how many jobs are done, and the time left.
            running: the log files of the jobs that run, by label.
        """
        if self._is_terminal:
            lines = [f"  {label}: {last_printed(path)}" for label, path in running.items()]
            texts = [Text(line, no_wrap=True, overflow="ellipsis") for line in (headline, *lines)]
            self._live.update(Group(*texts), refresh=True)
        elif time.monotonic() - self._logged_at >= self._wait:
            self._logged_at = time.monotonic()
            self._wait = min(2 * self._wait, EVERY)
            self._log(headline, running)

    def _log(self, headline: str, running: Mapping[str, Path]) -> None:
        """Log the headline, and of every job what it has printed since the last time."""
        lines = {label: last_printed(path) for label, path in running.items()}
        log.info("%s", headline)
        for label, line in lines.items():
            if self._logged.get(label) != line:
                log.info("  %s: %s", label, line)
        self._logged = lines


def last_printed(path: Path) -> str:
    """Return the last line that a job has printed, as a terminal may show it."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL))
            text = stream.read().decode(errors="replace")
    except OSError:  # not there yet, or on a disk that is away for a moment
        return STARTING
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or lines[-1].startswith("--- attempt"):
        return STARTING
    return printable(lines[-1])
