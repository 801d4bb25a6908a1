"""Functions of fixed shapes, one dimension apart, compiled once. With the pieces of training, the only calls of
``torch.compile``.
"""

import contextlib
import itertools
import logging
import time
import types
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from specdec.nn.products import fast_products, small_products

log = logging.getLogger(__name__)

R = TypeVar("R")
_number = itertools.count()


class Compiled(Generic[R]):
    """A function that is compiled at its first call, for the shapes it has there, and never again.

    Torch keeps what the C++ compiler made in its cache on disk, for later processes; the graph is made in each. The
    weights must not change afterwards: on a CPU the graph holds copies of them, packed.

    Args:
        function: of tensors, and of tuples of tensors or None.
        what: for the log, since compilation takes long.
        varying: whether the last argument is a vector that may have another length in every call, and serves for that
            alone.

    Raises:
        ValueError: it cannot be compiled, or a later call has other shapes, strides, dtypes or devices; the argument
            that varies is not looked at.
    """

    def __init__(self, function: Callable[..., R], what: str, device: torch.device, varying: bool = False) -> None:
        from specdec.decoding.inductor import options

        self.what, self.freezing, self.varying = what, device.type == "cpu", varying
        # torch counts graphs by code object, so that each function needs one of its own
        code = function.__code__.replace(co_name=f"{function.__name__}_{next(_number)}")
        own = types.FunctionType(code, function.__globals__, code.co_name, None, function.__closure__)
        self._call: Callable[..., R] = torch.compile(own, fullgraph=True, dynamic=False, options=options(device))
        self._forms: list[Any] | None = None

    def __call__(self, *args: Any) -> R:
        fixed = args[:-1] if self.varying else args
        forms = [_form(x) for arg in fixed for x in (arg if isinstance(arg, tuple) else (arg,))]
        if forms == self._forms:
            # attention that no kernel is made for; the rest is packed
            with small_products() if self.freezing else contextlib.nullcontext():
                return self._call(*args)
        if self._forms is not None:
            raise ValueError(f"{self.what} was compiled for {self._forms}, not {forms}")
        from specdec.decoding.inductor import compiling

        if self.varying:
            torch._dynamo.mark_dynamic(args[-1], 0)
        log.info("compiling %s, which may take a minute", self.what)
        begin = time.perf_counter()
        with fast_products() if self.freezing else contextlib.nullcontext(), compiling(self.what, self.freezing):
            out = self._call(*args)
        log.info("compiled %s in %.0f s", self.what, time.perf_counter() - begin)
        self._forms = forms
        return out


def _form(x: Any) -> tuple[list[int], tuple[int, ...], torch.dtype, torch.device] | None:
    """What the graph relies on; nothing else checks it."""
    return (list(x.shape), x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else None
