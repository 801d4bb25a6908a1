"""Marks on a host and on a GPU."""

import pytest
import torch

from specdec.utils.timers import CudaTimer, HostTimer, timer


def test_a_gpu_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for CUDA's events, whose times come from a device that lags behind."""
    waits: list[int] = []
    made: list[int] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.number = len(made)
            made.append(self.number)

        def synchronize(self) -> None:
            waits.append(self.number)

        def elapsed_time(self, end: "Event") -> float:
            return 1000.0 * (end.number - self.number)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    gpu = CudaTimer()
    marks = [gpu.mark() for _ in range(6)]
    assert not waits
    gpu.wait(marks[5])
    assert [gpu.seconds(marks[0], marks[1]), gpu.seconds(marks[2], marks[5])] == [1.0, 3.0]
    assert waits == [5]
    assert HostTimer(lambda: 3.0).seconds(1.0, 2.5) == 1.5


def test_a_device_has_its_timer() -> None:
    assert isinstance(timer(torch.device("cuda")), CudaTimer)
    host = timer(torch.device("cpu"), lambda: 7.0)
    assert isinstance(host, HostTimer) and host.mark() == 7.0
