"""What ``specdec watch`` says: lines of text or JSON, and gauges for Prometheus."""

import io
import json
import select
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from specdec.data.rows import read_text
from specdec.engines.scrape import Counters
from specdec.engines.watch_reference import Reference
from specdec.report.tables import with_interval
from specdec.utils.files import write_text

GAUGE = "specdec_watch_"


class Window(NamedTuple):
    """What a server counted over some time, and the reference."""

    counters: Counters
    reference: Reference | None
    accepts_less: bool = False
    begin: float | None = None  # Unix time, of a verdict


class Event(NamedTuple):
    """One thing that a watch says.

    ``kind`` is reference, start, idle, window, verdict, restart (of the server), away or back.
    """

    kind: str
    time: float  # Unix time
    text: str
    window: Window | None = None


class Output:
    """Writes events to standard output, and the latest figures to a file.

    Args:
        url: the server's.
        format: text or jsonl.
        gauges: the file; it is written again with every window.

    Raises:
        ValueError: the file exists and is another's.
    """

    def __init__(self, url: str, format: str, gauges: Path | None) -> None:
        if gauges and gauges.exists() and not read_text(gauges).startswith(f"# TYPE {GAUGE}"):
            raise ValueError(
                f"--prometheus {gauges}: it exists and is another file: choose another name"
            )
        self._url = url
        self._line = json_line if format == "jsonl" else text_line
        self._gauges = gauges
        self._window: Window | None = None

    def is_unread(self) -> bool:
        """Whether no one reads what is written: its reader has ended, and there is no file of gauges."""
        if self._gauges:
            return False
        try:
            descriptor = sys.stdout.fileno()
        except io.UnsupportedOperation:  # it is no file
            return False
        pipe = select.poll()
        pipe.register(descriptor, 0)
        return any(state & select.POLLERR for _, state in pipe.poll(0))

    def say(self, event: Event) -> None:
        """Write one event."""
        sys.stdout.write(f"{self._line(event)}\n")
        sys.stdout.flush()
        if event.kind == "window":
            self._window = event.window
        if event.kind == "restart":
            self._window = None
        if self._gauges and event.kind not in ("idle", "verdict"):
            write_text(self._gauges, gauges(self._url, event.kind != "away", self._window))


def text_line(event: Event) -> str:
    """Return an event as a line for people."""
    at = _clock(event.time)
    if event.window is None:
        return f"{at}  {event.text}"
    if event.kind == "verdict":
        return f"{at}  {_verdict(event.window)}"
    counters = event.window.counters
    shares = " ".join(f"{100 * share:.0f}" for share in counters.shares())
    positions = f", by position {shares} %" if shares else ""
    state = event.text or _state(event.window)
    return f"{at}  {counters.length:.2f} tokens per pass{positions}, {counters.passes:,.0f} passes: {state}"


def _state(window: Window) -> str:
    """Return where a window lies, which is no verdict: single windows leave the interval by chance."""
    assert window.reference and window.reference.length.low
    if window.accepts_less:
        return "accepts less than in the reference"
    if window.counters.length < window.reference.length.low:
        return "below the interval, no verdict yet"
    return "fits"


def _verdict(window: Window) -> str:
    assert window.reference and window.begin
    known = with_interval(*window.reference.length, "{:.2f}".format)
    return (
        f"The drafter accepts less than in the reference: {window.counters.length:.2f} tokens per pass against "
        f"{known}, since {_clock(window.begin)}."
    )


def _clock(unix: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix))


def json_line(event: Event) -> str:
    """Return an event as a line of JSON."""
    row: dict[str, Any] = {"event": event.kind, "time": event.time}
    if event.text:
        row["message"] = event.text
    if event.window:
        row |= _figures(event.window)
    return json.dumps(row, allow_nan=False)


def _figures(window: Window) -> dict[str, Any]:
    counters = window.counters
    row: dict[str, Any] = {
        "engine": counters.engine,
        "passes": counters.passes,
        "acceptance_length": counters.length,
        "accepted_per_position": counters.shares(),
        "accepts_less": window.accepts_less,
    }
    if window.reference:
        positions = [share._asdict() for share in window.reference.by_position]
        row["reference"] = {
            "acceptance_length": window.reference.length._asdict(),
            "accepted_per_position": positions,
        }
    if window.begin:
        row["since"] = window.begin
    return row


def gauges(url: str, is_up: bool, window: Window | None) -> str:
    """Return a page of gauges with the latest figures; those that are not known are left out.

    Args:
        url: the server's, a label of each.
    """
    rows: list[tuple[str, int | None, float]] = [
        ("up", None, is_up),
        ("accepts_less", None, window is not None and window.accepts_less),
    ]
    if window:
        rows.append(("acceptance_length", None, window.counters.length))
        shares = enumerate(window.counters.shares(), start=1)
        rows += [("accepted_share", position, share) for position, share in shares]
    if window and window.reference:
        mean, low, high = window.reference.length
        rows.append(("reference_acceptance_length", None, mean))
        rows.append(("reference_acceptance_length_low", None, low or mean))
        rows.append(("reference_acceptance_length_high", None, high or mean))
        known = enumerate(window.reference.by_position, start=1)
        rows += [("reference_accepted_share", position, share.mean) for position, share in known]
    lines = []
    last = ""
    for name, position, value in rows:
        if name != last:
            lines.append(f"# TYPE {GAUGE}{name} gauge")
        last = name
        where = "" if position is None else f',position="{position}"'
        lines.append(f"{GAUGE}{name}{{url={json.dumps(url)}{where}}} {float(value):g}")
    return "\n".join(lines) + "\n"
