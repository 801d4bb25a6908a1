"""Progress bars with what is done, what there is to do, and the time left."""

import contextlib
import functools
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Bar = Callable[[str, int], Callable[[int], None]]
"""(what, total) -> what tells a new bar that so many more are done."""


@contextlib.contextmanager
def bars() -> Iterator[Bar]:
    """On standard error, if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def bar(what: str, total: int) -> Callable[[int], None]:
            return functools.partial(progress.advance, progress.add_task(what, total=total))

        yield bar
