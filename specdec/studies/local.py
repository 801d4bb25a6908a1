"""Workers on this machine, as many as its cores and its memory take."""

from dataclasses import dataclass, field
from pathlib import Path

from specdec.studies.run import Ended, Engine
from specdec.studies.worker import Job, JobFolder, Launch, Worker
from specdec.utils import machine

GB = 10**9


@dataclass
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

    workers: int | None = None
    cores: int | None = None
    memory_gb: float | None = None
    gpus: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("workers", "cores", "memory_gb"):
            if (number := getattr(self, name)) is not None and number <= 0:
                raise ValueError(f"{name} of the local engine must be above 0, not {number:g}")

    @property
    def shared_cores(self) -> int:
        """Cores that the jobs share."""
        return self.cores or machine.cores() or 1

    def open(self, study: Path, launch: Launch, retries: int) -> None:
        """Nothing has to be had for it."""
        super().open(study, launch, retries)
        self._gpu_of: dict[str, str] = {}
        self._free: int | None = None  # memory, while no job runs

    def refuses(self, job: Job) -> str:
        """A job that needs more memory than there is."""
        most = int(self.memory_gb * GB) if self.memory_gb else machine.memory()
        if job.memory_bytes is None or most is None or job.memory_bytes <= most:
            return ""
        return f"needs {job.memory_bytes / GB:.1f} GB of memory, of which there are {most / GB:.1f} GB here"

    def has_room(self, job: Job) -> bool:
        """Whether cores, memory and a GPU are left for it; alone a job is run even if its memory is not free yet."""
        others = [worker.job for worker in self.running.values()]
        if not others:
            self._free = int(self.memory_gb * GB) if self.memory_gb else machine.free_memory()
        if self.workers is not None and len(others) >= self.workers:
            return False
        if self.gpus and len(others) >= len(self.gpus):
            return False
        if sum(min(one.threads, self.shared_cores) for one in (*others, job)) > self.shared_cores:
            return False
        memory = sum(one.memory_bytes or 0 for one in (*others, job))
        return not others or self._free is None or memory <= self._free

    def submit(self, job: Job) -> Worker:
        """Start its processes."""
        environment = {}
        if self.gpus:
            taken = [self._gpu_of[key] for key in self.running]
            self._gpu_of[job.key] = next(gpu for gpu in self.gpus if gpu not in taken)
            environment["CUDA_VISIBLE_DEVICES"] = self._gpu_of[job.key]
        return Worker(JobFolder(self.study, job.key), job, self.launch, environment)

    def result(self, handle: Worker) -> Ended | None:
        """As :meth:`Engine.result`."""
        return None if (end := handle.poll()) is None else Ended(end, handle.message)

    def cancel(self, handle: Worker) -> None:
        """As :meth:`Engine.cancel`."""
        handle.stop()
