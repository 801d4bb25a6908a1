"""Workers on this machine, as many as its cores and its memory take."""

import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from specdec import host
from specdec.sweep.engine import Ended, Engine
from specdec.sweep.job import Job
from specdec.sweep.worker import PATIENCE, Way, Worker

GB = 10**9


class Local(Engine):
    """Processes of this machine.

    Args:
        workers: jobs at once, at most; by default as many as fit.
        cores: that the jobs share, by the threads that each asks for; by default those that this process may use. A job
            of more threads gets all of them.
        memory_gb: 10^9 bytes that the jobs share, by what each is expected to need; by default what is free while none
            of them runs.
        gpus: devices by the names that ``CUDA_VISIBLE_DEVICES`` takes, one for each job at a time.

    Raises:
        ValueError: a number is not positive.
    """

    def __init__(
        self,
        workers: int | None = None,
        cores: int | None = None,
        memory_gb: float | None = None,
        gpus: Sequence[str] = (),
    ) -> None:
        for name, number in (("workers", workers), ("cores", cores), ("memory_gb", memory_gb)):
            if number is not None and number <= 0:
                raise ValueError(f"{name} of the local engine must be above 0, not {number:g}")
        self.workers, self.cores = workers, cores or host.cores() or 1
        self.memory = None if memory_gb is None else int(memory_gb * GB)
        self.gpus = tuple(gpus)
        self._running: dict[str, tuple[Job, Worker]] = {}
        self._gpu_of: dict[str, str] = {}
        self._ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._budget: int | None = None  # of memory

    def open(self, study: Path, way: Way, retries: int) -> Self:
        """Nothing has to be had for it."""
        self.way = way
        return self

    def describe(self) -> str:
        """As :meth:`Engine.describe`."""
        numbers = ((self.cores, "core"), (self.workers or 0, "worker"), (len(self.gpus), "GPU"))
        return ", ".join(["this machine", *(f"{n} {word}{'s'[n == 1 :]}" for n, word in numbers if n)])

    def refuses(self, job: Job) -> str:
        """A job that needs more memory than there is."""
        most = self.memory or host.memory()
        if job.memory_bytes is None or most is None or job.memory_bytes <= most:
            return ""
        return f"needs {job.memory_bytes / GB:.1f} GB of memory, of which there are {most / GB:.1f} GB here"

    def has_room(self, job: Job) -> bool:
        """Whether cores, memory and a GPU are left for it; alone a job is run even if its memory is not free yet."""
        if not self._running:
            self._budget = self.memory or host.free_memory()
        others = [other for other, _ in self._running.values()]
        if self.workers is not None and len(others) >= self.workers:
            return False
        if self.gpus and len(self._gpu_of) >= len(self.gpus):
            return False
        if sum(map(self._cores, others)) + self._cores(job) > self.cores:
            return False
        memory = sum(other.memory_bytes or 0 for other in others) + (job.memory_bytes or 0)
        return not others or self._budget is None or memory <= self._budget

    def _cores(self, job: Job) -> int:
        return min(job.threads, self.cores)

    def start(self, folder: Path, job: Job) -> None:
        """Start processes, and a thread that waits for their end."""
        environment = {}
        if self.gpus:
            self._gpu_of[job.key] = next(gpu for gpu in self.gpus if gpu not in self._gpu_of.values())
            environment["CUDA_VISIBLE_DEVICES"] = self._gpu_of[job.key]
        worker = Worker(folder, self.way, environment)
        self._running[job.key] = job, worker
        threading.Thread(target=self._wait, args=(job.key, worker), daemon=True).start()

    def _wait(self, key: str, worker: Worker) -> None:
        self._ended.put(Ended(key, worker.wait()))

    def ended(self, seconds: float) -> list[Ended]:
        """As :meth:`Engine.ended`; what they held is free again."""
        found = []
        try:
            found.append(self._ended.get(timeout=seconds))
            while True:
                found.append(self._ended.get_nowait())
        except queue.Empty:
            pass
        for one in found:
            _, worker = self._running.pop(one.key)
            worker.stop()
            self._gpu_of.pop(one.key, None)
        return found

    def close(self) -> None:
        """Ask all of them at once, then wait."""
        for _, worker in self._running.values():
            worker.stop()
        for _, worker in self._running.values():
            worker.wait(self.way.grace + PATIENCE)
        self._running, self._gpu_of = {}, {}
