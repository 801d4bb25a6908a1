"""What a result was made with: date, command, commit, versions, and what the machine has for this process."""

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from specdec import __version__
from specdec.utils import command

DISTRIBUTIONS = (
    "torch", "lightning", "transformers", "tokenizers", "datasets", "torchmetrics", "safetensors", "numpy",
    "jsonargparse", "omegaconf",
)  # fmt: skip
PROC, GROUP = Path("/proc"), Path("/sys/fs/cgroup")


def provenance(seed: int | None = None) -> dict[str, Any]:
    """Describe this process and the code it runs, so that it can be rerun; JSON-ready, and never fails.

    Args:
        seed: the seed of the run, None where it has none.

    Returns:
        ``date`` (UTC, ISO 8601), ``command`` (as typed), ``seed``, ``python``, ``platform``, ``cpu``, ``cores`` (that
        this process may use), ``torch_threads`` and ``gpus`` (None where torch, or CUDA, is not in use by now),
        ``versions`` (None: not installed), ``git_commit`` and ``git_dirty`` (None: the package does not lie in
        a git checkout of its own, or git cannot be run; untracked files count as dirty).
    """
    commit, dirty = _git(Path(__file__).resolve().parents[2])
    torch = sys.modules.get("torch")  # imported by somebody, or not at all
    in_use = torch is not None and torch.cuda.is_initialized()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command.current),
        "seed": seed,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": cores(),
        "torch_threads": torch.get_num_threads() if torch else None,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch and in_use else None,
        "versions": {"specdec": __version__} | {name: _version(name) for name in DISTRIBUTIONS},
        "git_commit": commit,
        "git_dirty": dirty,
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu(cpuinfo: Path = PROC / "cpuinfo") -> str | None:
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(models), platform.processor()) or None


def _git(checkout: Path) -> tuple[str | None, bool | None]:
    """Commit and dirty flag of ``checkout``; a repository around a virtual environment does not count."""
    if not (checkout / ".git").exists():
        return None, None
    # inside a git hook these variables would point at another repository
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment["GIT_OPTIONAL_LOCKS"] = "0"

    def ask(*arguments: str) -> str:
        line = ["git", "-C", str(checkout), *arguments]
        done = subprocess.run(line, env=environment, capture_output=True, timeout=20, check=True)
        return done.stdout.decode("utf-8", errors="replace").strip()

    try:
        return ask("rev-parse", "--verify", "HEAD"), bool(ask("status", "--porcelain"))
    except (OSError, subprocess.SubprocessError):
        return None, None


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


def free_memory(proc: Path = PROC, group: Path = GROUP) -> int | None:
    """Bytes that could still be taken: the least of what the kernel calls available and what the control group leaves;
    None where the system does not say."""
    left = [max(0, most - _taken(group)) for most in _limit(group)]
    return min([*_available(proc), *left], default=None)


def _available(proc: Path) -> list[int]:
    if not (known := proc / "meminfo").is_file():
        return []
    lines = dict(line.split(":", 1) for line in known.read_text().splitlines())
    return [int(lines["MemAvailable"].split()[0]) * 1024]


def _limit(group: Path) -> list[int]:
    limit = group / "memory.max"
    return [int(most)] if limit.is_file() and (most := limit.read_text().strip()).isdigit() else []


def _taken(group: Path) -> int:
    """What the group holds, without pages of files that the kernel gives up when they are wanted."""
    stat = group / "memory.stat"
    lines = dict(line.split() for line in stat.read_text().splitlines()) if stat.is_file() else {}
    return int((group / "memory.current").read_text()) - int(lines.get("inactive_file", 0))
