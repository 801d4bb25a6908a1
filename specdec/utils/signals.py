"""Ctrl-C, SIGTERM and SIGHUP as one exception, at the first signal or the second: whatever runs is ended in order."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class StopRequested(BaseException):
    """SIGINT, SIGTERM or SIGHUP has come; ``status`` is the exit status by convention."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number


@contextlib.contextmanager
def stop_on_signals(patience: int = 0, ctrl_c: bool = True) -> Iterator[list[int]]:
    """Inside, signals that end a process are listed in what is yielded and raise :class:`StopRequested`; in the main
    thread, else they do what they did. Where SIGHUP is ignored, as under ``nohup``, it stays so.

    While another handler of SIGTERM stands before the one of here, as Lightning's does while it trains, nothing is
    raised: that one ends the work, and hears of SIGHUP as of SIGTERM.

    Args:
        patience: this many signals do not raise; 1 is for libraries that do not let an exception through.
        ctrl_c: of SIGINT too, which otherwise stays a KeyboardInterrupt.
    """
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield signals  # Python hands signals to the main thread alone
        return
    owner = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        # of a library's process, forked from this one: it ends as it would have
        if os.getpid() != owner:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        signals.append(number)
        if signal.getsignal(signal.SIGTERM) is not handle:
            if number == signal.SIGHUP:
                signal.raise_signal(signal.SIGTERM)
        elif len(signals) > patience:
            raise StopRequested(signals[0])

    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    for number, old in handlers.items():
        if (number != signal.SIGINT or ctrl_c) and (
            number != signal.SIGHUP or old != signal.SIG_IGN
        ):
            signal.signal(number, handle)
    try:
        yield signals
    finally:
        for number, old in handlers.items():
            signal.signal(number, old)
