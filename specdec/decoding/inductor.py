"""What torch's compiler is told. Importing it takes two seconds, so only what compiles imports this.

Products of a few rows of float32 take inductor's own C++ template, which packs the matrix and reads it once for all
rows; of other dtypes they become loops (:mod:`specdec.nn.few_rows`).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch._inductor.config
from torch import fx
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.ir import ChoiceCaller, Layout
from torch._inductor.select_algorithm import ExternKernelCaller, get_algorithm_selector_cache
from torch.nn import functional as F

from specdec.nn import few_rows

MOST_FLOATS = 6  # rows of float32 by the template: for many the library is faster
OFFER: dict[str, Any] = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "CPP,ATEN"}  # inductor's options


def options(device: torch.device) -> dict[str, Any]:
    """``torch.compile``'s, for a graph of fixed shapes.

    On a CPU weights are packed for their products, those that meet the same input in one, few rows take kernels of
    their own, what is long to compute (the mask) is not computed again wherever it is used, and the graph runs
    without Python. On a GPU it runs as CUDA graphs.

    Shapes are fixed by construction, and checking them and a thousand other things takes a tenth of a small round.
    """
    own: dict[str, Any] = {"triton.cudagraphs": True}
    if device.type == "cpu":
        own = {"freezing": True, "cpp_wrapper": True, "cpp.enable_concat_linear": True, "realize_opcount_threshold": 16}
        own |= {**OFFER, "pre_grad_custom_pass": Loops(), "size_asserts": False}
    return {**own, "guard_filter_fn": torch.compiler.skip_all_guards_unsafe}


@contextlib.contextmanager
def compiling(what: str, freezing: bool) -> Iterator[None]:
    """Around the call that compiles.

    Raises:
        ValueError: what is called cannot be compiled.
    """
    try:
        # the option alone comes too late
        with torch._inductor.config.patch(freezing=freezing), choosing() if freezing else contextlib.nullcontext():
            yield
    except TorchDynamoException as error:
        reason = " ".join(str(error).split("\n\n")[0].split())
        raise ValueError(f"{what} cannot be compiled: {reason}; use --compile off") from error


class Loops(CustomGraphPass):
    """Inductor's pass that gives every ``F.linear`` of a graph to :func:`~specdec.nn.few_rows.linear`."""

    def __call__(self, graph: fx.Graph) -> None:
        """Change the graph in place."""
        for node in graph.nodes:
            if node.target is F.linear:
                node.target = few_rows.linear

    def uuid(self) -> bytes:
        """Of the files that decide; torch's cache of kernels asks."""
        return get_hash_for_files((__file__, few_rows.__file__), str((few_rows.MOST, MOST_FLOATS)))


def choose(choices: list[ChoiceCaller]) -> list[ChoiceCaller]:
    """One kernel of those that ``OFFER`` brings: they would race else, and not always end alike."""
    library: list[ChoiceCaller] = [choice for choice in choices if isinstance(choice, ExternKernelCaller)]
    few = [choice for choice in choices if choice not in library and _few_floats(choice.layout)]
    return (few or library or choices)[:1]


def _few_floats(out: Layout) -> bool:
    return out.dtype == torch.float32 and len(out.size) == 2 and int(out.size[0]) <= MOST_FLOATS


@contextlib.contextmanager
def choosing() -> Iterator[None]:
    """Inside, compilation asks :func:`choose`."""
    functions = get_algorithm_selector_cache().preprocessing_fns
    functions.append(choose)
    try:
        yield
    finally:
        functions.remove(choose)
