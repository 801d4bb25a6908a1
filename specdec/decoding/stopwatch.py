"""Time between marks, as the device sees it."""

import time
from typing import Any

import torch


class Stopwatch:
    """Marks, and the milliseconds between them; a GPU marks when it has done what was asked of it before."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Now; nobody waits."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        """From each mark to the next; waits for a GPU's last."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if not self._cuda:
            return [1e3 * (end - begin) for begin, end in pairs]
        if self._marks:
            self._marks[-1].synchronize()
        return [begin.elapsed_time(end) for begin, end in pairs]
