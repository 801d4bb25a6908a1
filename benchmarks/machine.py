"""Where a run took place."""

import os
from pathlib import Path
from typing import Any

from specdec.provenance import provenance


def machine(threads: int) -> dict[str, Any]:
    """CPU, cores, memory, threads, date, command, commit, versions and load; JSON-ready."""
    found = provenance()
    return {
        "date": found["date"],
        "command": f"python {found['command']}",
        "git_commit": found["git_commit"],
        "git_dirty": found["git_dirty"],
        "cpu": found["cpu"],
        "cores": found["cores"],
        "threads": threads,
        "memory_gb": round(memory_gb("MemTotal"), 1),
        "platform": found["platform"],
        "python": found["python"],
        "load_at_start": load(),
    }


def load() -> list[float]:
    """Load averages over 1, 5 and 15 minutes."""
    return [round(x, 2) for x in os.getloadavg()]


def memory_gb(field: str) -> float:
    """``MemTotal``, or ``MemAvailable``, which a new process could take; GB of 10^9 bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e9


def check_memory(name: str, needs_gb: float) -> None:
    """Raise ValueError unless so much is free."""
    free = memory_gb("MemAvailable")
    if free < needs_gb:
        raise ValueError(
            f"{free:.1f} GB of memory are free, {name} wants {needs_gb} GB: measure fewer --systems at once"
        )
