"""Attention of an unroll: every kernel that the device has beside the dense one, the same to rounding, and its time."""

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.gpu_parts.shapes import SHAPES, Row, peak_gigabytes, seconds
from specdec.nn.kernels import unroll_kernel
from specdec.nn.unroll import Keys, UnrollKernel
from specdec.nn.view import View

STEPS = 4  # of the unroll: the last one attends to three earlier own keys


def attention(name: str, device: str, times: int) -> Iterator[Row]:
    """Forward and backward of a step's attention; the difference is the largest of output and gradients, in float32."""
    shape = SHAPES[name]
    width = shape.hidden // shape.heads
    fast = unroll_kernel("auto", torch.device(device))[0]
    tokens = shape.tokens
    documents_BT = torch.arange(tokens, device=device)[None] * 3 // (2 * tokens)
    spans = View.packed(documents_BT).visibility

    def leaves(dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        sizes = [shape.heads, *[shape.groups] * (2 * STEPS)]
        drawn = [torch.randn(1, n, tokens, width, generator=generator) for n in sizes]
        return [x.to(device, dtype).requires_grad_() for x in drawn]

    def run(kernel: UnrollKernel, flat: list[Tensor]) -> list[Tensor]:
        query, *others = flat
        steps = [Keys(*pair) for pair in zip(others[0::2], others[1::2], strict=True)]
        out = kernel(query, steps, spans)
        return [out, *torch.autograd.grad(out.float().square().mean(), flat)]

    wanted = run(unroll_kernel("dense", torch.device(device))[1], leaves(torch.float32))
    for kernel_name in ("dense", fast):
        kernel = unroll_kernel(kernel_name, torch.device(device))[1]
        made = run(kernel, leaves(torch.float32))
        differences = [
            float((ours - dense).abs().max() / dense.abs().max())
            for ours, dense in zip(made, wanted, strict=True)
        ]
        flat = leaves(torch.bfloat16)
        took = seconds(lambda kernel=kernel, flat=flat: run(kernel, flat), device, times)
        peak = peak_gigabytes(device)
        yield (
            name,
            f"{tokens}",
            kernel_name,
            f"{1000 * took:.2f}",
            f"{max(differences):.1e}",
            peak,
        )
