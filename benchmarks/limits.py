"""What this machine can do at best, measured in the run whose figures are told as a share of it.

Two limits: floating-point operations per second of a matrix product, by dtype, and bytes read per second. A training
step is bound by the first, decoding one text at a time by the second.

``python benchmarks/limits.py`` prints both. Other benchmarks start it as a worker next to what they measure.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# the folder of `benchmarks`, which is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness

TRIAL_SECONDS = 0.3
TRIALS = 5
# of the square products; the best one counts
SIZES = (768, 1536, 3072)
READ_BYTES = 64 << 20  # beyond the caches of most processors
DTYPES = ("float32", "bfloat16")


# --- in the worker ---------------------------------------------------------------------------------------------------


def best_seconds(act: Callable[[], Any], trial_seconds: float = TRIAL_SECONDS) -> float:
    """Seconds of one call, of the fastest of some trials that repeat it."""
    act()
    trials = []
    for _ in range(TRIALS):
        calls = 0
        begin = time.perf_counter()
        while (spent := time.perf_counter() - begin) < trial_seconds:
            act()
            calls += 1
        trials.append(spent / calls)
    return min(trials)


def product_rate(dtype: str) -> float:
    """FLOP/s of square products, at the best size and with the faster of torch's libraries."""
    import torch

    from specdec.utils.machine import multiplies_bfloat16

    settings = ["highest"]
    # lets oneDNN multiply float32, which it rounds only where the processor multiplies bfloat16
    if dtype == "float32" and not multiplies_bfloat16():
        settings.append("medium")
    rates = []
    for size in SIZES:
        left, right = (torch.randn(size, size).to(getattr(torch, dtype)) for _ in range(2))
        for setting in settings:
            torch.set_float32_matmul_precision(setting)
            seconds = best_seconds(lambda a=left, b=right: torch.nn.functional.linear(a, b))
            rates.append(2 * size**3 / seconds)
    torch.set_float32_matmul_precision("highest")
    return max(rates)


def read_rate(number_bytes: int) -> float:
    """Bytes per second of reading a float32 array of this size, by the faster of a sum and a product with a vector."""
    import torch

    numbers = torch.ones(number_bytes // 4)
    matrix = numbers[: len(numbers) // 1024 * 1024].view(-1, 1024)
    vector = torch.ones(1024)
    read = numbers.nbytes
    return max(read / best_seconds(numbers.sum), read / best_seconds(lambda: matrix @ vector))


def start(job: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Any], dict[str, Any]]]:
    """The worker: answers which rates are asked for."""
    import torch

    torch.set_num_threads(job["threads"])

    def answer(question: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "flops": {dtype: product_rate(dtype) for dtype in question["dtypes"]},
            "read": {str(size): read_rate(size) for size in question["read"]},
        }

    return {}, answer


# --- in the parent ---------------------------------------------------------------------------------------------------


def ask(threads: int, dtypes: Sequence[str], read: Sequence[int], log: Path) -> dict[str, Any]:
    """The machine's limits with so many threads, measured by a process that ends again.

    Args:
        read: sizes in bytes.

    Returns:
        ``flops``, FLOP/s by dtype, and ``read``, bytes per second by size.
    """
    harness.tell("measuring the machine's limits")
    job = {"threads": threads}
    with harness.Worker(sys.executable, "limits", Path(__file__).resolve(), job, log) as worker:
        limits: dict[str, Any] = worker.ask({"dtypes": list(dtypes), "read": list(read)})
    return limits


def lines(limits: Mapping[str, Any]) -> list[str]:
    """Lines of Markdown that name the limits."""
    products = [f"{rate / 1e9:.0f} GFLOP/s in {dtype}" for dtype, rate in limits["flops"].items()]
    reads = [
        f"{rate / 1e9:.1f} GB/s of {int(size) / 1e6:.0f} MB"
        for size, rate in limits["read"].items()
    ]
    parts = []
    if products:
        parts.append(f"matrix products at {', '.join(products)}")
    if reads:
        parts.append(f"memory read at {', '.join(reads)}")
    return [f"- The machine's limits, in the same run: {'; '.join(parts)}"]


def main() -> int:
    """Print the limits; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--read", nargs="+", type=int, default=[READ_BYTES], help="sizes in bytes")
    options = parser.parse_args()
    about = harness.machine(options.threads)
    limits = ask(options.threads, options.dtypes, options.read, Path("/dev/null"))
    print("\n".join([*harness.conditions(about, {}), *lines(limits)]))
    return 0


if __name__ == "__main__":
    if "--worker" in sys.argv:
        harness.serve(start)
    else:
        sys.exit(main())
