"""Other programs' results: pytest's, and the tables of two other benchmarks."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import harness
from benchmarks.gpu_parts.shapes import SHAPES, Row, drafter_of, llama
from benchmarks.training.recipe import WORKLOADS
from specdec.drafter import save_drafter

CUDA_TESTS = "test_flex_is_the_dense_oracle or test_a_gpu_runs_cuda_graphs"


def cuda_tests() -> Iterator[Row]:
    """Return pytest's last line; on a machine without a GPU it says that they were skipped.

    Raises:
        ValueError: one failed.
    """
    tests = ["tests/nn/test_kernels.py", "tests/decoding/test_session.py"]
    flags = ["-n0", "-p", "no:cacheprovider", "-m", "slow or not slow", "-k", CUDA_TESTS]
    command = [sys.executable, "-m", "pytest", *flags, *tests]
    done = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True, check=False)
    said = (done.stdout + done.stderr).strip().splitlines()[-1:]
    if done.returncode:
        raise ValueError(f"pytest ended with {done.returncode}: {said}")
    yield said


def quick_start(device: str) -> Iterator[Row]:
    """Run ``specdec quickstart``, which takes the GPU where there is one, and return what it measured.

    Raises:
        ValueError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "specdec", "quickstart", "--out", f"{folder}/run"]
        begin = time.perf_counter()
        done = subprocess.run(
            command, cwd=harness.ROOT, capture_output=True, text=True, check=False
        )
        took = time.perf_counter() - begin
        if done.returncode:
            words = (done.stderr + done.stdout).strip().splitlines()[-3:]
            raise ValueError(f"ended with {done.returncode}: {' '.join(words)}")
        metrics = json.loads(Path(folder, "run/evaluation/metrics.json").read_text())
    (result,) = metrics["results"]
    equal = f"{result['identical_outputs']} of {result['compared_outputs']}"
    length = f"acceptance length {result['acceptance_length']['mean']:.2f}"
    yield f"specdec quickstart, {device}", f"{took:.1f}", length, equal


def _report(script: str, *arguments: str) -> Iterator[Row]:
    """Return the tables of another benchmark's report, line by line; ValueError if it failed."""
    command = [sys.executable, str(harness.ROOT / "benchmarks" / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise ValueError(words[-1])
    for line in done.stdout.splitlines():
        if line.startswith(("|", "##")):
            yield [f"#{line}\n" if line.startswith("#") else line]


def beside_peers(name: str, device: str, python: str) -> Iterator[Row]:
    """Return the table of ``benchmarks/train_step.py``."""
    workload = name if name in WORKLOADS else "T"
    options = f"--device={device}", f"--peers={python}", "--dtypes=bfloat16", "--masks=all"
    yield from _report("train_step.py", *options, "--workloads", workload)


def beside_vllm(name: str, device: str, python: str, tokens: int) -> Iterator[Row]:
    """Return the table of ``benchmarks/decode.py`` of a random target and drafter, written for both."""
    shape = SHAPES[name]
    with tempfile.TemporaryDirectory() as folder:
        target = llama(shape, shape.layers, torch.bfloat16, device)
        target.model.save_pretrained(f"{folder}/target")
        save_drafter(drafter_of(target, shape, torch.bfloat16), f"{folder}/drafter")
        places = f"--target={folder}/target", f"--drafter={folder}/drafter", f"--vllm={python}"
        del target
        few = f"--tokens={tokens}", "--dtypes=bfloat16", "--count=4", f"--device={device}"
        systems = "--systems", "specdec", "specdec-chain3", "vllm", "vllm-eagle3"
        yield from _report("decode.py", *places, *few, *systems)
