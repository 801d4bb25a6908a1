"""How far long work is: a bar on a terminal, else a line of the log now and then."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

log = logging.getLogger(__name__)

EVERY = 30.0  # seconds between lines


@contextlib.contextmanager
def progress(what: str, unit: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with how many more of ``total`` are done; ``what`` is the bar's title.

    ``done`` of them were done before, which says nothing about speed.
    """
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    begin = logged = time.perf_counter()
    now = done
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=total, completed=done)

        def advance(more: int) -> None:
            nonlocal now, logged
            now += more
            bar.update(task, completed=now)
            at = time.perf_counter()
            if not console.is_terminal and at - logged > EVERY:
                logged, rate = at, max(now - done, 1e-9) / (at - begin)
                share = f"{100 * now / total:.1f} % of {total:,} {unit}"
                log.info("%s: %s, %s a second, %.0f s left", what, share, f"{rate:,.0f}", (total - now) / rate)

        yield advance
