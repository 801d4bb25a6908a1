"""Workers as tasks of Ray, here or on all nodes of a cluster that share the study's folder."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.studies.run import Ended, Engine
from specdec.studies.worker import Job, Launch, work

TELEMETRY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_USAGE_STATS_PROMPT_ENABLED": "0"}


@dataclass
class Ray(Engine):
    """Tasks of Ray, spread over its nodes, each with its job's threads and memory reserved.

    Ray begins a task anew when the process that runs it, or its node, is lost. A cluster that is started here has no
    dashboard, and sends no usage statistics.

    Args:
        address: of a cluster that runs: ``auto`` for the one this machine belongs to, ``ray://HOST:10001``, ...; None
            starts one on this machine alone, for this sweep.
        gpus: of each job; a fraction shares one.
        cores: of this machine that are Ray's where it is started; all by default.

    Raises:
        ValueError: cores and an address were given.
    """

    address: str | None = None
    gpus: float = 0.0
    cores: int | None = None

    def __post_init__(self) -> None:
        if self.address is not None and self.cores is not None:
            raise ValueError(
                "cores of the Ray engine are of a cluster that is started here: leave them or the address out"
            )

    def open(self, study: Path, launch: Launch, retries: int) -> None:
        """Connect, or start a cluster on this machine.

        Raises:
            ValueError: Ray is not installed, or the cluster cannot be had.
        """
        super().open(study, launch, retries)
        os.environ.update(TELEMETRY)
        try:
            import ray
        except ImportError as error:
            raise ValueError("the Ray engine needs Ray: pip install 'specdec-lightning[ray]'") from error
        own: dict[str, Any] = {} if self.address else {"num_cpus": self.cores, "include_dashboard": False}
        try:
            ray.init(self.address or "local", log_to_driver=False, logging_level=logging.ERROR, **own)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ValueError(f"Ray cannot be had at {self.address or 'this machine'}: {error}") from error
        self._ray: Any = ray
        self._work = ray.remote(max_retries=retries, scheduling_strategy="SPREAD")(work)

    def _nodes(self) -> list[dict[str, float]]:
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def refuses(self, job: Job) -> str:
        """A job for which no node has memory or GPUs enough."""
        for node in self._nodes():
            if node.get("memory", 0) >= (job.memory_bytes or 0) and node.get("GPU", 0) >= self.gpus:
                return ""
        gpus = f" and {self.gpus:g} GPUs" if self.gpus else ""
        return f"needs {(job.memory_bytes or 0) / 1e9:.1f} GB of memory{gpus}, which no node of the Ray cluster has"

    def submit(self, job: Job) -> Any:
        """Submit a task; a job of more threads than any node has cores gets the whole of one."""
        most = max(node.get("CPU", 0) for node in self._nodes())
        options = {"num_cpus": min(job.threads, most), "num_gpus": self.gpus, "memory": job.memory_bytes}
        return self._work.options(name=job.label, **options).remote(self.study.resolve(), job, self.launch)

    def result(self, handle: Any) -> Ended | None:
        """As :meth:`Engine.result`."""
        if not self._ray.wait([handle], timeout=0)[0]:
            return None
        try:
            return Ended(*self._ray.get(handle))
        except (self._ray.exceptions.RayError, OSError, ValueError) as error:
            return Ended(None, f"Ray: {last_line(error)}")

    def cancel(self, handle: Any) -> None:
        """As :meth:`Engine.cancel`."""
        self._ray.cancel(handle)

    def close(self) -> None:
        """Wait for the tasks' ends, and leave the cluster."""
        super().close()
        self._ray.shutdown()


def last_line(error: BaseException) -> str:
    """What an error says last, or its kind if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
