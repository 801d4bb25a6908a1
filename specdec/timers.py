"""Time between marks, on a host and on a GPU."""

import time
from collections.abc import Callable
from typing import Any

import torch


class HostTimer:
    """Time as the process sees it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock

    def mark(self) -> Any:
        """Now."""
        return self.clock()

    def seconds(self, spans: list[tuple[Any, Any]]) -> float:
        """Seconds that the spans between marks take together."""
        return sum(end - start for start, end in spans)


class CudaTimer:
    """Time as the GPU sees it: a mark is made when it has done what was asked of it before."""

    def mark(self) -> Any:
        """As soon as the GPU gets there; nobody waits for it."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, spans: list[tuple[Any, Any]]) -> float:
        """Wait for the last mark, and add up."""
        spans[-1][1].synchronize()
        return sum(start.elapsed_time(end) for start, end in spans) / 1e3


Timer = HostTimer | CudaTimer


def timer(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> Timer:
    """The one for a device; ``clock`` is the host's, in seconds."""
    return CudaTimer() if device.type == "cuda" else HostTimer(clock)
