"""What a result was made with: date, command, commit, versions, and what the machine has for this process."""

import contextlib
import datetime
import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from specdec import __version__
from specdec.utils import trust
from specdec.utils.reading import digest, sha256
from specdec.utils.trust import redacted_words

DISTRIBUTIONS = (
    "torch", "lightning", "transformers", "tokenizers", "datasets", "torchmetrics", "safetensors", "numpy",
    "jsonargparse", "omegaconf",
)  # fmt: skip
# decide the numbers of a job
LIBRARIES = ("specdec", "torch", "lightning", "transformers", "tokenizers")
PACKAGE = Path(__file__).parents[1]
OF_CODE = (".py", ".yaml", ".jinja", ".txt", ".jsonl")
command_line: list[str] = list(sys.argv)
"""The command line as typed, for the record of what it makes; :func:`specdec.cli.main` sets it."""


def provenance(seed: int | None = None) -> dict[str, Any]:
    """Describe this process and the code it runs, so that it can be rerun; JSON-ready.

    Returns:
        ``date`` (UTC, ISO 8601), ``command`` (as typed, without secrets), ``seed``, ``python``, ``platform``, ``cpu``,
        ``cores`` (that this process may use), ``torch_threads`` and ``gpus`` (None where torch, or CUDA, is not used),
        ``versions``, ``git_commit`` and ``git_dirty`` (None: the package does not lie in its own git checkout, or
        git cannot be run; untracked files count as dirty).
    """
    commit, dirty = _loaded_code()
    torch = sys.modules.get("torch")  # imported by somebody, or not at all
    in_use = torch is not None and torch.cuda.is_initialized()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(redacted_words(command_line)),
        "seed": seed,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": cores(),
        "torch_threads": torch.get_num_threads() if torch else None,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if torch and in_use
        else None,
        "versions": {"specdec": __version__} | _versions(),
        "git_commit": commit,
        "git_dirty": dirty,
    }


@functools.cache
def code_version() -> dict[str, Any]:
    """The code that runs, Python included: the embedded data is its library.

    A checkout with changes is known by what its files hold: git's commit does not tell two changes apart.
    """
    facts = provenance()
    code = {name: facts[name] for name in ("git_commit", "git_dirty", "python")}
    versions = {name: facts["versions"][name] for name in LIBRARIES}
    return code | {"versions": versions, "files": files_of_code(PACKAGE)}


def files_of_code(package: Path) -> str:
    """SHA-256 of what a package's modules, and the files that they read, hold."""
    files = sorted(file for file in package.rglob("*") if file.suffix in OF_CODE)
    return digest([[file.relative_to(package).as_posix(), sha256(file)] for file in files])


def allowed_modules() -> dict[str, str]:
    """SHA-256 of the modules that ``--allow_imports`` names."""
    modules = {}
    for name in trust.permissions[-1].imports:
        module = importlib.util.find_spec(name)
        assert module is not None, f"{name} has been imported"
        folders = [Path(folder) for folder in module.submodule_search_locations or ()]
        if folders:
            modules[name] = digest([files_of_code(folder) for folder in folders])
        elif module.has_location and module.origin:
            modules[name] = sha256(module.origin)
    return modules


def loaded_code() -> dict[str, Any]:
    """What this process runs, wherever it lies: the package's files, versions and Python."""
    version = code_version()
    return {name: version[name] for name in ("files", "versions", "python")}


@functools.cache
def _loaded_code() -> tuple[str | None, bool | None]:
    """Commit and dirty flag of the code that this process has loaded, read once: what changes later does not run."""
    return _git(Path(__file__).resolve().parents[2])


@functools.cache
def _versions() -> dict[str, str]:
    """Of those that are installed; read once, for it takes longer than all the rest."""
    versions = {}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    text = cpuinfo.read_text(errors="replace") if cpuinfo.is_file() else ""
    model = re.search(r"^model name\s*: (.+)", text, re.MULTILINE)
    return model[1] if model else platform.processor() or None


def _git(checkout: Path) -> tuple[str | None, bool | None]:
    """Commit and dirty flag of ``checkout``; a repository around a virtual environment does not count."""
    if not (checkout / ".git").exists():
        return None, None
    # inside a git hook these variables would point at another repository
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = [
        "git",
        "--no-optional-locks",
        "-C",
        str(checkout),
        "status",
        "--porcelain=v2",
        "--branch",
    ]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None, None
    lines = done.stdout.splitlines()
    commit = next(
        line.removeprefix("# branch.oid ") for line in lines if line.startswith("# branch.oid ")
    )
    return (
        (None, None)
        if commit == "(initial)"
        else (commit, any(not line.startswith("#") for line in lines))
    )


def cores() -> int | None:
    """That this process may use; None where the system does not say."""
    # none on macOS
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def multiplies_bfloat16() -> bool:
    """Whether this CPU has x86's instructions for products in bfloat16 (AVX512_BF16 or AMX).

    torch takes some 70 times float32's time for them on one with AVX2 alone. What it takes on ARM has not been tried.
    """
    import torch  # takes a second, which not all callers of this module have

    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))
