"""How far a run is, how fast, and how long it will take."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

log = logging.getLogger(__name__)

TOLD_EVERY = 30.0  # seconds, where nobody watches a terminal

Told = Callable[[int, int], None]
"""(rows, tokens): so many more are done."""


@contextlib.contextmanager
def progress(rows: int, before: int) -> Iterator[Told]:
    """A bar on standard error, or a line of the log every now and then.

    Args:
        rows: of all.
        before: of them done by earlier sessions, which say nothing about speed.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    begin = told = time.monotonic()
    done = tokens = 0
    with Progress(*columns, console=console, disable=not console.is_terminal, speed_estimate_period=120) as shown:
        task = shown.add_task("rows", total=rows, completed=before, speed="")

        def tell(more_rows: int, more_tokens: int) -> None:
            nonlocal told, done, tokens
            done, tokens, now = done + more_rows, tokens + more_tokens, time.monotonic()
            speed = rate(done, tokens, now - begin)
            shown.update(task, advance=more_rows, speed=speed)
            if not console.is_terminal and now - told >= TOLD_EVERY:
                told = now
                left = f", about {(rows - before - done) * (now - begin) / done:.0f} s left" if done else ""
                log.info("%d of %d rows, %s%s", before + done, rows, speed, left)

        yield tell


def rate(rows: int, tokens: int, seconds: float) -> str:
    """Rows and tokens a second."""
    return f"{rows / max(seconds, 1e-9):.3g} rows/s, {tokens / max(seconds, 1e-9):.0f} tokens/s"
