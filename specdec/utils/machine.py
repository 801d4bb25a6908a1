"""What the machine has for this process: cores, memory as the kernel and the control group leave it, instructions."""

import os
from pathlib import Path

PROC, GROUP = Path("/proc"), Path("/sys/fs/cgroup")


def cores() -> int | None:
    """That this process may use; None where the system does not say."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def multiplies_bfloat16() -> bool:
    """Whether this CPU has x86's instructions for products in bfloat16 (AVX512_BF16 or AMX).

    torch takes some 70 times float32's time for them on one with AVX2 alone. What it takes on ARM has not been tried.
    """
    import torch  # takes a second, which not all that ask for memory have

    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))


def memory(proc: Path = PROC, group: Path = GROUP) -> int | None:
    """Bytes in all: the least of the machine's and the control group's; None where the system does not say."""
    return min([*_of_kernel(proc, "MemTotal"), *_limit(group)], default=None)


def free_memory(proc: Path = PROC, group: Path = GROUP) -> int | None:
    """Bytes that could still be taken: the least of what the kernel calls available and what the control group leaves;
    None where the system does not say."""
    left = [max(0, most - _taken(group)) for most in _limit(group)]
    return min([*_of_kernel(proc, "MemAvailable"), *left], default=None)


def _of_kernel(proc: Path, field: str) -> list[int]:
    if not (known := proc / "meminfo").is_file():
        return []
    lines = dict(line.split(":", 1) for line in known.read_text().splitlines())
    return [int(lines[field].split()[0]) * 1024]


def _limit(group: Path) -> list[int]:
    limit = group / "memory.max"
    return [int(most)] if limit.is_file() and (most := limit.read_text().strip()).isdigit() else []


def _taken(group: Path) -> int:
    """What the group holds, without pages of files that the kernel gives up when they are wanted."""
    stat = group / "memory.stat"
    lines = dict(line.split() for line in stat.read_text().splitlines()) if stat.is_file() else {}
    return int((group / "memory.current").read_text()) - int(lines.get("inactive_file", 0))
