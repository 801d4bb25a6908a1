"""Ctrl-C and SIGTERM as one exception, so that whatever runs is ended in order."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Asked(BaseException):
    """Somebody asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number
        """The exit status by convention."""


@contextlib.contextmanager
def asked_to_end() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM raise :class:`Asked`; in the main thread only."""

    def ask(number: int, frame: FrameType | None) -> None:
        raise Asked(number)

    old = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
