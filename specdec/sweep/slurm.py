"""Workers as jobs of SLURM, through submitit, on nodes that share the study's folder."""

import time
from pathlib import Path
from typing import Any, Literal, Self

from specdec.sweep.engine import Ended, Engine, last_line
from specdec.sweep.job import Job
from specdec.sweep.worker import PATIENCE, Way, work

GB = 10**9
POLL = 0.2  # seconds between looks at the files of submitit
ASK = 1.0  # between questions to SLURM itself


class Slurm(Engine):
    """Jobs of SLURM, one for each of the study's, which stand in SLURM's queue while this process waits.

    A job that SLURM ends for its time or for another one is submitted again by submitit, and goes on.

    Args:
        partition: and ``account``, ``qos``: SLURM's own.
        minutes: until SLURM ends a job.
        gpus: of each job.
        at_once: jobs in SLURM's queue, at most.
        more: further options of ``sbatch``, as ``{constraint: h100}``.
        cluster: ``local`` runs them as processes of this machine, to try a configuration.
    """

    def __init__(
        self,
        partition: str | None = None,
        account: str | None = None,
        qos: str | None = None,
        minutes: int = 24 * 60,
        gpus: int = 0,
        at_once: int = 100,
        more: dict[str, Any] | None = None,
        cluster: Literal["slurm", "local"] = "slurm",
    ) -> None:
        for name, number in (("minutes", minutes), ("at_once", at_once)):
            if number <= 0:
                raise ValueError(f"{name} of the SLURM engine must be above 0, not {number}")
        self.partition, self.account, self.qos = partition, account, qos
        self.minutes, self.gpus, self.at_once, self.more = minutes, gpus, at_once, dict(more or {})
        self.cluster = cluster
        self._running: dict[str, Any] = {}

    def open(self, study: Path, way: Way, retries: int) -> Self:
        """See that SLURM is there.

        Raises:
            ValueError: submitit or SLURM is missing.
        """
        try:
            import submitit
        except ImportError as error:
            raise ValueError("the SLURM engine needs submitit: pip install 'specdec-lightning[slurm]'") from error
        self.way, self._submitit = way, submitit
        try:
            self._executor = submitit.AutoExecutor(
                study.resolve() / "jobs" / ".submitit", cluster=self.cluster, slurm_max_num_timeout=retries
            )
        except RuntimeError as error:
            raise ValueError("there is no sbatch here: run this on a node of a SLURM cluster") from error
        return self

    def describe(self) -> str:
        """As :meth:`Engine.describe`."""
        where = f", partition {self.partition}" if self.partition else ""
        return f"SLURM{where}" if self.cluster == "slurm" else "SLURM's stand-in on this machine"

    def refuses(self, job: Job) -> str:
        """Nothing is known before SLURM is asked."""
        return ""

    def has_room(self, job: Job) -> bool:
        """Whether SLURM's queue may take one more."""
        return len(self._running) < self.at_once

    def start(self, folder: Path, job: Job) -> None:
        """Submit it.

        Raises:
            ValueError: SLURM does not take it; what runs already is cancelled then, to be gone on with.
        """
        options: dict[str, Any] = {"additional_parameters": self.more} if self.more else {}
        options |= {
            key: value
            for key, value in (("partition", self.partition), ("account", self.account), ("qos", self.qos))
            if value is not None
        }
        self._executor.update_parameters(
            name=f"specdec-{job.key[:12]}",
            nodes=1,
            tasks_per_node=1,
            cpus_per_task=job.threads,
            gpus_per_node=self.gpus,
            timeout_min=self.minutes,
            **({} if job.memory_bytes is None else {"mem_gb": max(1, -(-job.memory_bytes // GB))}),
            **{f"slurm_{key}": value for key, value in options.items()},
        )
        try:
            self._running[job.key] = self._executor.submit(Task(), str(folder.resolve()), self.way)
        except self._submitit.core.utils.FailedJobError as error:
            raise ValueError(f"SLURM does not take {job.label}: {last_line(error)}") from error

    def ended(self, seconds: float) -> list[Ended]:
        """As :meth:`Engine.ended`."""
        end = time.monotonic() + seconds
        while True:
            found = [Ended(key, *_result(job)) for key, job in self._running.items() if job.done()]
            if found or time.monotonic() > end:
                break
            time.sleep(POLL)
        for one in found:
            del self._running[one.key]
        return found

    def close(self) -> None:
        """Cancel what is queued or runs, and wait for it."""
        for job in self._running.values():
            job.cancel(check=False)
        end = time.monotonic() + self.way.grace + PATIENCE
        while not all(job.done(force_check=True) for job in self._running.values()) and time.monotonic() < end:
            time.sleep(ASK)
        self._running = {}


class Task:
    """What submitit runs on a node: :func:`specdec.sweep.worker.work`."""

    def __call__(self, folder: str, way: Way) -> int:
        """Work; the status of the attempt."""
        return work(Path(folder), way)

    def checkpoint(self, folder: str, way: Way) -> Any:
        """What is submitted again when SLURM ends the job before its time."""
        import submitit

        return submitit.helpers.DelayedSubmission(self, folder, way)


def _result(job: Any) -> tuple[int | None, str]:
    """The status of a job's worker, or what became of it instead."""
    error = job.exception()
    if error is None:
        return job.result(), ""
    return None, f"SLURM job {job.job_id}: {last_line(error)}"
