"""A process that measures, seen from inside: only Python itself, for it also runs in the environments of others."""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

BUSY = (0, 1, 2, 5, 6, 7)  # of /proc/stat's columns: all but idle and waiting for a disk; 7 is what a host took away
OTHERS = 0.05  # of the machine, used by others during an act: more is warned of

T = TypeVar("T")


class Spent(NamedTuple):
    """By one act."""

    seconds: float
    cpu_seconds: float
    others: float  # the share of the machine that other processes used meanwhile


def machine_seconds() -> float:
    """CPU seconds that all processes of this machine have used."""
    with open("/proc/stat") as lines:
        columns = [int(x) for x in lines.readline().split()[1:]]
    return sum(columns[i] for i in BUSY) / os.sysconf("SC_CLK_TCK")


def timed(act: Callable[[], T]) -> tuple[T, Spent]:
    """Do it; what it returns, and what it took."""
    machine, own, begin = machine_seconds(), time.process_time(), time.perf_counter()
    out = act()
    wall, own, machine = time.perf_counter() - begin, time.process_time() - own, machine_seconds() - machine
    cores = os.cpu_count() or 1
    ticks = cores / os.sysconf("SC_CLK_TCK")  # the kernel counts whole ticks of each core
    return out, Spent(wall, own, max(0.0, machine - own - ticks) / (wall * cores))


def serve(start: Callable[[dict[str, Any]], tuple[dict[str, Any], Callable[[Any], Any]]]) -> None:
    """Speak lines of JSON on standard output until the input ends; whatever else is printed goes to standard error.

    Args:
        start: from the job on the command line to what is said first, and what answers each line of standard input.
    """
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    about, answer = start(json.loads(sys.argv[1]))
    print(json.dumps(about), file=replies)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=replies)
