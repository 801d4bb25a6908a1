"""How far long work is: a bar on a terminal, else a line of the log at its beginning and now and then."""

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specdec.utils.text import duration, how_many, plural

log = logging.getLogger(__name__)

# seconds to the first line, between lines at most: each takes twice as long as the one before
FIRST = 4.0
EVERY = 30.0
# this many, or a tenth of a small total, before a rate is said
ENOUGH = 10


class Advance(Protocol):
    """What :func:`progress` yields."""

    def __call__(self, more: int, now: str = "") -> None:
        """``more`` are done; ``now`` is what is being worked on, until another is named."""


@contextlib.contextmanager
def progress(what: str, unit: str, total: int | None, done: int = 0) -> Iterator[Advance]:
    """Yields a function to call with how many more of ``total`` are done; ``what`` is the bar's title.

    ``unit`` is in the singular; a ``total`` of None is not known. ``done`` of them were done before, which says
    nothing about speed.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(plural(unit)),
    )
    begin = logged = time.perf_counter()
    finished = done
    doing = what
    wait = FIRST
    if not console.is_terminal:
        size = plural(unit) if total is None else how_many(total, unit)
        log.info("%s: %s%s", what, size, f", {done:,} of them done" if done else "")
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal,
                  transient=True) as bar:  # fmt: skip
        task = bar.add_task(what, total=total, completed=done)

        def advance(more: int, now: str = "") -> None:
            nonlocal finished, doing, logged, wait
            finished = finished + more
            doing = f"{what}, {now}" if now else doing
            bar.update(task, completed=finished, description=doing)
            at = time.perf_counter()
            if not console.is_terminal and at - logged > wait:
                logged = at
                wait = min(2 * wait, EVERY)
                # the first of a batch come together: a rate of one would say nothing
                is_enough = finished - done >= min(ENOUGH, (total or 0) / ENOUGH)
                rate = (finished - done) / (at - begin) if is_enough else 0.0
                log.info("%s: %s", doing, _so_far(finished, total, unit, rate))

        yield advance


def _so_far(finished: int, total: int | None, unit: str, rate: float) -> str:
    said = how_many(finished, unit) if total is None else f"{finished:,} of {how_many(total, unit)}"
    if not rate or (total is not None and finished >= total):
        return said
    speed = (
        f"{rate:,.0f} a second"
        if rate >= 10
        else f"{duration(1 / rate)} each"
        if rate < 1
        else f"{rate:.1f} a second"
    )
    left = "" if total is None else f", {duration((total - finished) / rate)} left"
    return f"{said}, {speed}{left}"
