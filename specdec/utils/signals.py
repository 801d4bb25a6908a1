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


@contextlib.contextmanager
def stop_on_signals(patience: int = 0) -> Iterator[list[int]]:
    """Inside, SIGINT and SIGTERM are listed in what is yielded and raise :class:`StopRequested`; main thread only.

    The first ``patience`` signals do not raise: 1 is for libraries that do not let an exception through.
    """
    signals: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        if len(signals) > patience:
            raise StopRequested(signals[0])

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, old in before.items():
            signal.signal(number, old)
