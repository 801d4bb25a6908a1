"""A test module run as a program by several processes of one job."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


def launch(module: str, out: Path, processes: int = 2) -> None:
    """Run ``python -m module OUT`` in every process of a torchrun job, and fail if one fails or they hang."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
    ]
    with subprocess.Popen(
        [*command, "-m", module, str(out)],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=200)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its processes
            pytest.fail(f"two processes hang: {process.communicate()[0][-2000:]}")
    assert process.returncode == 0, said[-4000:]
