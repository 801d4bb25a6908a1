"""Decoding with random weights: a pass's time, eager and compiled, where acceptance says nothing."""

import time
from collections.abc import Iterator

import torch

from benchmarks.gpu_parts.shapes import SHAPES, Row, drafter_of, llama, synchronize
from specdec.decoding import Chain, DynamicTree, PlainDecoder, SpeculativeDecoder


def decoding(name: str, device: str, tokens: int) -> Iterator[Row]:
    """One text at a time, greedily; compiled passes are CUDA graphs on a GPU."""
    shape = SHAPES[name]
    target = llama(shape, shape.layers, torch.bfloat16, device)
    drafter = drafter_of(target, shape, torch.bfloat16).eval().requires_grad_(False)
    prompt = list(range(3, 35))
    shapes = {
        "plain": None,
        "chain of 4": Chain(4),
        "draft tree of 16": DynamicTree(depth=4, top_k=4, nodes=16),
    }
    for what, draft_shape in shapes.items():
        for compiled in (False, True):
            if draft_shape is None:
                decoder = PlainDecoder(target, compiled=compiled)
            else:
                decoder = SpeculativeDecoder(target, drafter, draft_shape, compiled=compiled)
            begin = time.perf_counter()
            decoder.generate(prompt, tokens, ())  # compiles
            synchronize(device)
            first = time.perf_counter() - begin
            begin = time.perf_counter()
            made = decoder.generate(prompt, tokens, ())
            synchronize(device)
            each = 1000 * (time.perf_counter() - begin) / max(1, len(made.accepted) or tokens)
            how = "compiled" if compiled else "eager"
            yield name, what, how, f"{each:.2f}", f"{len(made.ids)}", f"{first:.1f}"
