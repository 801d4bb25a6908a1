"""Where a run took place."""

import os
from pathlib import Path
from typing import Any

from specdec.provenance import provenance


def machine(threads: int) -> dict[str, Any]:
    """CPU, cores, memory, threads, date, command, commit, versions and load; JSON-ready."""
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    found = provenance()
    return {
        "date": found["date"],
        "command": f"python {found['command']}",
        "git_commit": found["git_commit"],
        "git_dirty": found["git_dirty"],
        "cpu": found["cpu"],
        "cores": found["cores"],
        "threads": threads,
        "memory_gb": round(int(memory.split()[1]) * 1024 / 1e9, 1),
        "platform": found["platform"],
        "python": found["python"],
        "load_at_start": load(),
    }


def load() -> list[float]:
    """Load averages over 1, 5 and 15 minutes."""
    return [round(x, 2) for x in os.getloadavg()]
