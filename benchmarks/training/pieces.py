"""Where a training step's time goes: the operators of a profile, summed by the piece of the step they belong to.

Needs torch alone.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.limits import best_seconds

# what these add comes before the factors
ADDING = ("aten::addmm", "aten::addmm_", "aten::baddbmm")
PRODUCTS = ("aten::mm", "aten::bmm", *ADDING)
# the piece of an operator is that of its outermost ancestor whose name begins so; a backward pass has the name of its
# function and "Backward"
PIECES = {
    "Optimizer.step": "optimizer",
    "_Blocked": "attention",
    "_HeadLoss": "loss",
    "_Lean": "norms, rope, gate",
}
LAYERS = "matrices of the layer"
OTHER = "other operators"
PYTHON = "Python and dispatch"
ALONE_SECONDS = 0.05  # of a trial of one product


class Piece(NamedTuple):
    """Milliseconds of a step."""

    all: float  # of the piece
    products: float  # of the matrix products in it
    alone: float  # that the same products take when nothing else is computed between them


def flops(step: Callable[[], Any]) -> int:
    """Floating-point operations of one step's matrix products, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def pieces(step: Callable[[], Any], dtype: torch.dtype, steps: int = 3) -> dict[str, Piece]:
    """Profile some steps on a CPU; milliseconds of one by piece, the slowest first.

    Args:
        dtype: of the step's products.

    The profiler itself takes time, which is counted as Python's.
    """
    step()
    begin = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        for _ in range(steps):
            step()
    wall = time.perf_counter() - begin
    spent: dict[str, float] = defaultdict(float)
    products: dict[str, float] = defaultdict(float)
    shapes: dict[str, list[tuple[str, str, Any]]] = defaultdict(list)
    for event in recorded.events() or ():
        piece = _piece(event)
        seconds = event.self_cpu_time_total / 1e6
        spent[piece] += seconds
        if event.name in PRODUCTS:
            products[piece] += seconds
            shapes[piece].append((event.name, str(event.input_shapes), event.input_shapes))
    alone: dict[str, float] = {}
    for piece, calls in shapes.items():
        distinct = {(name, text): sizes for name, text, sizes in calls}
        seconds_of = {key: _alone(key[0], sizes, dtype) for key, sizes in distinct.items()}
        alone[piece] = sum(seconds_of[name, text] for name, text, _ in calls)
    spent[PYTHON] = max(0.0, wall - sum(spent.values()))
    scale = 1e3 / steps
    ordered = sorted(spent, key=spent.__getitem__, reverse=True)
    return {
        piece: Piece(
            spent[piece] * scale,
            products.get(piece, 0.0) * scale,
            alone.get(piece, 0.0) * scale,
        )
        for piece in ordered
    }


def _piece(event: Any) -> str:
    """Return the piece that an operator belongs to."""
    ancestors = [event]
    while ancestors[-1].cpu_parent is not None:
        ancestors.append(ancestors[-1].cpu_parent)
    for ancestor in reversed(ancestors):
        for name, piece in PIECES.items():
            if ancestor.name.startswith(name):
                return piece
    if any(ancestor.name in PRODUCTS for ancestor in ancestors):
        return LAYERS
    if any(ancestor.name.startswith("Torch-Compiled Region") for ancestor in ancestors):
        return "norms, rope, gate"
    return OTHER


def _alone(name: str, shapes: list[list[int]], dtype: torch.dtype) -> float:
    """Seconds of a product of contiguous operands of these shapes by itself."""
    first = 1 if name in ADDING else 0
    left, right = (torch.randn(shape).to(dtype) for shape in shapes[first : first + 2])
    return best_seconds(lambda: left @ right, ALONE_SECONDS)
