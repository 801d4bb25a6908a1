"""Ctrl-C and SIGTERM as one exception, or as a note, so that whatever runs is ended in order."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType


class Asked(BaseException):
    """SIGINT or SIGTERM has come; ``status`` is the exit status by convention."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number


class Note:
    """``number`` of the first signal that came, or None."""

    number: int | None = None


@contextlib.contextmanager
def asked_to_end() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM raise :class:`Asked`; in the main thread only."""

    def ask(number: int, frame: FrameType | None) -> None:
        raise Asked(number)

    with _handled(ask):
        yield


@contextlib.contextmanager
def noted() -> Iterator[Note]:
    """Inside, the first SIGINT or SIGTERM is noted and the second raises :class:`Asked`, in the main thread only.

    For code that calls libraries which do not let an exception through.
    """
    note = Note()

    def write(number: int, frame: FrameType | None) -> None:
        if note.number is not None:
            raise Asked(note.number)
        note.number = number

    with _handled(write):
        yield note


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
