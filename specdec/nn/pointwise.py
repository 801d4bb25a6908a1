"""Point-wise pieces of a step, which ``torch.compile`` may fuse into one pass over memory."""

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

Function = TypeVar("Function", bound=Callable)
_compiling = False


def compile_pointwise(on: bool) -> None:
    """Fuse the point-wise pieces from now on, or run them operator by operator. Off at the start.

    Each piece is compiled for the shapes it meets at its first call, which takes seconds; torch keeps what it
    compiled in its own cache on disk.
    """
    global _compiling
    _compiling = on


def compiling() -> bool:
    """Whether they are fused; then a wide piece takes no memory for what it does in between."""
    return _compiling


def pointwise(function: Function) -> Function:
    """Mark a function of tensors, without state or gradient, as one that may be fused."""

    @functools.cache
    def compiled() -> Callable:
        return torch.compile(function)

    @functools.wraps(function)
    def call(*args):  # type: ignore[no-untyped-def]
        return (compiled() if _compiling else function)(*args)

    return call  # type: ignore[return-value]
