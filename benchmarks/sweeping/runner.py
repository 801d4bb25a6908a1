"""The process that runs the sweep, to be killed: ``python -m benchmarks.sweeping.runner SPEC``."""

import logging
import os
import resource
import sys
from pathlib import Path
from typing import Any

from specdec.files import read_json, write_json
from specdec.sweep.engine import Engine
from specdec.sweep.job import Job
from specdec.sweep.local import Local
from specdec.sweep.ray_engine import Ray
from specdec.sweep.run import run
from specdec.sweep.table import Shown
from specdec.sweep.worker import Way


def main(spec: Path) -> int:
    """Run it, and write what it came to."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    asked: dict[str, Any] = read_json(spec)
    jobs = [Job.from_json(data, str(spec)) for data in asked["jobs"]]
    workers = asked["workers"]
    engine: Engine = Ray(cores=workers) if asked["engine"] == "ray" else Local(workers=workers, cores=workers)
    way = Way(Path.cwd(), asked["module"], asked["grace"])
    with Shown() as shown:
        outcome = run(Path(asked["study"]), jobs, engine, way=way, watch=shown.watch)
    used = resource.getrusage(resource.RUSAGE_SELF)
    write_json(
        asked["out"],
        {
            "status": outcome.status, "done": len(outcome.done), "failed": dict(outcome.failed),
            "seconds": outcome.seconds, "workers_seconds": outcome.workers_seconds,
            "cpu_seconds": used.ru_utime + used.ru_stime, "load": os.getloadavg(),
        },
    )  # fmt: skip
    return outcome.status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
