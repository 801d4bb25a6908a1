"""``specdec live``: which of two running servers' drafters accepts more, from the servers' own counters.

Legend: W windows, each of one span of time on both servers; B batches of neighboring windows.
"""

import contextlib
import math
import sys
import time
from collections.abc import Sequence

import numpy as np

from specdec.engines.client import Endpoint
from specdec.engines.scrape import Counters, metrics_endpoint, read_counters
from specdec.report.sequential import FEW
from specdec.report.statistics import (
    ANY,
    POSITIVE,
    Array,
    Interval,
    Range,
    Statistic,
    bounded,
    interval,
    less,
    over,
)
from specdec.report.tables import with_interval
from specdec.utils.numbers import Count, Positive
from specdec.utils.signals import StopRequested, stop_on_signals

Pair = tuple[Counters, Counters]  # of servers A and B
HOW = (
    "Brackets: 95 % Student's t over windows of the same time on both servers. They assume that both servers get\n"
    "the same kind of requests, as behind one load balancer."
)


def live(
    a: str, b: str, *, passes: Count = 20_000, window: Count = 250, every: Positive = 2.0,
    seconds: Positive | None = None,
) -> None:  # fmt: skip
    """Compare the acceptance of two running servers over the same time; each is vLLM, SGLang or llama.cpp.

    Reads both servers' /metrics until each has made --passes more target passes. Then it shows acceptance length and
    acceptance by position of both, and difference and ratio of the lengths with 95 % intervals. Send both servers the
    same kind of requests, for example through one load balancer. Ctrl-C ends it with what was counted so far; but an
    interval is valid only if its end was not chosen by looking at the figures.

    Example: specdec live http://127.0.0.1:8000 http://127.0.0.1:8001

    Args:
        a: a server, as http://127.0.0.1:8000; a key goes into $VLLM_API_KEY or $LLAMA_API_KEY
        b: another server
        passes: target passes of each server, at least
        window: target passes of a window, at least; let it hold some answers of each user
        every: seconds between two reads of /metrics
        seconds: end after this time, with what was counted so far
    """
    if passes < FEW * window:
        raise ValueError(
            f"--passes {passes} is less than {FEW} windows of --window {window}: raise it, or lower --window"
        )
    endpoints = metrics_endpoint(a), metrics_endpoint(b)
    watched = PairedWindows(window, _pages(endpoints))  # a wrong address is an error at once
    end = time.monotonic() + (seconds or math.inf)
    with contextlib.suppress(StopRequested), stop_on_signals():
        _look_until(end, endpoints, watched, passes, every)
    sys.stdout.write(f"A  {endpoints[0].url}\nB  {endpoints[1].url}\n")
    sys.stdout.write(f"{comparison(watched.windows)}\n{HOW}\n")


def _look_until(
    end: float,
    endpoints: tuple[Endpoint, Endpoint],
    watched: "PairedWindows",
    passes: int,
    every: float,
) -> None:
    """Look at both servers until each has made its passes, one is restarted, or the monotonic clock says ``end``."""
    while True:
        due = time.monotonic() + every
        if due >= end:
            return
        time.sleep(max(0.0, due - time.monotonic()))
        try:
            pages = _pages(endpoints)
        except ValueError as error:  # away, or without counters because it starts
            _say(f"{error} Trying again every {every:g} s")
            continue
        if watched.look(pages):
            _say(watched.progress(passes))
        if watched.has_restarted:
            _say("a server was restarted, and its drafter may be another: the comparison ends here")
            return
        if min(watched.passes) >= passes:
            return


def _pages(endpoints: tuple[Endpoint, Endpoint]) -> Pair:
    return read_counters(endpoints[0]), read_counters(endpoints[1])


def _say(text: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')}  {text}\n")
    sys.stdout.flush()


class PairedWindows:
    """What two servers have counted, window by window; :meth:`look` takes one page of each.

    Args:
        window: passes of each server in a window, at least.
        pages: the first ones, from which on is counted.
    """

    def __init__(self, window: int, pages: Pair) -> None:
        self.windows: list[Pair] = []
        self.has_restarted = False
        self._least = window
        self._last = pages

    @property
    def passes(self) -> tuple[float, float]:
        """The passes of A and of B in all windows."""
        a, b = (sum(pair[server].passes for pair in self.windows) for server in range(2))
        return a, b

    def look(self, pages: Pair) -> bool:
        """Take two pages into account; return whether they end a window."""
        a, b = (page.since(last) for page, last in zip(pages, self._last, strict=True))
        if a is None or b is None:
            self.has_restarted = True
            return False
        if min(a.passes, b.passes) < self._least:
            return False
        self.windows.append((a, b))
        self._last = pages
        return True

    def progress(self, passes: int) -> str:
        """Say what the last window shows, and how many of the passes are made."""
        a, b = self.windows[-1]
        return (
            f"A {a.length:.2f}, B {b.length:.2f} tokens per pass; "
            f"{min(min(self.passes), passes):,.0f} of {passes:,} passes"
        )


def comparison(windows: Sequence[Pair]) -> str:
    """Return acceptance lengths, shares by position, and the difference and ratio of the lengths.

    Raises:
        ValueError: there are too few windows for an interval.
    """
    if len(windows) < FEW:
        raise ValueError(
            f"{len(windows)} windows of both servers were counted, an interval takes at least {FEW}: "
            "count for longer, or lower --window"
        )
    a, b = (_sum([pair[server] for pair in windows]) for server in range(2))
    lines = [
        f"acceptance length  A {a.length:.3f}, B {b.length:.3f}; {a.passes:,.0f} and {b.passes:,.0f} passes",
    ]
    if a.by_position and b.by_position:
        shares = (" ".join(f"{100 * share:.0f}" for share in total.shares()) for total in (a, b))
        lines.append("by position, %     A {}, B {}".format(*shares))
    tokens_W4 = np.array(
        [(b.passes + b.accepted, b.passes, a.passes + a.accepted, a.passes) for a, b in windows]
    )
    difference = widest(tokens_W4, less)
    quotient = widest(tokens_W4, over, POSITIVE)
    lines.append(f"B - A              {with_interval(*difference, '{:+.3f}'.format)}")
    lines.append(f"B / A              {with_interval(*quotient, '{:.3f}'.format)}")
    return "\n".join(lines)


def _sum(counters: Sequence[Counters]) -> Counters:
    total = counters[0]
    for more in counters[1:]:
        total = total.add(more)
    return total


def widest(sums_W4: Array, of: Statistic, bounds: Range = ANY) -> Interval:
    """Return the widest of the intervals over batches of 1, 2, 4, ... windows, of at least 8 batches each.

    Neighboring windows are alike where long answers span them, and only batches of several show how much those vary.
    """
    intervals = []
    size = 1
    while len(sums_W4) >= FEW * size:
        batches = len(sums_W4) // size
        sums_B4 = sums_W4[-batches * size :].reshape(batches, size, 4).sum(1)
        figure = interval(sums_B4, of)
        assert figure is not None
        intervals.append(figure)
        size *= 2
    mean = intervals[0].mean
    half = max((figure.high or mean) - figure.mean for figure in intervals)
    return bounded(mean, half, bounds)
