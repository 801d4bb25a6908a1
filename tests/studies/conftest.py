"""Jobs that take no time, and studies of a tiny target."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.studies.jobs import StudyPlan, make_plan
from specdec.studies.study import Study
from specdec.studies.study_file import read_study
from specdec.studies.sweep import Phase, SweepJob
from specdec.studies.worker import Job, JobFolder
from tests.engines.conftest import LONG, soon
from tests.engines.conftest import end as end  # a fixture

ROOT = Path(__file__).parents[2]
MakeJob = Callable[..., Job]
Runs = Callable[[str], list[list[str]]]
Write = Callable[..., Path]
MakePlan = Callable[..., StudyPlan]


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return tmp_path / "study"


@pytest.fixture
def job(study: Path) -> MakeJob:
    """Makes a job: its name, its command, and what else differs."""

    def make(
        key: str, command: str = "write", *more: object, kind: str = "fit", **changes: Any
    ) -> Job:
        out = str(JobFolder(study, kind, key).output)
        label, words = (
            f"arm={key} seed=0: fit",
            ("tests.studies.commands", command, out, *map(str, more)),
        )
        return Job(**{"key": key, "kind": kind, "label": label, "command": words} | changes)

    return make


@pytest.fixture
def runs(study: Path) -> Runs:
    """What the commands of a job have noted: a command, a process and threads for every run."""

    def read(key: str) -> list[list[str]]:
        return [
            line.split()
            for path in study.glob(f"*/{key}.runs")
            for line in path.read_text().splitlines()
        ]

    return read


@pytest.fixture
def go(tmp_path: Path) -> Iterator[Path]:
    """What a command waits for; there at the end at the latest."""
    path = tmp_path / "go"
    yield path
    path.touch()


def phases(outcome: tuple[int, dict[str, SweepJob]]) -> dict[str, Phase]:
    return {key: entry.phase for key, entry in outcome[1].items()}


def pids(study: Path, key: str) -> list[int]:
    """Of a command that waits, and of its child."""
    assert soon(lambda: any(path.read_text() for path in study.glob(f"*/{key}/pids")), LONG)
    return [int(word) for path in study.glob(f"*/{key}/pids") for word in path.read_text().split()]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children(pid: int) -> list[int]:
    """Of all of its threads."""
    return [
        int(word)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for word in path.read_text().split()
    ]


def base(target: Path, text: Path, prompts: Path) -> dict[str, Any]:
    """Two axes, three seeds, an evaluation."""
    return {
        "name": "tiny",
        "set": {
            "model.target.source": str(target), "model.drafter.draft_vocab_size": 200, "data": "TextData",
            "data.train": str(text), "data.val": str(text), "data.seq_len": 32, "data.batch_size": 2,
            "trainer.max_steps": 2, "trainer.accelerator": "cpu", "trainer.limit_val_batches": 0,
            "trainer.logger": False, "trainer.enable_model_summary": False,
        },
        "axes": {
            "fc_norm": {"off": {"model.drafter.norms.aux": "none"}, "on": {"model.drafter.norms.aux": "each"}},
            "K": {"model.ttt_steps": [1, 2]},
        },
        "baseline": {"fc_norm": "off", "K": 2},
        "evaluate": {"prompts": [str(prompts)], "shape": "chain:depth=2", "max_new_tokens": 8},
    }  # fmt: skip


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text('{"prompt": "def add_1(a, b):"}\n{"prompt": "    return a"}\n')
    return path


@pytest.fixture
def write(target_directory: Path, text_file: Path, prompts_file: Path, tmp_path: Path) -> Write:
    """Writes the base study with changes; what becomes None is left out, and ``set`` is added to."""

    def write(**changes: Any) -> Path:
        given = base(target_directory, text_file, prompts_file)
        given |= changes | {"set": given["set"] | changes.get("set", {})}
        given["set"] = {key: value for key, value in given["set"].items() if value is not None}
        path = tmp_path / "study.yaml"
        path.write_text(
            yaml.safe_dump({k: v for k, v in given.items() if v is not None}, sort_keys=False)
        )
        return path

    return write


@pytest.fixture
def planned(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakePlan:
    """The plan of the base study with changes."""
    monkeypatch.setattr("sys.argv", ["specdec"])

    def planned(**changes: Any) -> StudyPlan:
        flags = {
            name: changes.pop(name) for name in ("threads", "allow_unequal") if name in changes
        }
        return make_plan(
            read_study(write(**changes), allow_few_seeds=True), tmp_path / "runs", **flags
        )

    return planned


@pytest.fixture(scope="session")
def tiny(
    target_directory: Path,
    text_file: Path,
    prompts_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Study, StudyPlan]:
    """The base study and its plan; nothing of it is written."""
    path = tmp_path_factory.mktemp("study") / "study.yaml"
    path.write_text(
        yaml.safe_dump(base(target_directory, text_file, prompts_file), sort_keys=False)
    )
    given = read_study(path)
    return given, make_plan(given, path.parent / "runs")
