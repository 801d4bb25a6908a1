"""How long a study will take, by what of it is done; and what a plan does without."""

import logging
from pathlib import Path
from typing import Any

import pytest

from specdec.cli import main
from specdec.studies.schedulers import Engine, Local
from specdec.studies.study_file import read_study
from specdec.studies.sweep import expected, run_jobs
from specdec.studies.worker import Job, JobFolder
from tests.studies.conftest import MakeJob, Write
from tests.studies.made import attempt


class Elsewhere(Local):
    """Nobody here says how many run at once."""

    at_once = Engine.at_once


def jobs_of(study: Path, job: MakeJob, done: dict[str, float]) -> list[Job]:
    """Two arms of three seeds, fitted and evaluated; those of some names are done, in so many seconds."""
    made = []
    for arm, seed, kind in (
        (arm, seed, kind) for arm in "ab" for seed in range(3) for kind in ("fit", "evaluate")
    ):
        one = job(f"{arm}{seed}{kind[0]}", kind=kind, label=f"arm={arm} seed={seed}: {kind}")
        made.append(one)
        if one.key in done:
            folder = JobFolder(study, kind, one.key)
            folder.output.mkdir(parents=True)
            folder.last_file.touch()
            attempt(study, one.key, end="done", seconds=done[one.key])
    return made


@pytest.mark.parametrize(
    ("done", "engine", "wanted"),
    [
        ({}, Local(workers=2), "time: not known until the first jobs are done (6 fit, 6 evaluate left)"),
        (
            {"a0f": 600.0},  # of an arm that has none yet: as the other's
            Local(workers=2),
            "time: about 25 min for 5 jobs left, 2 at a time, as those done took; not known yet: 6 evaluate",
        ),
        (
            {"a0f": 600.0, "b0f": 1200.0, "a0e": 60.0},  # 2 x 600 + 2 x 1200 + 5 x 60
            Local(workers=1),
            "time: about 65 min for 9 jobs left, 1 at a time, as those done took",
        ),
        (
            {"a0f": 3600.0, "a0e": 10.0},
            Elsewhere(),
            "time: about 5 h 1 min for 10 jobs left, summed over jobs, as those done took",
        ),
        (
            {"a0f": 3.0, "a1f": 5.0, "a0e": 1.0},  # (4 x 4 + 5 x 1) / 4
            Local(workers=4),
            "time: about 5 s for 9 jobs left, 4 at a time, as those done took",
        ),
    ],
)  # fmt: skip
def test_what_is_left_is_told_by_what_was_done(
    study: Path, job: MakeJob, done: dict[str, float], engine: Engine, wanted: str
) -> None:
    assert expected(study, jobs_of(study, job, done), engine) == wanted


def test_a_finished_sweep_has_nothing_left_to_run(study: Path, job: MakeJob) -> None:
    made = jobs_of(study, job, {})
    done = jobs_of(study, job, dict.fromkeys((one.key for one in made), 5.0))
    assert expected(study, done, Local()) == "nothing is left to run"


def test_a_sweep_tells_it_when_its_first_jobs_are_done(
    study: Path, job: MakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "specdec")
    assert (
        run_jobs(study, [job("a"), job("b", label="arm=b seed=0: fit")], Local(workers=1))[0] == 0
    )
    (line,) = [line for line in caplog.messages if line.startswith("time: ")]
    assert line.endswith("s for 1 job left, 1 at a time, as those done took")


def test_a_plan_loads_and_trains_no_target(
    write: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a plan needs no weights")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    monkeypatch.setattr("specdec.target.loading.load_model", refuse)
    monkeypatch.setattr("specdec.target.source.load_model", refuse)
    monkeypatch.setattr("specdec.commands.pretraining.pretrain", refuse)
    study = write(axes={"K": {"model.ttt_steps": [1, 2]}}, baseline=None)
    assert main(["sweep", str(study), "--out", str(tmp_path / "out"), "--plan_only"]) == 0
    said = capsys.readouterr().out
    assert (
        "time: not known until the first jobs are done (5 cache, 10 fit, 10 evaluate left)" in said
    )
    assert not (tmp_path / "out").exists()


def test_a_study_of_the_package_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = read_study("conf/study/fusion.yaml")
    assert found.name == "fusion" and all(Path(file).is_file() for file in found.common.files)
    with pytest.raises(ValueError, match=r"conf/study/fusio\.yaml"):
        read_study("conf/study/fusio.yaml")
