"""How far long work is: a bar on a terminal, else a line of the log now and then."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

log = logging.getLogger(__name__)

EVERY = 30.0  # seconds between lines
SHORT = 2.0  # seconds of work that no bar is shown for


@contextlib.contextmanager
def progress(what: str, unit: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """What is yielded is told how much more is done.

    Args:
        what: is worked at.
        unit: that is counted: ``tokens``.
        total: of all.
        done: of them before, which say nothing about speed.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn(what), BarColumn(), TextColumn("{task.percentage:>5.1f} %"),
        TextColumn("{task.fields[rate]} " + f"{unit}/s"), TimeRemainingColumn(),
    )  # fmt: skip
    begin = told = time.perf_counter()
    now = done
    with contextlib.ExitStack() as shown:
        bar = Progress(*columns, console=console)
        task = bar.add_task("", total=total, completed=done, rate="-")

        def advance(more: int) -> None:
            nonlocal now, told
            now += more
            at = time.perf_counter()
            rate = (now - done) / max(at - begin, 1e-9)
            bar.update(task, completed=now, rate=f"{rate:,.0f}")
            if console.is_terminal:
                if at - begin > SHORT and not bar.live.is_started:
                    shown.enter_context(bar)
            elif at - told > EVERY:
                told = at
                left = (total - now) / max(rate, 1e-9)
                log.info("%s: %.1f %% of %s %s, %s a second, %.0f s left", what, 100 * now / total, f"{total:,}", unit, f"{rate:,.0f}", left)  # fmt: skip # noqa: E501

        yield advance


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Hide transformers' own progress bars while a model is read or written."""
    from transformers.utils import logging as hf_logging

    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()
