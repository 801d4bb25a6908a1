"""A study's plan: its jobs, what they share, and what of them is left; and the sweep that runs it."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.cli import main
from specdec.drafter import load_drafter
from specdec.embedded.corpus import Corpus, CorpusFile
from specdec.evaluation.prompts import load_prompts, prompts_sha256
from specdec.features.store import FeatureIndex
from specdec.studies import jobs, sweep
from specdec.studies.arms import arm_differences, read_prompts
from specdec.studies.jobs import PLAN, StudyPlan, claim
from specdec.studies.study import Study
from specdec.studies.study_file import read_study
from specdec.studies.sweep import SweepJob
from specdec.studies.worker import Job, JobFolder
from specdec.utils.reading import read_json
from tests.studies.conftest import MakePlan, Write


def test_what_plan_json_says(tiny: tuple[Study, StudyPlan]) -> None:
    plan = tiny[1]
    said = json.loads(json.dumps(plan.to_json()))
    assert said["name"] == "tiny" and said["design"] == "grid"
    assert said["axes"] == {"fc_norm": ["off", "on"], "K": ["1", "2"]} and said["seeds"] == [
        *range(5)
    ]
    assert [arm["name"] for arm in said["arms"] if arm["is_baseline"]] == ["fc_norm=off K=2"]
    assert said["baseline"] == {"fc_norm": "off", "K": "2"} == said["arms"][1]["levels"]
    jobs = plan.jobs
    assert len(said["prompts_sha256"]) == len(said["study_sha256"]) == 64
    seen: set[str] = set()
    for key, job in jobs.items():
        assert set(job.needs) <= seen
        seen.add(key)
    kinds = [job.kind for job in jobs.values()]
    assert {kind: kinds.count(kind) for kind in kinds} == {"cache": 5, "fit": 20, "evaluate": 20}
    caches = [key for key, job in jobs.items() if job.kind == "cache"]
    for arm in said["arms"]:
        assert [run["seed"] for run in arm["runs"]] == [*range(5)]
        for run, cache in zip(arm["runs"], caches, strict=True):
            fit, evaluate = jobs[run["fit"]], jobs[run["evaluate"]]
            assert fit.label == f"{arm['name']} seed={run['seed']}: fit" and fit.needs == (cache,)
            assert evaluate.needs == (fit.key,) and run["drift"] is run["robustness"] is None
            assert fit.command[-4:] == (
                "--out",
                str(plan.directory / "fits" / fit.key),
                "--ckpt_path",
                "auto",
            )
            assert str(plan.directory / "measures" / evaluate.key) in evaluate.command
            config = fit.config
            assert config["seed_everything"] == run["seed"]
            assert config["data"]["init_args"]["seed"] == run["seed"]
            assert jobs[cache].config["data"]["init_args"]["seed"] == run["seed"]
            assert config["model"]["features"]["init_args"]["directory"] == str(
                plan.directory / "features" / cache
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    "data", [{"data.seed": 7}, {"data.init_args.seed": 7}], ids=["short", "as it is written"]
)
def test_a_study_that_gives_data_seed_has_it_with_every_seed(
    planned: MakePlan, data: dict[str, Any]
) -> None:
    axes: dict[str, Any] = {"K": {"model.ttt_steps": [1, 2]}}
    plan = planned(axes=axes, baseline=None, seeds=[0, 1, 2], set=data)
    assert not plan.to_json()["varies_data"]
    jobs = [job for job in plan.jobs.values() if job.kind in ("cache", "fit")]
    assert [job.kind for job in jobs] == ["cache", *["fit"] * 6]
    assert {job.config["data"]["init_args"]["seed"] for job in jobs} == {7}
    axes["order"] = {"data.seed": [0, 1]}
    along = planned(axes=axes, baseline=None, seeds=[0, 1, 2])
    assert not along.study.varies_data
    assert [job.kind for job in along.jobs.values()].count("cache") == 2


@pytest.mark.parametrize("nested", [True, False])
def test_a_config_file_that_gives_data_seed_is_obeyed(
    planned: MakePlan, tmp_path: Path, nested: bool
) -> None:
    files = []
    for seed in (7, 8):
        file = tmp_path / f"order{seed}.yaml"
        file.write_text(
            f"data:\n  init_args:\n    seed: {seed}\n" if nested else f"data.seed: {seed}\n"
        )
        files.append(str(file))
    axes: dict[str, Any] = {"order": {"a": files[0], "b": files[1]}}
    plan = planned(axes=axes, baseline=None, seeds=[0, 1, 2])
    assert not plan.to_json()["varies_data"]
    fits = [job for job in plan.jobs.values() if job.kind == "fit"]
    assert len(fits) == 6
    assert {job.config["data"]["init_args"]["seed"] for job in fits} == {7, 8}


def by_levels(plan: StudyPlan, axis: str, on: str) -> dict[tuple[str, bool, int], Any]:
    pairs = [(arm, run) for arm, runs in zip(plan.arms, plan.runs, strict=True) for run in runs]
    return {(arm.levels["K"], arm.levels[axis] == on, run["seed"]): run for arm, run in pairs}


def test_planning_again_in_another_order_gives_the_same_keys(
    tiny: tuple[Study, StudyPlan], planned: MakePlan
) -> None:
    axes: dict[str, Any] = {"K": {"model.ttt_steps": [3, 1]}}
    axes |= {
        "norm": {
            "with": {"model.drafter.norms.aux": "each"},
            "none": {"model.drafter.norms.aux": "none"},
        }
    }
    other = planned(
        axes=axes,
        baseline={"K": 1, "norm": "none"},
        leave_out=[{"K": 3, "norm": "with"}],
        seeds=[2, 0],
    )
    mine, theirs = by_levels(tiny[1], "fc_norm", "on"), by_levels(other, "norm", "with")
    assert len(theirs) == 6 and len(set(theirs) & set(mine)) == 4
    assert all(theirs[run] == mine[run] for run in set(theirs) & set(mine))


def test_generations_share_what_is_the_same_to_them(planned: MakePlan) -> None:
    growth = {"evaluate.shape": ["tree:depth=2,top_k=2,nodes=4"]}
    axes = {
        "generation": {
            "EAGLE-1": "conf/train/eagle1.yaml",
            "EAGLE-2": ["conf/train/eagle1.yaml", growth],
            "EAGLE-3": ["conf/train/eagle3.yaml", {"model.drafter.aux_layers": [1, 4, 5]}],
            "EAGLE-3.1": "conf/train/eagle3_1.yaml",
        }
    }
    plan = planned(axes=axes, baseline=None, set={"model.drafter.draft_vocab_size": None})
    kinds = [job.kind for job in plan.jobs.values()]
    assert {kind: kinds.count(kind) for kind in kinds} == {"cache": 5, "fit": 15, "evaluate": 20}
    one, two = plan.runs[0][0], plan.runs[1][0]
    assert one["fit"] == two["fit"] and one["evaluate"] != two["evaluate"]
    changes = arm_differences(plan.arms[0], plan.arms[1])
    assert [line.split(":")[0] for line in changes] == ["evaluate.shape"]
    cache, *_ = (key for key, job in plan.jobs.items() if job.kind == "cache")
    layers = " ".join(plan.jobs[cache].command).partition(" --layers ")[2]
    assert layers.startswith("1 2 3 4 5 --")
    assert plan.jobs[cache].label == "features of 4 arms"


@pytest.mark.slow
def test_no_more_features_are_stored_than_fits_draw(planned: MakePlan) -> None:
    keys: list[str] = []

    def stored(**changes: Any) -> Any:
        plan = planned(**changes, baseline=None, seeds=[0], evaluate=None)
        (one,) = (job for job in plan.jobs.values() if job.kind == "cache")
        keys.append(one.key)
        command = list(one.command)
        return (
            int(command[command.index("--first_rows") + 1]) if "--first_rows" in command else None
        )

    alone: dict[str, Any] = {"axes": {"K": {"model.ttt_steps": [1, 2]}}, "leave_out": [{"K": 2}]}
    # steps, rows of a batch
    assert stored(axes={"steps": {"trainer.max_steps": [1, 2]}}, allow_unequal=True) == 2 * 2
    assert stored(**alone, set={"trainer.accumulate_grad_batches": 3}) == 3 * 2 * 2
    assert stored(**alone, set={"trainer.max_steps": 1, "data.batch_size": 4}) == 4
    assert len(set(keys)) == 2 and keys[0] == keys[2]
    scheduler = {"class_path": "GradientAccumulationScheduler", "init_args": {"scheduling": {1: 4}}}
    for key, value in {"callbacks": [scheduler], "limit_train_batches": 3, "devices": 2}.items():
        assert stored(**alone, set={f"trainer.{key}": value}) is None


def test_no_more_validation_features_are_stored_than_fits_read(planned: MakePlan) -> None:
    plan = planned(
        axes={"K": {"model.ttt_steps": [1, 2]}}, baseline=None, seeds=[0], evaluate=None, leave_out=[{"K": 2}]
    )  # fmt: skip
    (arm,) = plan.arms
    keys: list[str] = []

    def stored(limit: Any, **settings: Any) -> str:
        trainer = {**arm.config["trainer"], "limit_val_batches": limit, **settings}
        planner = jobs._Planner(plan.study, plan.directory, 1, {})
        planner.add_caches([dataclasses.replace(arm, config={**arm.config, "trainer": trainer})])
        (cache,) = planner.jobs.values()
        keys.append(cache.key)
        return " ".join(cache.command).partition("--first_val_rows ")[2]

    assert [stored(limit) for limit in (0, 1, 4)] == ["0", "2", "8"]  # of two rows a batch
    assert [stored(limit) for limit in (None, 1.0, 0.5)] == [""] * 3
    assert stored(1, overfit_batches=2) == stored(1, devices=2) == ""
    assert len(set(keys[:4])) == 4  # so that a cache of few rows serves no study that reads more


def test_the_jobs_that_are_left_of_a_plan(tiny: tuple[Study, StudyPlan], tmp_path: Path) -> None:
    plan = dataclasses.replace(tiny[1], directory=tmp_path)
    assert plan.left() == plan.jobs
    assert [job.kind for job in plan.left(["fc_norm=on K=2"]).values()] == [
        *["cache", "fit", "evaluate"] * 5,
    ]
    for run in plan.runs[0]:
        (tmp_path / "fits" / run["fit"]).mkdir(parents=True)
        (tmp_path / "fits" / run["fit"] / "DONE.json").write_text("{}")
    left = plan.left(["fc_norm=off K=1"])  # the cache is not made again for fits that are done
    assert [job.kind for job in left.values()] == ["fit", "evaluate"] * 5
    assert all(left[run["fit"]].needs == () for run in plan.runs[0])


def test_embedded_prompts_are_cut_and_written_once(
    planned: MakePlan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body = "    total = a + b\n    if total > a:\n        return b\n    return total"
    text = "".join(f"def add_{n}(a, b):\n{body} + {n}\n\n\n" for n in range(40))
    found = Corpus(
        [], [CorpusFile("one.py", text), CorpusFile("two.py", text.replace("add", "sub"))]
    )
    monkeypatch.setattr("specdec.embedded.corpus.corpus", lambda seed: found)
    evaluate = {
        "prompts_count": 3,
        "prompt_tokens": 12,
        "max_new_tokens": 4,
        "shape": ["chain:depth=1"],
    }
    plan = planned(
        seeds=[0], axes={"K": {"model.ttt_steps": [1, 2]}}, baseline=None, evaluate=evaluate
    )
    prompts = plan.prompts["evaluate"]
    assert prompts.text is not None and Path(prompts.files[0]).parent == plan.directory
    plan.write()
    asked = load_prompts(list(prompts.files))
    assert prompts_sha256(asked) == prompts.sha256 and len(asked) == 3
    study = dataclasses.replace(plan.study, measures={"evaluate": evaluate | {"prompts_count": 4}})
    more = read_prompts(study, plan.baseline.target, plan.directory)
    # a sweep that runs goes on asking what it has planned
    assert more["evaluate"].files != prompts.files
    before = {path: path.read_bytes() for path in plan.directory.rglob("*.yaml")}
    plan.write()
    assert {path: path.read_bytes() for path in plan.directory.rglob("*.yaml")} == before
    plan.show()
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "K=1 this is the baseline K=2 model.ttt_steps: 1 to 2" in said
    assert "grid: 2 arms" in said
    assert "every fit trains on 128 tokens" in said


def in_process(
    directory: Path, jobs: Iterable[Job], engine: Any, title: str
) -> tuple[int, dict[str, SweepJob]]:
    """Every job's command, in this process; what is done is not begun."""
    ran = []
    for job in jobs:
        folder = JobFolder(directory, job.kind, job.key)
        if not folder.is_done():
            assert main(list(job.command[1:])) == 0, job.label
            ran.append(job.label)
        assert folder.is_done()
    (directory / "ran").write_text(json.dumps(ran))
    return 0, {}


@pytest.mark.slow
def test_a_sweep_runs_what_it_planned_once(
    write: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, cards = tmp_path / "study", list[Path]()
    monkeypatch.setattr(sweep, "run_jobs", in_process)
    monkeypatch.setattr(sweep, "write_card", cards.append)
    study = {"seeds": [1], "axes": {"K": {"model.ttt_steps": [1, 2]}}, "baseline": {"K": 1}}
    given = ["sweep", str(write(**study)), "--out", str(out), "--allow_few_seeds", "--only", "K=2"]
    assert main([*given, "--plan_only"]) == 0 and not out.exists()
    assert (
        "jobs: 0 of 1 cache done, 0 of 2 fit done, 0 of 2 evaluate done" in capsys.readouterr().out
    )
    assert cards == [] and main(given) == 0 and cards == [out]
    assert [label.rpartition(" ")[2] for label in read_json(out / "ran")] == [
        "arms",
        "fit",
        "evaluate",
    ]
    plan = read_json(out / PLAN)
    (run,) = plan["arms"][1]["runs"]
    assert load_drafter(out / "fits" / run["fit"] / "drafter").config.draft_vocab_size == 200
    metrics = read_json(out / "measures" / run["evaluate"] / "metrics.json")
    assert (
        metrics["settings"]["prompts_sha256"] == plan["prompts_sha256"]
        and not metrics["settings"]["compile"]
    )
    (cache,) = out.glob("features/*")
    assert FeatureIndex.read(cache / "index.json").contract.layers == (2, 3, 4)
    saved = yaml.safe_load((out / "fits" / run["fit"] / "config.yaml").read_text())
    asked = yaml.safe_load((out / "jobs" / run["fit"] / "config.yaml").read_text())
    assert (saved["seed_everything"], saved["data"]["init_args"]["seed"]) == (1, 1)
    assert {name: saved[name] for name in asked} == asked  # nothing was left to a default
    assert (
        read_study(out / "study.yaml", allow_few_seeds=True).combinations
        == read_study(given[1], True).combinations
    )
    more = {**study, "axes": {"K": {"model.ttt_steps": [1, 2, 3]}}}
    assert main(["sweep", str(write(**more)), *given[2:]]) == 0
    assert read_json(out / "ran") == []  # the arm is done, whatever arms have come
    assert [arm["name"] for arm in read_json(out / PLAN)["arms"]] == ["K=1", "K=2", "K=3"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--only", "K=7"], "--only 'K=7': no such arm; there are: K=1, K=2"),
        (["--threads", "0"], "--threads must be at least 1"),
        (["--engine", "cloud"], "engine"),
        (["--engine.workers", "0"], "--engine.workers must be at least 1, not 0"),
    ],
)
def test_a_wrong_sweep_is_refused_before_anything_is_written(
    write: Write, tmp_path: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(
        axes={"K": {"model.ttt_steps": [1, 2]}}, baseline=None, evaluate=None, features="on_the_fly"
    )
    assert main(["sweep", str(path), "--out", str(tmp_path / "out"), *more]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1] and not (tmp_path / "out").exists()


def test_an_engine_by_its_name(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("submitit")
    path = write(
        axes={"K": {"model.ttt_steps": [1, 2]}}, baseline=None, evaluate=None, features="on_the_fly"
    )
    given = [
        "sweep",
        str(path),
        "--out",
        str(tmp_path / "out"),
        "--engine",
        "Slurm",
        "--engine.partition",
        "gpu",
    ]
    assert main(given) == 2
    assert "there is no sbatch here" in capsys.readouterr().err


def test_a_directory_of_something_else_is_left_alone(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("mine")
    assert main(["sweep", str(write()), "--out", str(tmp_path / "out")]) == 2
    assert "holds no study: choose another --out" in capsys.readouterr().err
    (tmp_path / "out" / "study.yaml").write_text("name: drift\n")
    assert main(["sweep", str(write()), "--out", str(tmp_path / "out")]) == 2
    assert "holds the study drift, not tiny" in capsys.readouterr().err
    (tmp_path / "linked" / "fits").mkdir(parents=True)  # of a study with the same trainings
    claim(tmp_path / "linked", "tiny")


def test_a_study_with_a_link_out_of_it_is_left_alone(tmp_path: Path) -> None:
    """Only fits and features may be those of another study."""
    (tmp_path / "other" / "fits").mkdir(parents=True)
    (tmp_path / "out" / "jobs").mkdir(parents=True)
    (tmp_path / "out" / "study.yaml").write_text("name: tiny\n")
    (tmp_path / "out" / "fits").symlink_to(tmp_path / "other" / "fits")
    claim(tmp_path / "out", "tiny")
    (tmp_path / "out" / "jobs" / "key").symlink_to(tmp_path / "other")
    with pytest.raises(ValueError, match="jobs/key: it is a link out of "):
        claim(tmp_path / "out", "tiny")
