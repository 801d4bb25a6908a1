"""Training steps of EAGLE-3.1 from random features, and forwards of the target."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu_parts.shapes import (
    SHAPES,
    Random,
    Row,
    drafter_of,
    llama,
    peak_gigabytes,
    product_flops,
    seconds,
    vendors_flops,
)
from specdec.commands.plan_costs import drafter_flops, target_flops
from specdec.data import Batch
from specdec.features import OnTheFly
from specdec.nn.backend import compile_pointwise
from specdec.nn.kernels import unroll_kernel
from specdec.training.step import CUDA_PIECE, ObjectiveConfig, TrainStep, target_outputs


def training(name: str, device: str, times: int) -> Iterator[Row]:
    """Steps from stored features, K = 7, bf16-mixed, AdamW; and forwards of the target, of which four layers are made.

    Operations are those that ``specdec plan`` counts. Their rate is given beside the data sheet's and beside the rate
    of one large product on this device: the share is what ``plan`` is told by ``--efficiency``.
    """
    shape = SHAPES[name]
    target = llama(shape, 4, torch.bfloat16, device)
    drafter = drafter_of(target, shape, torch.float32)
    drafter.embed_tokens.requires_grad_(False)
    kernel_name, kernel = unroll_kernel("auto", torch.device(device))
    pieces = {"piece_bytes": CUDA_PIECE} if device == "cuda" else {}
    objective = ObjectiveConfig(steps=7, kernel=kernel, **pieces)
    step = TrainStep(drafter, objective)
    source = Random()
    ids_BT = torch.randint(0, shape.vocab, (shape.rows, shape.tokens), device=device)
    batch = Batch(ids_BT, torch.ones_like(ids_BT, dtype=torch.bool), torch.zeros_like(ids_BT))
    trained = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=device == "cuda")

    def train() -> None:
        with torch.autocast(device, torch.bfloat16):
            outputs = target_outputs(target, drafter, batch, objective, False, source)
            loss = step(batch, outputs, measure=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    product, vendors = product_flops(device), vendors_flops(device)

    def line(what: str, act: Callable[[], object], flops_per_token: float) -> Row:
        tokens = shape.rows * shape.tokens
        took = seconds(act, device, times)
        done = tokens * flops_per_token / took
        of_vendors = f"{done / vendors:.1%}" if vendors else "-"
        rates = f"{done / 1e12:,.3g}", of_vendors, f"{done / product:.1%}"
        return name, what, f"{took:.3f}", f"{tokens / took:,.0f}", *rates, peak_gigabytes(device)

    compile_pointwise(True)
    try:
        flops = sum(drafter_flops(drafter.config, objective, True, shape.tokens).values())
        yield line(f"drafter's step, {kernel_name}", train, flops)
    finally:
        compile_pointwise(False)
    with torch.no_grad():
        forward = partial(OnTheFly(), target, batch, drafter.config.aux_layers, False)
        operations = target_flops(target.model, shape.tokens)
        yield line("target's forward, four layers", forward, operations)
