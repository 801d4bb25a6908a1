"""What produced a result: date, command, machine, versions and the commit, so that every run can be rerun."""

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
from specdec.utils import command as current_command
from specdec.utils import machine as host

DISTRIBUTIONS = (
    "torch",
    "lightning",
    "transformers",
    "tokenizers",
    "datasets",
    "torchmetrics",
    "safetensors",
    "numpy",
    "jsonargparse",
    "omegaconf",
)


def provenance(command: list[str] | None = None, seed: int | None = None) -> dict[str, Any]:
    """Describe this process and the code it runs; JSON-ready, and never fails.

    Args:
        command: the command line, the one that was typed when None.
        seed: the seed of the run, None where it has none.

    Returns:
        ``date`` (UTC, ISO 8601), ``command``, ``seed``, ``python``, ``platform``, ``cpu``, ``cores`` (that this
        process may use), ``torch_threads`` and ``gpus`` (None where torch, or CUDA, is not in use by now),
        ``versions`` (None: not installed), ``git_commit`` and ``git_dirty`` (None: the package does not lie in
        a git checkout of its own, or git cannot be run; untracked files count as dirty).
    """
    commit, dirty = _git(Path(__file__).resolve().parents[2])
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(current_command.current if command is None else command),
        "seed": seed,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": host.cores(),
        **_torch_in_use(),
        "versions": {"specdec": __version__} | {name: _version(name) for name in DISTRIBUTIONS},
        "git_commit": commit,
        "git_dirty": dirty,
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(models), platform.processor()) or None


def _torch_in_use() -> dict[str, Any]:
    """Asks torch only if somebody imported it already, and CUDA only if somebody started it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {"torch_threads": None, "gpus": None}
    gpus = None
    if torch.cuda.is_initialized():
        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"torch_threads": torch.get_num_threads(), "gpus": gpus}


def _git(checkout: Path) -> tuple[str | None, bool | None]:
    """Commit and dirty flag of ``checkout``; a repository around a virtual environment does not count."""
    if not (checkout / ".git").exists():
        return None, None
    # inside a git hook these variables would point at another repository
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment["GIT_OPTIONAL_LOCKS"] = "0"

    def ask(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, timeout=20, check=True)
        return done.stdout.decode("utf-8", errors="replace").strip()

    try:
        return ask("rev-parse", "--verify", "HEAD"), bool(ask("status", "--porcelain"))
    except (OSError, subprocess.SubprocessError):
        return None, None
