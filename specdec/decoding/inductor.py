"""What torch's compiler is told. Importing it takes two seconds, so only what compiles imports this.

Products of few rows take inductor's own C++ template, which packs the matrix and reads it once for several rows; its
kernel for bfloat16 is :mod:`specdec.decoding.pairs` where the processor can. Attention is
:mod:`specdec.decoding.few_queries`.
"""

import contextlib
import functools
import platform
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config
import torch._inductor.lowering  # before what follows, which imports it in a circle
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.codegen import cpp_template_kernel
from torch._inductor.cpp_builder import is_gcc
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import ChoiceCaller, Layout, Pointwise, StorageBox
from torch._inductor.select_algorithm import ExternKernelCaller, KernelTemplate, get_algorithm_selector_cache
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from specdec.decoding import few_queries, pairs

# rows by the template, as tried on AMD's Zen 5: in 16 bits the library, which uses what the processor has for them, was
# faster for more
MOST = {torch.float32: 64, torch.bfloat16: 8, torch.float16: 8}
MOST_PAIRS = 64  # likewise, of bfloat16 by pairs
IN_REGISTERS = "-fno-tree-loop-distribute-patterns -fno-tree-ch"  # GCC's
OFFER: dict[str, Any] = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "CPP,ATEN"}  # inductor's options


def options(device: torch.device) -> dict[str, Any]:
    """``torch.compile``'s, for a graph of shapes that are fixed, but for the number of keys on a CPU.

    On a CPU weights are packed for their products, those that meet the same input in one, few rows take kernels of
    their own, what is long to compute (the mask) is not computed again wherever it is used, and the graph runs
    without Python. On a GPU CUDA graphs are asked for.

    That is so by construction, and checking it and a thousand other things takes a tenth of a small round.
    """
    own: dict[str, Any] = {"triton.cudagraphs": True}
    if device.type == "cpu":
        own = {"freezing": True, "cpp_wrapper": True, "cpp.enable_concat_linear": True, "realize_opcount_threshold": 16}
        own |= {**OFFER, "size_asserts": False, **_in_registers()}
    return {**own, "guard_filter_fn": torch.compiler.skip_all_guards_unsafe}


@contextlib.contextmanager
def compiling(what: str, freezing: bool) -> Iterator[None]:
    """Around the call that compiles.

    Raises:
        ValueError: what is called cannot be compiled.
    """
    try:
        # the option alone comes too late
        with torch._inductor.config.patch(freezing=freezing), contextlib.ExitStack() as stack:
            if freezing:
                # no key of torch's cache of graphs tells of what follows
                stack.enter_context(torch._inductor.config.patch(fx_graph_cache=False))
                stack.enter_context(choosing())
                stack.enter_context(repeatable())
                stack.enter_context(remembering())
                stack.enter_context(turning_once())
                stack.enter_context(few_queries.offered())
            if freezing and _pairs():
                stack.enter_context(pairs.offered())
            yield
    except (TorchDynamoException, ConstraintViolationError) as error:
        reason = " ".join(str(error).split("\n\n")[0].split())
        raise ValueError(f"{what} cannot be compiled: {reason}; use --compile off") from error


def _in_registers() -> dict[str, Any]:
    """What makes GCC keep the template's sums in registers.

    It turns their zeros into a call of ``memset``, by which they get a place in memory, and for that, or in 16 bits
    because it moves the loop's head, it stores them all there at every step: eight rows take twice as long. The option
    for the processor is the one that takes words of our own.
    """
    processor = torch._inductor.config.cpp.march
    return {"cpp.march": f"{processor or 'native'} {IN_REGISTERS}"} if processor != "" and _gcc() else {}


def _pairs() -> bool:
    """Whether code is made for a processor that multiplies pairs."""
    return torch._inductor.config.cpp.march in (None, "native") and _gcc() and pairs.able()


def _gcc() -> bool:
    try:
        return platform.machine() in ("x86_64", "AMD64") and is_gcc()
    except InvalidCxxCompiler:  # compiling will say so
        return False


def choose(choices: list[ChoiceCaller]) -> list[ChoiceCaller]:
    """One kernel of those that ``OFFER`` brings: they would race else, and not always end alike."""
    library: list[ChoiceCaller] = [choice for choice in choices if isinstance(choice, ExternKernelCaller)]
    few = [choice for choice in choices if choice not in library and _few(choice)]
    return (few or library or choices)[:1]


def _few(choice: ChoiceCaller) -> bool:
    out: Layout = choice.layout
    by_pairs = getattr(choice, "category", None) == pairs.Pairs.__name__
    most = MOST_PAIRS if by_pairs else MOST.get(out.dtype, 0)
    return len(out.size) == 2 and int(out.size[0]) <= most


@contextlib.contextmanager
def choosing() -> Iterator[None]:
    """Inside, compilation asks :func:`choose`."""
    functions = get_algorithm_selector_cache().preprocessing_fns
    functions.append(choose)
    try:
        yield
    finally:
        functions.remove(choose)


_template = functools.cache(KernelTemplate._template_from_string)
_expression = functools.cache(cpp_template_kernel.parse_expr)


@contextlib.contextmanager
def remembering() -> Iterator[None]:
    """Inside, the templates of C++ code and the expressions in them are read once.

    Inductor reads the same few for every product of a graph, a seventh of the time that compiling a small model takes.
    """
    with (
        patch.object(KernelTemplate, "_template_from_string", staticmethod(_template)),
        patch.object(cpp_template_kernel, "parse_expr", _expression),
    ):
        yield


@contextlib.contextmanager
def turning_once() -> Iterator[None]:
    """Inside, cosines and sines that are used more than once are kept.

    Inductor knows exponentials and the like as dear, but not these: it would work the rotary tables out again for every
    head of every layer, and share that work among threads, which wait for each other longer than it takes.
    """
    before = StorageBox.should_realize_on_reuse

    def dear(box: StorageBox, users: int, **more: bool) -> bool:
        turns = users > 1 and isinstance(box.data, Pointwise) and {"cos", "sin"} & box.data.inner_fn_opcount().used_ops
        return bool(turns) or before(box, users, **more)

    with patch.object(StorageBox, "should_realize_on_reuse", dear):
        yield


@contextlib.contextmanager
def repeatable() -> Iterator[None]:
    """Inside, the C++ made of a graph is the same in every process, so that torch finds what it has compiled of it.

    It writes every constant's address into a comment else. Constants are given to the code when it is loaded.
    """
    before = GraphLowering.allocate_non_dup_const_name

    def allocate(graph: GraphLowering, name: str | None, data: torch.Tensor) -> str:
        known = before(graph, name, data)
        graph.constant_reprs[known] = f"{tuple(data.shape)}"
        return known

    with patch.object(GraphLowering, "allocate_non_dup_const_name", allocate):
        yield
