"""Jobs that take no time, and studies of a tiny target."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specdec.sweep.job import Job
from specdec.sweep.worker import Way
from tests.serving.conftest import LONG, soon
from tests.serving.conftest import end as end  # a fixture
from tests.sweep.made import planned as planned
from tests.sweep.made import prompts_file as prompts_file
from tests.sweep.made import tiny as tiny
from tests.sweep.made import write as write

WAY = Way(Path(__file__).parents[2], "tests.sweep.commands", grace=100.0)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return tmp_path / "study"


@pytest.fixture
def job(study: Path) -> Callable[..., Job]:
    """Makes a job: its name, its command, and what else differs."""

    def make(key: str, command: str = "write", *more: object, **changes: object) -> Job:
        values = {
            "key": key, "kind": "fit", "label": f"arm={key} seed=0: fit", "directory": f"fits/{key}", "done": "done",
            "command": (command, str(study / "fits" / key), *map(str, more)), "resumes": True,
        }  # fmt: skip
        return Job(**values | changes)

    return make


@pytest.fixture
def runs(study: Path) -> Callable[[str], list[list[str]]]:
    """What the commands of a job have noted: a command, a process and threads for every run."""

    def read(key: str) -> list[list[str]]:
        path = study / "fits" / f"{key}.runs"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    return read


@pytest.fixture
def go(tmp_path: Path) -> Iterator[Path]:
    """What a command waits for; there at the end at the latest."""
    path = tmp_path / "go"
    yield path
    path.touch()


def pids(study: Path, key: str) -> list[int]:
    """Of a command that waits, and of its child."""
    path = study / "fits" / key / "pids"
    assert soon(lambda: path.exists() and path.read_text(), LONG)
    return [int(word) for word in path.read_text().split()]


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in path.read_text().split()] if path.exists() else []
