"""Workers as jobs of SLURM, through submitit, on nodes that share the study's folder."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from specdec.studies.ray import last_line
from specdec.studies.run import Ended, Engine
from specdec.studies.worker import JOBS, Job, Launch, work

GB = 10**9


@dataclass
class Slurm(Engine):
    """Jobs of SLURM, one for each of the study's, which stand in SLURM's queue while this process waits.

    A job that SLURM ends for its time or for another one is submitted again by submitit, and goes on.

    Args:
        partition: of the cluster.
        account: that is charged.
        qos: quality of service.
        minutes: until SLURM ends a job.
        gpus: of each job.
        at_once: jobs in SLURM's queue, at most.
        more: further options of ``sbatch``, as ``{constraint: h100}``.
        cluster: ``local`` runs them as processes of this machine, to try a configuration.

    Raises:
        ValueError: a number is not positive.
    """

    ask: ClassVar[float] = 1.0

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    minutes: int = 24 * 60
    gpus: int = 0
    at_once: int = 100
    more: dict[str, Any] = field(default_factory=dict)
    cluster: Literal["slurm", "local"] = "slurm"

    def __post_init__(self) -> None:
        for name in ("minutes", "at_once"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} of the SLURM engine must be above 0, not {getattr(self, name)}")

    def open(self, study: Path, launch: Launch, retries: int) -> None:
        """See that SLURM is there.

        Raises:
            ValueError: submitit or SLURM is missing.
        """
        super().open(study, launch, retries)
        self._cancelling = False
        try:
            import submitit
        except ImportError as error:
            raise ValueError("the SLURM engine needs submitit: pip install 'specdec-lightning[slurm]'") from error
        self._submitit: Any = submitit
        try:
            self._executor = submitit.AutoExecutor(
                study.resolve() / JOBS / ".submitit", cluster=self.cluster, slurm_max_num_timeout=retries
            )
        except RuntimeError as error:
            raise ValueError("there is no sbatch here: run this on a node of a SLURM cluster") from error

    def has_room(self, job: Job) -> bool:
        """Whether SLURM's queue may take one more."""
        return len(self.running) < self.at_once

    def submit(self, job: Job) -> Any:
        """Submit it.

        Raises:
            ValueError: SLURM does not take it; what runs already is cancelled then, to be gone on with.
        """
        own = {"partition": self.partition, "account": self.account, "qos": self.qos}
        options: dict[str, Any] = {f"slurm_{key}": value for key, value in own.items() if value is not None}
        if self.more:
            options["slurm_additional_parameters"] = self.more
        if job.memory_bytes is not None:
            options["mem_gb"] = max(1, -(-job.memory_bytes // GB))
        self._executor.update_parameters(
            name=f"specdec-{job.key[:12]}", nodes=1, tasks_per_node=1, cpus_per_task=job.threads,
            gpus_per_node=self.gpus, timeout_min=self.minutes, **options,
        )  # fmt: skip
        try:
            return self._executor.submit(Task(), self.study.resolve(), job, self.launch)
        except self._submitit.core.utils.FailedJobError as error:
            raise ValueError(f"SLURM does not take {job.label}: {last_line(error)}") from error

    def result(self, handle: Any) -> Ended | None:
        """As :meth:`Engine.result`."""
        if not handle.done(force_check=self._cancelling):
            return None
        if self._cancelling:  # a cancelled job leaves no result to wait for
            return Ended("stopped")
        if (error := handle.exception()) is not None:
            return Ended(None, f"SLURM job {handle.job_id}: {last_line(error)}")
        return Ended(*handle.result())

    def cancel(self, handle: Any) -> None:
        """As :meth:`Engine.cancel`."""
        self._cancelling = True  # SLURM is asked at every look, not once a minute
        handle.cancel(check=False)


class Task:
    """What submitit runs on a node: :func:`specdec.studies.worker.work`."""

    def __call__(self, study: Path, job: Job, launch: Launch) -> tuple[str, str | None]:
        """Work; the attempt's end, and why it failed."""
        return work(study, job, launch)

    def checkpoint(self, *arguments: Any) -> Any:
        """What is submitted again when SLURM ends the job before its time."""
        import submitit

        return submitit.helpers.DelayedSubmission(self, *arguments)
