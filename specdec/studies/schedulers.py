"""Where the jobs of a sweep run: processes of this machine, tasks of Ray, jobs of SLURM.

All of them run :func:`specdec.studies.worker.run_job`. Ray and SLURM need the study's folder, the working folder and
the Python environment under the same paths on all nodes.
"""

import abc
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from specdec.studies.worker import GRACE, JOBS, PATIENCE, Job, JobResult, run_job
from specdec.utils import machine
from specdec.utils.cluster import join, last_line
from specdec.utils.numbers import Count, NonNegative, Side, Whole, check_numbers

RETRIES = 3  # how often a sweep starts a job again after attempts that were lost


@dataclass
class Engine(abc.ABC):
    """Starts workers for jobs and tells when they have ended, here or on other machines."""

    poll: ClassVar[float] = 0.1  # seconds between looks at what runs

    def __post_init__(self) -> None:
        check_numbers(type(self), vars(self), f"{type(self).__name__}.")

    def open(self, study: Path) -> None:
        """Get ready for the jobs of a study, run in the working folder; ValueError if the engine cannot be had."""
        self.study = study.resolve()
        self.cwd = Path.cwd()
        self.running: dict[str, Any] = {}  # handles by key

    def at_once(self, job: Job) -> int | None:
        """How many such jobs run at a time; None where others decide that."""
        return None

    def has_room(self, job: Job) -> bool:
        """Whether to start it now."""
        most = self.at_once(job)
        return most is None or len(self.running) < most

    @abc.abstractmethod
    def submit(self, job: Job) -> Any:
        """Have a worker begin with a job; the handle that ``result`` and ``cancel`` take."""

    @abc.abstractmethod
    def result(self, handle: Any) -> JobResult | None:
        """How a worker ended; None while it runs."""

    @abc.abstractmethod
    def cancel(self, handle: Any) -> None:
        """Stop a worker, so that its job can be resumed; does not wait for it."""

    def ended(self, seconds: float) -> dict[str, JobResult]:
        """The jobs whose workers have ended since the last call, by key; waits for one, so long at most."""
        until = time.monotonic() + seconds
        while True:
            results = {
                key: end for key, handle in self.running.items() if (end := self.result(handle))
            }
            for key in results:
                del self.running[key]
            if results or time.monotonic() >= until:
                return results
            time.sleep(self.poll)

    def close(self) -> None:
        """Stop what runs, and wait for that: no worker is left."""
        for handle in self.running.values():
            self.cancel(handle)
        until = time.monotonic() + GRACE + PATIENCE
        while self.running and time.monotonic() < until:
            self.ended(1.0)


@dataclass
class Local(Engine):
    """Processes of this machine.

    Args:
        workers: jobs at once; by default as many as the cores take, by the threads of a job, or as there are gpus.
        gpus: devices by the names that ``CUDA_VISIBLE_DEVICES`` takes, one for each job at a time.
    """

    workers: Side | None = None
    gpus: list[str] = field(default_factory=list)

    def at_once(self, job: Job) -> int | None:
        by_cores = max(1, (machine.cores() or 1) // job.threads)
        most = self.workers or len(self.gpus) or by_cores
        return min(most, len(self.gpus) or most)

    def submit(self, job: Job) -> Any:
        used = [gpu for _, _, gpu in self.running.values()]
        gpu = next((gpu for gpu in self.gpus if gpu not in used), None)
        environment = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        future = Future[JobResult]()
        stop = threading.Event()

        def attempt() -> None:
            try:
                future.set_result(run_job(self.study, job, self.cwd, environment, stop))
            except BaseException as error:  # noqa: BLE001  raised by future.result()
                future.set_exception(error)

        # of a pool, Python's exit would wait for the threads
        threading.Thread(target=attempt, daemon=True).start()
        return future, stop, gpu

    def result(self, handle: Any) -> JobResult | None:
        return handle[0].result() if handle[0].done() else None

    def cancel(self, handle: Any) -> None:
        handle[1].set()


@dataclass
class Ray(Engine):
    """Tasks of Ray, spread over its nodes, each with its job's threads reserved.

    Ray starts a task again when the process that runs it, or its node, is lost. A cluster that is started here has no
    dashboard, listens on loopback alone, and sends no usage statistics.

    Args:
        address: of a cluster that runs: ``auto`` for the one this machine belongs to, ``ray://HOST:10001``, ...; None
            starts one on this machine alone, for this sweep.
        gpus: of each job; a fraction shares one.
    """

    address: str | None = None
    gpus: NonNegative = 0.0

    def open(self, study: Path) -> None:
        super().open(study)
        self._ray: Any = join(self.address)
        self._run_job = self._ray.remote(max_retries=RETRIES, scheduling_strategy="SPREAD")(run_job)

    def submit(self, job: Job) -> Any:
        # a job of more threads than any node has cores gets all of one
        most = max(node["Resources"].get("CPU", 0) for node in self._ray.nodes() if node["Alive"])
        task = self._run_job.options(
            name=job.label, num_cpus=min(job.threads, most), num_gpus=self.gpus
        )
        return task.remote(self.study, job, self.cwd)

    def result(self, handle: Any) -> JobResult | None:
        if not self._ray.wait([handle], timeout=0)[0]:
            return None
        try:
            return self._ray.get(handle)
        except (self._ray.exceptions.RayError, OSError, ValueError) as error:
            return JobResult(None, f"Ray: {last_line(error)}")

    def cancel(self, handle: Any) -> None:
        self._ray.cancel(handle)

    def close(self) -> None:
        super().close()
        self._ray.shutdown()


@dataclass
class Slurm(Engine):
    """Jobs of SLURM through submitit, one for each of the study's, on nodes that share the study's folder.

    A job that SLURM ends for its time or for another one is submitted again by submitit, and resumes.

    Args:
        partition: of the cluster.
        minutes: until SLURM ends a job.
        gpus: of each job.
        more: further options of ``sbatch``, as ``{account: mine, mem: 64G, constraint: h100}``.
        cluster: ``local`` runs them as processes of this machine, to try a configuration.
    """

    poll: ClassVar[float] = 1.0

    partition: str | None = None
    minutes: Count = 24 * 60
    gpus: Whole = 0
    more: dict[str, Any] = field(default_factory=dict)
    cluster: Literal["slurm", "local"] = "slurm"

    def open(self, study: Path) -> None:
        super().open(study)
        self._cancelling = False
        try:
            import submitit
        except ImportError as error:
            raise ValueError(
                "the SLURM engine needs submitit: pip install 'specdec-lightning[slurm]'"
            ) from error
        self._refused = submitit.core.utils.FailedJobError
        place = self.study / JOBS / ".submitit"
        try:
            self._executor = submitit.AutoExecutor(
                place, cluster=self.cluster, slurm_max_num_timeout=RETRIES
            )
        except RuntimeError as error:
            raise ValueError(
                "there is no sbatch here: run this on a node of a SLURM cluster"
            ) from error

    def submit(self, job: Job) -> Any:
        options: dict[str, Any] = {
            "slurm_partition": self.partition,
            "slurm_additional_parameters": self.more,
        }
        self._executor.update_parameters(
            name=f"specdec-{job.key}", nodes=1, tasks_per_node=1, cpus_per_task=job.threads, gpus_per_node=self.gpus,
            timeout_min=self.minutes, **{name: value for name, value in options.items() if value},
        )  # fmt: skip
        try:
            return self._executor.submit(Task(), self.study, job, self.cwd)
        except self._refused as error:  # what runs already is cancelled then, to be gone on with
            raise ValueError(f"SLURM does not take {job.label}: {last_line(error)}") from error

    def result(self, handle: Any) -> JobResult | None:
        if not handle.done(force_check=self._cancelling):
            return None
        if self._cancelling:  # a cancelled job leaves no result to wait for
            return JobResult("stopped")
        if (error := handle.exception()) is not None:
            return JobResult(None, f"SLURM job {handle.job_id}: {last_line(error)}")
        return handle.result()

    def cancel(self, handle: Any) -> None:
        self._cancelling = True  # SLURM is asked at every look, not once a minute
        handle.cancel(check=False)


class Task:
    """The call that submitit runs on a node: :func:`specdec.studies.worker.run_job`."""

    def __call__(self, *arguments: Any) -> JobResult:
        """Work at a job; how the attempt ended."""
        return run_job(*arguments)

    def checkpoint(self, *arguments: Any) -> Any:
        """Return the call to submit again when SLURM ends the job before its time."""
        import submitit

        return submitit.helpers.DelayedSubmission(self, *arguments)
