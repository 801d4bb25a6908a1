"""``specdec watch``: whether a served drafter still accepts what it did, from the server's own counters."""

import contextlib
import functools
import math
import time
from collections import deque
from pathlib import Path
from typing import Literal

import numpy as np

from specdec.engines.client import Endpoint, RequestError
from specdec.engines.scrape import Counters, metrics_endpoint, read_counters
from specdec.engines.watch_output import Event, Output, Window
from specdec.engines.watch_reference import Reference, read_reference, reference_of
from specdec.report.sequential import FEW, RECENT, FallTest
from specdec.utils.numbers import Count, Positive
from specdec.utils.signals import StopRequested, stop_on_signals

ACCEPTS_LESS = 3  # exit status
QUIET = 60.0  # seconds without drafts after which a watch says so


def watch(
    url: str, *, reference: Path | None = None, reference_shape: str | None = None, baseline: Count = 5000,
    every: Positive = 2.0, window: Count = 250, seconds: Positive | None = None, once: bool = False,
    fail: bool = False, format: Literal["text", "jsonl"] = "text", prometheus: Path | None = None,
) -> int:  # fmt: skip
    """Watch a running server of vLLM, SGLang or llama.cpp, and report when its drafter accepts less than before.

    Reads the server's /metrics again and again and shows acceptance length and acceptance by position next to those of
    an evaluation, or of the server's own first passes. The verdict is a sequential test: while acceptance stays in the
    reference's interval, it is wrong with a probability of at most 5 %, however long the watch lasts. The exit status
    is 3 if the drafter accepted less when the watch ended, else 0. docs/serve.md says what the test assumes.

    Example: specdec watch http://127.0.0.1:8000 --reference runs/a/evaluation

    Args:
        url: the server, as http://127.0.0.1:8000; a key goes into $VLLM_API_KEY or $LLAMA_API_KEY
        reference: directory of an evaluation; without it the server's first passes are the reference
        reference_shape: the evaluation's draft shape, as chain:depth=3, if it has several
        baseline: target passes that are the reference without --reference
        every: seconds between two reads of /metrics
        window: target passes of a window at least; let it hold some answers of each user
        seconds: end after this time; by default Ctrl-C ends the watch
        once: show what the server has counted since it started, and end; without a verdict
        fail: end as soon as the drafter accepts less
        format: text for people, or jsonl
        prometheus: a file that always has the latest figures, for the textfile collector of node_exporter
    """
    if reference_shape and not reference:
        raise ValueError("--reference_shape is one of an evaluation: give --reference as well")
    endpoint = metrics_endpoint(url)
    output = Output(endpoint.url, format, prometheus)
    known = read_reference(reference, reference_shape) if reference else None
    if known:
        output.say(Event("reference", time.time(), str(known)))
    watcher = Watcher(known, baseline, window)
    if once:
        output.say(watcher.totals(read_counters(endpoint), time.time()))
        return 0
    end = time.monotonic() + (seconds or math.inf)
    with contextlib.suppress(StopRequested), stop_on_signals():  # Ctrl-C is how a watch ends
        _look_until(end, endpoint, watcher, output, every, fail)
    return ACCEPTS_LESS if watcher.accepts_less else 0


def _look_until(
    end: float, endpoint: Endpoint, watcher: "Watcher", output: Output, every: float, fail: bool
) -> None:
    """Look at the server until the monotonic clock says ``end`` or, with ``fail``, its drafter accepts less."""
    is_away = False
    while not (fail and watcher.accepts_less) and not output.is_unread():
        begin = time.monotonic()
        try:
            counters = read_counters(endpoint)
        except ValueError as error:
            # Later on, a refusal or a page without counters is of a server that starts or is replaced.
            if not watcher.has_begun and not _may_pass(error):
                raise
            if not is_away:
                output.say(Event("away", time.time(), f"{error} (asked again every {every:g} s)"))
            is_away = True
        else:
            if is_away:
                output.say(Event("back", time.time(), "the server answers again"))
            is_away = False
            for event in watcher.look(counters, time.time()):
                output.say(event)
        due = begin + every
        if due >= end:
            return
        time.sleep(max(0.0, due - time.monotonic()))


def _may_pass(error: ValueError) -> bool:
    """Whether a server that answers so is away, starts or is busy, so that it may answer otherwise later."""
    if not isinstance(error, RequestError):
        return False
    return error.status is None or error.status == 429 or error.status >= 500


class Watcher:
    """What a watch has seen; :meth:`look` takes one page of counters and returns what is to be said.

    Args:
        reference: None for the first ``baseline`` passes of the server.
        window: passes of a window, at least.
    """

    def __init__(self, reference: Reference | None, baseline: int, window: int) -> None:
        if baseline > RECENT * window:
            raise ValueError(
                f"--baseline {baseline} is more than {RECENT} windows of --window {window}: lower it, or raise --window"
            )
        self.reference = reference
        self.accepts_less = False
        self._learns = reference is None
        self._baseline = baseline
        self._passes = window
        self._test = FallTest(reference.low, reference.variance) if reference else None
        self._last: Counters | None = None
        self._pending: Counters | None = None
        # the last ones, and the time at which each began
        self._windows: deque[tuple[float, Counters]] = deque(maxlen=RECENT)
        self._begin = 0.0  # of the pending window
        self._active = 0.0  # the time of the last draft
        self._is_idle = False

    @property
    def has_begun(self) -> bool:
        """Whether a page was read."""
        return self._last is not None

    def totals(self, counters: Counters, now: float) -> Event:
        """Return what a server has counted since it started."""
        self._check_depth(counters)
        if not counters.passes:
            return Event("idle", now, "no drafts yet")
        return Event("window", now, "since the server started", Window(counters, self.reference))

    def look(self, counters: Counters, now: float) -> list[Event]:
        """Take a page into account."""
        earlier = self._last
        self._last = counters
        if earlier is None:
            self._check_depth(counters)
            self._begin = now
            self._active = now
            known = f"{counters.passes:,.0f} passes so far" if counters.passes else "no drafts yet"
            return [Event("start", now, f"{counters.engine}: {known}")]
        grown = counters.since(earlier)
        if grown is None:
            return [self._restart(counters, now)]
        self._check_depth(counters)
        done = self._pending.add(grown) if self._pending else grown
        if not done.passes:
            self._begin = now
        if done.passes < self._passes:
            self._pending = done
            return self._quiet(grown.passes > 0, now)
        self._windows.append((self._begin, done))
        self._pending = None
        self._begin = now
        self._quiet(has_drafts=True, now=now)
        return self._judge(done, now) if self._test else self._learn(done, now)

    def _quiet(self, has_drafts: bool, now: float) -> list[Event]:
        """Say once that there are no drafts for a while."""
        if has_drafts:
            self._active = now
            self._is_idle = False
        elif now - self._active >= QUIET and not self._is_idle:
            self._is_idle = True
            return [Event("idle", now, f"no drafts for {QUIET:g} s")]
        return []

    def _check_depth(self, counters: Counters) -> None:
        """Raise ValueError if the server drafts another number of tokens than the reference."""
        if self._drafts_otherwise(counters):
            assert self.reference
            served = len(counters.by_position)
            known = len(self.reference.by_position)
            raise ValueError(
                f"the server drafts {served} tokens a pass, the reference {known}: evaluate with "
                f"--shape chain:depth={served}"
            )

    def _drafts_otherwise(self, counters: Counters) -> bool:
        """Whether the server drafts another number of tokens than the reference, where both are known."""
        served = len(counters.by_position)
        known = len(self.reference.by_position) if self.reference else 0
        return 0 < served != known > 0

    def _restart(self, counters: Counters, now: float) -> Event:
        """Begin again at a server's start: what it serves now may be another drafter."""
        if self._learns and self._drafts_otherwise(counters):
            # the first passes say nothing of drafts of another number
            self.reference = None
            self._test = None
        self._check_depth(counters)
        self._pending = None
        self._windows.clear()
        self._begin = now
        self._quiet(has_drafts=True, now=now)
        self.accepts_less = False
        if self._test:
            self._test.restart()
        return Event(
            "restart",
            now,
            "the counters began again: the server was restarted, and so is this watch",
        )

    def _learn(self, done: Counters, now: float) -> list[Event]:
        """Collect the windows of the reference."""
        passes = sum(counters.passes for _, counters in self._windows)
        progress = f"reference, {min(passes, self._baseline):,.0f} passes of {self._baseline:,}"
        events = [Event("window", now, progress, Window(done, None))]
        if passes >= self._baseline and len(self._windows) >= FEW:
            rows = [(part.passes, part.accepted, *part.by_position) for _, part in self._windows]
            self.reference = reference_of(f"the first {passes:,.0f} passes", np.array(rows))
            self._test = FallTest(self.reference.low, self.reference.variance)
            self._windows.clear()
            events.append(Event("reference", now, str(self.reference)))
        return events

    def _judge(self, done: Counters, now: float) -> list[Event]:
        """Test a window; the verdict stays until the server is restarted."""
        assert self._test and self.reference
        self._test.add(done.passes, done.accepted)
        fallen = self._test.has_fallen and not self.accepts_less
        self.accepts_less |= fallen
        events = [Event("window", now, "", Window(done, self.reference, self.accepts_less))]
        if fallen:
            known = list(self._windows)[self._test.begin - self._test.windows :]
            begin = known[0][0]
            since = functools.reduce(Counters.add, (part for _, part in known))
            events.append(
                Event("verdict", now, "", Window(since, self.reference, self.accepts_less, begin))
            )
        return events
