"""Ctrl-C and SIGTERM as one exception, at the first signal or the second: whatever runs is ended in order."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class StopRequested(BaseException):
    """SIGINT or SIGTERM has come; ``status`` is the exit status by convention."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number


class FirstSignal:
    """``number`` of the first signal that came, or None."""

    number: int | None = None


@contextlib.contextmanager
def stop_on_signals(patience: int = 0) -> Iterator[FirstSignal]:
    """Inside, SIGINT and SIGTERM raise :class:`StopRequested` of the first one's number; in the main thread only.

    Args:
        patience: signals that are recorded before one raises: 1 for code that calls libraries which do not let an
            exception through, and looks at what is yielded.
    """
    first, left = FirstSignal(), patience

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal left
        first.number = first.number or number
        left -= 1
        if left < 0:
            raise StopRequested(first.number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield first
    finally:
        for number, old in before.items():
            signal.signal(number, old)
