"""Messages: how many of what, how long, and which tensors are not as they should be."""

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence

# an escape sequence of a terminal; what else moves its cursor, hides or turns text round, or is no character at all
_UNPRINTABLE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]P_^X][^\x07\x1b]*(?:\x07|\x1b\\)?|"
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Foreign text without what a terminal would obey rather than show; line breaks and tabs stay."""
    return _UNPRINTABLE.sub("", text)


def nearest_name(name: str, names: Iterable[str], start: str = "") -> str:
    """``did you mean ...?`` with the nearest of some names, behind ``start``; empty if none is near."""
    close = difflib.get_close_matches(name, sorted(set(names)), n=1)
    return f"did you mean {start}{close[0]}?" if close else ""


def plural(noun: str) -> str:
    """Of an English noun whose plural is regular: rows, passes, boundaries."""
    if re.search(r"[^aeiou]y$", noun):
        return f"{noun[:-1]}ies"
    return noun + ("es" if re.search(r"(s|x|ch|sh)$", noun) else "s")


def how_many(number: int, noun: str) -> str:
    """``1 row``, ``1,234 rows``; of several words the last is the noun."""
    return f"{number:,} {noun if number == 1 else plural(noun)}"


def duration(seconds: float) -> str:
    """``45 s``, ``3 min``, ``2 h 5 min``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def three_digits(number: float) -> str:
    """``0.123``, ``12.3``, ``45,700``, ``8.03 billion``: three significant digits. Smaller integers stay exact."""
    if isinstance(number, int) and number < 10_000:
        return f"{number:,}"
    for unit, name in ((1e12, " trillion"), (1e9, " billion"), (1e6, " million")):
        if number >= unit:
            return _digits(number / unit) + name
    return _digits(number)


def byte_text(size: float) -> str:
    """``512 bytes``, ``1.50 MB``, ``16.1 GB``: in decimal units."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{_digits(size / unit)} {name}"
    return f"{size:.0f} bytes"


def seconds_text(seconds: float) -> str:
    """``1.20 ms``, ``45.0 s``, ``3.50 min``, ``2.08 h``."""
    for unit, name in ((3600, "h"), (60, "min"), (1, "s")):
        if seconds >= unit:
            return f"{_digits(seconds / unit)} {name}"
    return f"{_digits(1000 * seconds)} ms"


def _digits(number: float) -> str:
    """Return three significant digits; zeros stand for those that follow before the point."""
    places = 2 - math.floor(math.log10(number)) if number > 0 else 0
    return f"{round(number, places):,.{max(0, places)}f}"


def tensor_fault(
    found: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]]
) -> str | None:
    """The tensors, by name and shape, that are missing, are there besides or have another shape; None if none is."""
    faults = []
    missing = [name for name in wanted if name not in found]
    unknown = sorted(set(found) - set(wanted))
    if missing:
        first = missing[0]
        near = difflib.get_close_matches(first, unknown, n=1)
        named = f"it lacks {first} {list(wanted[first])}" + (f" (is it {near[0]}?)" if near else "")
        others = (
            f" and {how_many(len(missing) - 1, 'more tensor')}: {_some(missing[1:])}"
            if missing[1:]
            else ""
        )
        faults.append(named + others)
    if unknown:
        faults.append(f"it has weights without a place: {_some(unknown)}")
    for name in [] if faults else wanted:
        if list(found[name]) != list(wanted[name]):
            faults.append(f"{name} is {list(found[name])}, the config says {list(wanted[name])}")
            break
    return "; ".join(faults) or None


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + ", ..." * (len(names) > 6)
