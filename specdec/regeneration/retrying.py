"""Asking a server again that is busy or away."""

import datetime
import email.utils
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from specdec.serving.bench.endpoint import RequestError

T = TypeVar("T")

LONGEST = 60.0  # seconds between two tries, unless the server asks for more
PATIENCE = 600.0  # seconds that it may ask for
PASSING = (408, 425, 429)  # of statuses below 500


@dataclass(frozen=True)
class Retrying:
    """How often, and how long after.

    Args:
        retries: tries after the first.
        backoff: seconds before the first of them, doubled each time; each wait is drawn between half of that and all.

    Raises:
        ValueError: a number is out of range.
    """

    retries: int = 6
    backoff: float = 1.0

    def __post_init__(self) -> None:
        if self.retries < 0 or self.backoff < 0:
            raise ValueError(f"retries and backoff must be at least 0, not {self.retries} and {self.backoff:g}")

    def __call__(self, ask: Callable[[], T], over: threading.Event) -> T:
        """What ``ask`` returns in the end; once ``over`` is set nothing is tried again.

        Raises:
            RequestError: it does not get an answer, and another try would not help, or there have been enough.
        """
        for number in range(self.retries + 1):
            try:
                return ask()
            except RequestError as error:
                if number == self.retries or not passing(error) or over.wait(self.seconds(number, error)):
                    raise
        raise AssertionError

    def seconds(self, number: int, error: RequestError) -> float:
        """How long to wait after try ``number``."""
        longest = min(LONGEST, self.backoff * 2**number)
        return max(random.uniform(longest / 2, longest), asked_for(error.retry_after))


def passing(error: RequestError) -> bool:
    """Whether it may be answered later."""
    return error.status is None or error.status >= 500 or error.status in PASSING


def asked_for(retry_after: str | None) -> float:
    """Seconds that a Retry-After header, in seconds or a date, asks for."""
    if retry_after is None:
        return 0.0
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            then = email.utils.parsedate_to_datetime(retry_after)
        except ValueError:
            return 0.0
        seconds = (then - datetime.datetime.now(then.tzinfo)).total_seconds()
    return min(max(seconds, 0.0), PATIENCE)
