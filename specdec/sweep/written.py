"""A job with the config file that its command names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from specdec.files import write_json, write_text
from specdec.sweep.job import Job

CONFIG, JOB = "config.yaml", "job.json"


class Written(NamedTuple):
    """What lies in a job's folder before it begins."""

    job: Job
    config: Mapping[str, Any]

    def write(self, study: Path) -> None:
        """Into ``jobs/KEY``; what is there already and the same is left alone."""
        folder = study / "jobs" / self.job.key
        text = yaml.safe_dump(dict(self.config), sort_keys=False, allow_unicode=True)
        if not (folder / CONFIG).is_file() or (folder / CONFIG).read_text(encoding="utf-8") != text:
            write_text(folder / CONFIG, text)
        write_json(folder / JOB, self.job.to_json())


def config_of(study: Path, key: str) -> str:
    """Where a job's config file is."""
    return str(study / "jobs" / key / CONFIG)
