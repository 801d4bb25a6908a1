"""What torch compiles and fuses, which library multiplies on a CPU, and what memory the process keeps."""

import contextlib
import ctypes
import functools
import inspect
import platform
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from specdec.utils.machine import multiplies_bfloat16

Function = TypeVar("Function", bound=Callable)
_compiling = False


def compile_pointwise(on: bool) -> None:
    """Compile the functions marked with :func:`pointwise` from now on, or run them as they are. Off at the start."""
    global _compiling
    _compiling = on


def pointwise(function: Function) -> Function:
    """Mark a function of tensors, without state or gradient, that ``torch.compile`` may fuse into one pass over memory.

    It is compiled for the shapes of its first call, which takes seconds; torch keeps the result in its cache on disk.
    """
    compiled = functools.cache(lambda: torch.compile(function))

    @functools.wraps(function)
    def call(*args):  # type: ignore[no-untyped-def]
        return (compiled() if _compiling else function)(*args)

    return call  # type: ignore[return-value]


def own_graphs(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """``torch.compile`` of a function as a whole, for this call alone.

    Without that, torch keeps the graphs of all calls in one list: it could take another call's graph for this one's,
    and counts both against one limit. Newer releases of torch have an option for it. Where they have none, the
    function is called by a new function, for torch keeps a list for every code object.

    Args:
        settings: other arguments of ``torch.compile``.
    """
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        # torch's type stubs lack the option
        compile_: Callable[..., Any] = torch.compile
        return compile_(function, fullgraph=True, isolate_recompiles=True, **settings)

    def call(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    code = call.__code__.replace()
    caller = types.FunctionType(code, globals(), call.__name__, closure=call.__closure__)
    return torch.compile(caller, fullgraph=True, **settings)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums and exponentials are taken in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def widened(x: torch.Tensor) -> torch.Tensor:
    """A tensor in the dtype of its sums and exponentials: see :func:`wide`."""
    return x.to(wide(x.dtype))


@contextlib.contextmanager
def matmul_backend(device: torch.device) -> Iterator[str]:
    """Inside, float32 products on a CPU take oneDNN where MKL is slow; yields the library's name, for the log.

    Nothing is changed for another device, since the setting would also round a GPU's float32 products.

    MKL takes a slow path on processors that are not Intel's, where oneDNN is about twice as fast. The processor's maker
    decides, not a clock: two runs that chose otherwise would round otherwise. The public switch is
    ``torch.set_float32_matmul_precision("medium")``: where the processor multiplies bfloat16 (AMX) it would round to
    that, so there it is left alone. The setting is restored at the end.
    """
    if device.type != "cpu":
        yield f"{device.type}'s"
        return
    user_setting = torch.get_float32_matmul_precision()
    if user_setting != "highest":  # the user has chosen, or this function further out
        yield f"torch's setting {user_setting!r}"
        return
    maker = _cpu_maker()
    slow = torch.backends.mkl.is_available() and bool(maker) and "Intel" not in maker
    onednn = slow and not multiplies_bfloat16()
    try:
        torch.set_float32_matmul_precision("medium" if onednn else user_setting)
        yield "oneDNN" if onednn else "torch's default"
    finally:
        torch.set_float32_matmul_precision(user_setting)


def _cpu_maker(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """``GenuineIntel``, ``AuthenticAMD``; nothing where the processor does not say."""
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.is_file() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), ""
    )


# of mallopt(3)
TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3


def keep_freed_memory() -> bool:
    """Let the process keep up to 2 GiB of freed memory, for good; whether it could be asked to.

    glibc gives large blocks back to the system, which clears every page that it hands out again; a training step
    takes the same blocks each time. Other C libraries keep freed memory anyway: nothing is done there.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return all(libc.mallopt(option, 2**31 - 1) == 1 for option in (TRIM_THRESHOLD, MMAP_THRESHOLD))
