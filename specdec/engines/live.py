"""``specdec live``: which of two running servers' drafters accepts more, from the servers' own counters.

Legend: W windows, each of one span of time on both servers; B batches of neighboring windows; K draft positions.
"""

import contextlib
import math
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

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
QUIET = 60.0  # seconds without a window after which is said what is missing
HOW = (
    "Brackets: 95 % Student's t over windows of the same time on both servers; the widest over batches of 1, 2, 4,\n"
    "... windows. They hold if chance decides which server a request goes to, not its user, session or prefix."
)
NARROW = (
    "The intervals may be too narrow: there are few windows, or neighboring ones are alike. Raise --window to three\n"
    "times the passes that all users' answers take together, and --passes to 16 windows or more."
)
ENGINES = "The engines differ, and count passes differently: a difference may be the engines'."


def live(
    a: str, b: str, *, passes: Count = 20_000, window: Count = 500, every: Positive = 2.0,
    seconds: Positive | None = None,
) -> None:  # fmt: skip
    """Compare the acceptance of two running servers over the same time; each is vLLM, SGLang or llama.cpp.

    Reads both servers' /metrics until each has made --passes more target passes. Then it shows acceptance length and
    acceptance by position of both, and difference and ratio of the lengths with 95 % intervals. Send both servers the
    same kind of requests, for example through a load balancer that chooses at random. Ctrl-C ends it with what was
    counted so far; but an interval is valid only if its end was not chosen by looking at the figures.

    Example: specdec live http://127.0.0.1:8000 http://127.0.0.1:8001

    Args:
        a: a server, as http://127.0.0.1:8000; $VLLM_API_KEY, or else $LLAMA_API_KEY, is sent to both as their key
        b: another server
        passes: target passes of each server, at least
        window: target passes of a window, at least: three times those of all users' answers together
        every: seconds between two reads of /metrics, and of a window, at least
        seconds: end after this time, with what was counted so far

    Raises:
        ValueError: an address is none, or both are one; a server is away at the start, or counts no drafts.
    """
    if passes < FEW * window:
        raise ValueError(
            f"--passes {passes} is less than {FEW} windows of --window {window}: raise it, or lower --window"
        )
    endpoints = metrics_endpoint(a), metrics_endpoint(b)
    if endpoints[0].url == endpoints[1].url:
        raise ValueError(
            f"both addresses are {endpoints[0].url}: give two servers by their own addresses, not a load balancer's"
        )
    first = _pages(endpoints)
    for letter, endpoint, page in zip("AB", endpoints, first, strict=True):
        _say(f"{letter}  {endpoint.url} ({page.engine}): {page.passes:,.0f} passes so far")
    watched = PairedWindows(window, first)
    end = time.monotonic() + (seconds or math.inf)
    reason = "by a signal"
    with contextlib.suppress(StopRequested), stop_on_signals():
        reason = _look_until(end, endpoints, watched, passes, every)
    if reason:
        done = min(watched.passes)
        _say(f"ended after {done:,.0f} of {passes:,} passes, {reason}")
    sys.stdout.write(f"{comparison(watched.windows)}\n")


def _look_until(
    end: float,
    endpoints: tuple[Endpoint, Endpoint],
    watched: "PairedWindows",
    passes: int,
    every: float,
) -> str:
    """Look at both servers until each has made its passes; return why it ended before, or nothing."""
    is_away = False
    reminder = time.monotonic() + QUIET
    while True:
        due = time.monotonic() + every
        if due >= end:
            return "since --seconds are over"
        time.sleep(max(0.0, due - time.monotonic()))
        try:
            pages = _pages(endpoints)
        except ValueError as error:  # away, or without counters because it starts
            if not is_away:
                _say(f"{error} (asked again every {every:g} s)")
            is_away = True
            continue
        if is_away:
            _say("both servers answer again")
        is_away = False
        if watched.look(pages):
            _say(watched.progress(passes))
            reminder = time.monotonic() + QUIET
        if watched.has_restarted:
            return "since a server was restarted, and may serve another drafter (or an address is a load balancer's)"
        if min(watched.passes) >= passes and len(watched.windows) >= FEW:
            return ""
        if time.monotonic() >= reminder:
            _say(watched.missing())
            reminder = math.inf


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
        self._begin = pages  # of the pending window
        self._last = pages

    @property
    def passes(self) -> tuple[float, float]:
        """The passes of A and of B in all windows."""
        a, b = (sum(pair[server].passes for pair in self.windows) for server in range(2))
        return a, b

    def look(self, pages: Pair) -> bool:
        """Take two pages into account; return whether they end a window."""
        self.has_restarted |= None in _growth(pages, self._last)
        if self.has_restarted:
            return False
        self._last = pages
        a, b = _growth(pages, self._begin)
        assert a and b
        if min(a.passes, b.passes) < self._least:
            return False
        self.windows.append((a, b))
        self._begin = pages
        return True

    def progress(self, passes: int) -> str:
        """Say what the last window shows, and how many of the passes are made."""
        a, b = self.windows[-1]
        return (
            f"A {a.length:.2f}, B {b.length:.2f} tokens per pass; "
            f"{min(min(self.passes), passes):,.0f} of {passes:,} passes"
        )

    def missing(self) -> str:
        """Say what the pending window waits for."""
        a, b = _growth(self._last, self._begin)
        assert a and b
        return (
            f"no window yet: A has made {a.passes:,.0f} and B {b.passes:,.0f} of its {self._least:,} passes. "
            "Do both get requests, and do they draft?"
        )


def _growth(pages: Pair, before: Pair) -> tuple[Counters | None, Counters | None]:
    """Return what A and B have counted in between; None for a server that has started again."""
    return pages[0].since(before[0]), pages[1].since(before[1])


def comparison(windows: Sequence[Pair]) -> str:
    """Return acceptance lengths, shares by position, and the difference and ratio of the lengths.

    A window weighs the same for both servers, by the harmonic mean of their passes in it. So if hard requests come
    while one server gets more of them, both lengths are of the same requests.
    """
    if not windows:
        return "no window of both servers: nothing is compared"
    weight_W = np.array([2 / (1 / a.passes + 1 / b.passes) for a, b in windows])
    lengths_W2 = np.array([(a.length, b.length) for a, b in windows])
    a, b = weight_W @ lengths_W2 / weight_W.sum()
    passes = tuple(sum(pair[server].passes for pair in windows) for server in range(2))
    lines = [
        f"acceptance length  A {a:.3f}, B {b:.3f}; {passes[0]:,.0f} and {passes[1]:,.0f} passes",
    ]
    lines += [
        f"by position of {letter}   {_shares([pair[server] for pair in windows], weight_W)}"
        for server, letter in enumerate("AB")
    ]
    if len(windows) < FEW:
        lines.append(
            f"no interval: it takes {FEW} windows, and there are {len(windows)}. Count for longer, or lower --every "
            "or --window"
        )
        return "\n".join(lines)
    columns = weight_W * lengths_W2[:, 1], weight_W, weight_W * lengths_W2[:, 0], weight_W
    sums_W4 = np.stack(columns, axis=1)
    difference = widest(sums_W4, less)
    quotient = widest(sums_W4, over, POSITIVE)
    lines.append(f"B - A              {with_interval(*difference.interval, '{:+.3f}'.format)}")
    lines.append(f"B / A              {with_interval(*quotient.interval, '{:.3f}'.format)}")
    lines.append(HOW)
    if difference.is_doubtful:
        lines.append(NARROW)
    if windows[0][0].engine != windows[0][1].engine:
        lines.append(ENGINES)
    return "\n".join(lines)


def _shares(counters: Sequence[Counters], weight_W: Array) -> str:
    """Return the shares of passes that accepted at least 1, ..., K drafts."""
    if not counters[0].by_position:
        return f"{counters[0].engine} does not count it"
    shares_K = weight_W @ np.array([part.shares() for part in counters]) / weight_W.sum()
    return " ".join(f"{100 * share:.0f}" for share in shares_K) + " %"


class Widest(NamedTuple):
    """The widest interval over batches of windows; doubtful if larger batches, of which there are too few, may be
    wider still."""

    interval: Interval
    is_doubtful: bool


def widest(sums_W4: Array, of: Statistic, bounds: Range = ANY) -> Widest:
    """Return the widest of the intervals over batches of 1, 2, 4, ... windows, of at least 8 batches each.

    Neighboring windows are alike where long answers span them, and only batches of several show how much those vary.

    Args:
        sums_W4: of at least 8 windows, the sums that the statistic takes.
    """
    halves = []
    size = 1
    while len(sums_W4) >= FEW * size:
        batches = len(sums_W4) // size
        sums_B4 = sums_W4[-batches * size :].reshape(batches, size, 4).sum(1)
        figure = interval(sums_B4, of)
        assert figure is not None and figure.high is not None
        halves.append(figure.high - figure.mean)
        size *= 2
    mean = float(of(sums_W4.sum(0)))
    is_doubtful = len(halves) < 2 or max(halves) == halves[-1] > 0
    return Widest(bounded(mean, max(halves), bounds), is_doubtful)
