"""``python -m benchmarks.gpu_parts PART JSON``: run a part, and write each of its lines to standard output as it comes.

A line of standard output is the JSON of one line of the part's table. Whatever else is printed goes to standard error.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator

from benchmarks.gpu_parts import attention, beside, decoding, end_to_end, proofs, training
from benchmarks.gpu_parts.shapes import Row

PARTS: dict[str, Callable[..., Iterator[Row]]] = {
    "attention": attention.attention,
    "training": training.training,
    "decoding": decoding.decoding,
    "proofs": proofs.proofs,
    "end_to_end": end_to_end.end_to_end,
    "quick_start": beside.quick_start,
    "cuda_tests": beside.cuda_tests,
    "peers": beside.beside_peers,
    "vllm": beside.beside_vllm,
}


def main(part: str, options: str) -> None:
    """Run a part with these keyword arguments."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for row in PARTS[part](**json.loads(options)):
        print(json.dumps(row), file=lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
