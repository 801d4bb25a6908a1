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

    def wait(self, mark: Any) -> None:
        """It is there."""

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks."""
        return float(end - start)


class CudaTimer:
    """Time as the GPU sees it: a mark is made when it has done what was asked of it before."""

    def mark(self) -> Any:
        """As soon as the GPU gets there; nobody waits for it."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        """Until the GPU has got there; before seconds of this and of earlier marks are asked for."""
        mark.synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks that it has got to."""
        return float(start.elapsed_time(end)) / 1e3


Timer = HostTimer | CudaTimer


def timer(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> Timer:
    """The one for a device; ``clock`` is the host's, in seconds."""
    return CudaTimer() if device.type == "cuda" else HostTimer(clock)
