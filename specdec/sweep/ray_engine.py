"""Workers as tasks of Ray, here or on all nodes of a cluster that share the study's folder."""

import logging
import os
import time
from pathlib import Path
from typing import Any, Self

from specdec.sweep.engine import Ended, Engine, last_line
from specdec.sweep.job import Job
from specdec.sweep.worker import PATIENCE, Way, work

log = logging.getLogger(__name__)

TELEMETRY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_USAGE_STATS_PROMPT_ENABLED": "0"}


class Ray(Engine):
    """Tasks of Ray, spread over its nodes, each with its job's threads and memory reserved.

    Ray begins a task anew when the process that runs it, or its node, is lost. A cluster that is started here has no
    dashboard, and sends no usage statistics. Ray has a process called ``dashboard.py`` all the same, whose command line
    names port 8265: it keeps the statistics that are off, and listens nowhere.

    Args:
        address: of a cluster that runs: ``auto`` for the one this machine belongs to, ``ray://HOST:10001``, ...; None
            starts one on this machine alone, for this sweep.
        gpus: of each job; a fraction shares one.
        cores: of this machine that are Ray's where it is started; all by default.
    """

    def __init__(self, address: str | None = None, gpus: float = 0.0, cores: int | None = None) -> None:
        if address is not None and cores is not None:
            raise ValueError(
                "cores of the Ray engine are of a cluster that is started here: leave them or the address out"
            )
        self.address, self.gpus, self.cores = address, gpus, cores
        self._running: dict[Any, str] = {}  # a task's reference and its job

    def open(self, study: Path, way: Way, retries: int) -> Self:
        """Connect, or start a cluster on this machine.

        Raises:
            ValueError: Ray is not installed, or the cluster cannot be had.
        """
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
        self.ray, self.way = ray, way
        self._work = ray.remote(max_retries=retries, scheduling_strategy="SPREAD")(_work)
        return self

    def _nodes(self) -> list[dict[str, float]]:
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

    def describe(self) -> str:
        """As :meth:`Engine.describe`."""
        nodes = self._nodes()
        cores = sum(node.get("CPU", 0) for node in nodes)
        return f"Ray, {len(nodes)} node{'s'[len(nodes) == 1 :]}, {cores:g} cores"

    def refuses(self, job: Job) -> str:
        """A job for which no node has memory or GPUs enough."""
        for node in self._nodes():
            if node.get("memory", 0) >= (job.memory_bytes or 0) and node.get("GPU", 0) >= self.gpus:
                return ""
        gpus = f" and {self.gpus:g} GPUs" if self.gpus else ""
        return f"needs {(job.memory_bytes or 0) / 1e9:.1f} GB of memory{gpus}, which no node of the Ray cluster has"

    def has_room(self, job: Job) -> bool:
        """Always: Ray has a queue of its own."""
        return True

    def start(self, folder: Path, job: Job) -> None:
        """Submit a task; a job of more threads than any node has cores gets the whole of one."""
        most = max(node.get("CPU", 0) for node in self._nodes())
        task = self._work.options(
            name=job.label, num_cpus=min(job.threads, most), num_gpus=self.gpus, memory=job.memory_bytes
        )
        self._running[task.remote(str(folder.resolve()), self.way)] = job.key

    def ended(self, seconds: float) -> list[Ended]:
        """As :meth:`Engine.ended`."""
        if not self._running:
            time.sleep(seconds)  # jobs that another runner has are looked at again then
            return []
        done, _ = self.ray.wait(list(self._running), timeout=seconds)
        found = []
        for task in done:
            key = self._running.pop(task)
            try:
                found.append(Ended(key, self.ray.get(task)))
            except (self.ray.exceptions.RayError, OSError, ValueError) as error:
                found.append(Ended(key, None, f"Ray: {last_line(error)}"))
        return found

    def close(self) -> None:
        """Cancel the tasks, wait for their ends, and leave the cluster."""
        for task in self._running:
            self.ray.cancel(task)
        if self._running:
            running, most = list(self._running), self.way.grace + PATIENCE
            self.ray.wait(running, num_returns=len(running), timeout=most)
        self._running = {}
        self.ray.shutdown()


def _work(folder: str, way: Way) -> int:
    return work(Path(folder), way)
