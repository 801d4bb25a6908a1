"""The proof of random targets in 16 bits, on the device."""

import time
from collections.abc import Iterator

import torch

from benchmarks.gpu_parts.shapes import SHAPES, Row, llama


def proofs(name: str, device: str) -> Iterator[Row]:
    """A line for each dtype."""
    shape = SHAPES[name]
    for dtype in (torch.bfloat16, torch.float16):
        begin = time.perf_counter()
        llama(shape, min(shape.layers, 16), dtype, device).prove()
        took = f"{time.perf_counter() - begin:.1f}"
        yield name, str(dtype).removeprefix("torch."), "sound", took
