"""A study's plan: every arm, every run of it, and the jobs that make them, before any of them begins.

``features: cached`` reads the target once: one ``specdec cache`` for all arms and seeds whose target and data agree.
It stores the union of the layer boundaries that its arms tap; a row is found by its tokens, in whatever order.
"""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from specdec.features.contract import INCIDENTAL
from specdec.features.source import OnTheFly
from specdec.features.store import INDEX
from specdec.studies.arms import Arm, check_equal, differences, read_arms
from specdec.studies.keys import contents, digest, fit_decisive, key_of, target_contents
from specdec.studies.measures import (
    COMMANDS,
    DONE,
    PROCESS_BYTES,
    Measure,
    StudyPrompts,
    parse_measure,
    read_prompts,
    weights_bytes,
)
from specdec.studies.study import Study, arm_name, read_strictly
from specdec.studies.worker import CONFIG, JOBS, Job
from specdec.utils.config_diff import canonical
from specdec.utils.files import read_json, write_json, write_text
from specdec.utils.imports import flags
from specdec.utils.machine import provenance

VERSION = 2
PLAN, STUDY = "plan.json", "study.yaml"
ON_THE_FLY, CACHED = "OnTheFly", "Cached"


@dataclass(frozen=True)
class StudyPlan:
    """Everything that a study comes to.

    Args:
        directory: the study's.
        runs: of every arm, one for each seed: its ``seed`` and, by kind, the keys of its jobs.
        jobs: by key; a job comes after those that it needs.
        unequal: what of budget and data differs between arms, where that was allowed.
    """

    study: Study
    directory: Path
    arms: tuple[Arm, ...]
    runs: tuple[tuple[Mapping[str, Any], ...], ...]
    jobs: Mapping[str, Job]
    prompts: Mapping[str, StudyPrompts]
    unequal: tuple[str, ...] = ()

    @property
    def baseline(self) -> Arm:
        """The arm that all others are compared with."""
        return next(arm for arm in self.arms if arm.levels == self.study.baseline)

    def is_done(self, key: str) -> bool:
        """Whether what a job makes is there."""
        job = self.jobs[key]
        return (self.directory / job.directory / job.done).is_file()

    def left(self, arms: Sequence[str] | None = None) -> dict[str, Job]:
        """The jobs that are still to be run, of some arms alone if they are named; and, without needs, what is done.

        What only done jobs needed is not among them: a study's caches may be removed when its fits are done.
        """
        wanted = dict[str, Job]()

        def want(key: str) -> None:
            done = self.is_done(key)
            for need in () if done else self.jobs[key].needs:
                want(need)
            wanted[key] = dataclasses.replace(self.jobs[key], needs=()) if done else self.jobs[key]

        for arm, runs in zip(self.arms, self.runs, strict=True):
            if arms is None or arm.name in arms:
                for key in (run[kind] for run in runs for kind in ("fit", *COMMANDS)):
                    if key is not None:
                        want(key)
        return wanted

    def to_json(self) -> dict[str, Any]:
        """What ``plan.json`` holds."""
        asked = self.prompts.get("evaluate") or next(iter(self.prompts.values()), None)
        return {
            "version": VERSION,
            "name": self.study.name,
            "design": self.study.design,
            "axes": {axis.name: axis.names for axis in self.study.axes},
            "baseline": self.study.baseline,
            "seeds": list(self.study.seeds),
            "arms": [
                {
                    "name": arm.name,
                    "levels": arm.levels,
                    "is_baseline": arm.levels == self.study.baseline,
                    "differences": differences(self.baseline, arm),
                    "trained_parameters": arm.trained,
                    "trained_depth": arm.config["model"]["ttt_steps"],
                    "tokens": arm.tokens,
                    "runs": [dict(run) for run in runs],
                }
                for arm, runs in zip(self.arms, self.runs, strict=True)
            ],
            "unequal": list(self.unequal),
            "jobs": {key: job.to_json() for key, job in self.jobs.items()},
            "prompts_sha256": asked.sha256 if asked else None,
            "study_sha256": hashlib.sha256(self.study.text.encode()).hexdigest(),
        }

    def write(self) -> None:
        """Write the study, then its prompts and the configs of its jobs; ``plan.json`` last.

        Raises:
            ValueError: they cannot be written.
        """
        write_text(self.directory / STUDY, self.study.text)
        for prompts in self.prompts.values():
            if prompts.name is not None:
                write_text(self.directory / prompts.name, prompts.text)
        for job in self.jobs.values():
            path = Path(_config(self.directory, job.key))
            text = yaml.safe_dump(dict(job.config), sort_keys=False, allow_unicode=True)
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                write_text(path, text)
        write_json(self.directory / PLAN, self.to_json() | {"provenance": provenance()})

    def show(self, console: Console) -> None:
        """Print the arms, what each changes against the baseline, and how much of it is done."""
        table = Table("arm", "changes against the baseline", "fits", *self.prompts, box=None, padding=(0, 2, 0, 0))
        for arm, runs in zip(self.arms, self.runs, strict=True):
            changes = differences(self.baseline, arm) or ["this is the baseline"]
            keys = [[run[kind] for run in runs if run[kind] is not None] for kind in ("fit", *self.prompts)]
            done = [f"{sum(map(self.is_done, each))}/{len(each)} done" if each else "" for each in keys]
            table.add_row(arm.name, "\n".join(changes), *done)
        console.print(table)
        for line in self.summary():
            console.print(line, soft_wrap=True, markup=False, highlight=False)

    def summary(self) -> list[str]:
        """The plan in sentences, the arms aside."""
        study = self.study
        lines = [
            f"{study.design}: {len(self.arms)} arms, {len(study.seeds)} seeds; baseline {arm_name(study.baseline)}"
        ]
        budgets = {arm.tokens for arm in self.arms}
        if len(budgets) == 1 and (budget := budgets.pop()) is not None:
            lines.append(f"every fit trains on {budget:,} tokens, padding included")
        lines += [f"not equal: {line}" for line in self.unequal]
        kinds = Counter[str](job.kind for job in self.jobs.values())
        done = Counter[str](job.kind for key, job in self.jobs.items() if self.is_done(key))
        return [*lines, "jobs: " + ", ".join(f"{done[kind]} of {kinds[kind]} {kind} done" for kind in kinds)]


def claim(directory: Path, name: str) -> None:
    """See that a directory is this study's, or free.

    Raises:
        ValueError: it is another study's, or something else.
    """
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    if (directory / PLAN).is_file():
        given = read_json(directory / PLAN)
    elif (directory / STUDY).is_file():  # whoever wrote it was killed before its plan was whole
        given = read_strictly(directory / STUDY)
    else:
        raise ValueError(f"{directory} exists already and holds no study: choose another --out")
    if (found := given.get("name") if isinstance(given, dict) else None) != name:
        raise ValueError(f"{directory} holds the study {found}, not {name}: choose another --out")


def make_plan(
    study: Study, directory: Path, threads: int = 1, allow_unequal: bool = False, alone: int | None = None
) -> StudyPlan:
    """Work out a study's plan; nothing is written.

    Args:
        threads: that a job asks for.
        allow_unequal: whether budget and data may differ between arms.
        alone: threads of a job that all others wait for, the only one of features; by default as many as of any other.

    Raises:
        ValueError: an arm is illegal, or not equal to others in budget and data, or a measure cannot be taken; the
            message has the arm's name.
    """
    arms = read_arms(study)
    unequal = check_equal(study, arms, allow_unequal)
    base = next(number for number, arm in enumerate(arms) if arm.levels == study.baseline)
    prompts = read_prompts(study, arms[base].target, directory)
    jobs: dict[str, Job] = {}
    cache_of: Sequence[str | None] = [None] * len(arms)
    if study.features == "cached":
        jobs, cache_of = _cache_jobs(arms, directory, threads, alone or threads)
    taken = [{kind: parse_measure(arm, kind, prompts[kind]) for kind in arm.measures} for arm in arms]
    for arm, measures in zip(arms, taken, strict=True):
        if "evaluate" in measures and measures["evaluate"].target != taken[base]["evaluate"].target:
            raise ValueError(
                f"arm {arm.name}: it is evaluated on another target than the baseline, or in another dtype, so that "
                "their acceptance cannot be compared: make a study of each"
            )
    runs = [
        tuple(_run(arm, seed, cache, measures, directory, threads, jobs) for seed in study.seeds)
        for arm, cache, measures in zip(arms, cache_of, taken, strict=True)
    ]
    return StudyPlan(study, directory, tuple(arms), tuple(runs), jobs, prompts, tuple(unequal))


def _run(
    arm: Arm, seed: int, cache: str | None, measures: Mapping[str, Measure], directory: Path, threads: int,
    jobs: dict[str, Job],
) -> dict[str, Any]:  # fmt: skip
    """The keys of an arm's jobs with one seed; jobs that no other arm has asked for are added to ``jobs``."""
    fit = key_of("fit", fit_decisive(arm, "on_the_fly" if cache is None else "cached", seed))
    label = f"{arm.name} seed={seed}"
    if fit not in jobs:
        model = dict(arm.config["model"])
        if cache is not None:
            where = {"directory": str(directory / "features" / cache), "verify": False}
            model["features"] = {"class_path": CACHED, "init_args": where}
        jobs[fit] = Job(
            key=fit, kind="fit", label=f"{label}: fit", directory=f"fits/{fit}", done="DONE.json", resumes=True,
            command=(*_command("fit", fit, directory), "--ckpt_path", "auto"),
            needs=() if cache is None else (cache,), threads=threads,
            memory_bytes=None if arm.memory_bytes is None else arm.memory_bytes + PROCESS_BYTES,
            config={"seed_everything": seed, **arm.config, "model": model},
        )  # fmt: skip
    run: dict[str, Any] = {"seed": seed, "fit": fit, **dict.fromkeys(COMMANDS)}
    for kind, measure in measures.items():
        key = run[kind] = key_of(kind, [fit, dict(measure.settings), measure.target, measure.prompts.sha256])
        drafter = ("--drafter", str(directory / "fits" / fit / "drafter"))
        jobs.setdefault(key, Job(
            key=key, kind=kind, label=f"{label}: {kind}", command=(*_command(kind, key, directory), *drafter),
            directory=f"measures/{key}", done=DONE[kind], needs=(fit,), threads=threads,
            memory_bytes=measure.memory_bytes, config=measure.config,
        ))  # fmt: skip
    return run


def _command(kind: str, key: str, directory: Path) -> tuple[str, ...]:
    place = directory / {"fit": "fits", "cache": "features"}.get(kind, "measures") / key
    return (kind, *flags(), "--config", _config(directory, key), "--out", str(place))


def _config(directory: Path, key: str) -> str:
    """Where a job's config file is."""
    return str(directory / JOBS / key / CONFIG)


# features


def _cache_jobs(
    arms: Sequence[Arm], directory: Path, threads: int, alone: int
) -> tuple[dict[str, Job], list[str | None]]:
    """One job for all arms of the same target and rows; and of every arm the key of its own."""
    on_the_fly = {"class_path": ON_THE_FLY, "init_args": {"rows": OnTheFly().rows}}
    groups: dict[str, list[Arm]] = {}
    of_arm = []
    for arm in arms:
        if canonical(arm.config["model"]["features"]) != canonical(on_the_fly):
            raise ValueError(
                f"arm {arm.name}: model.features is the study's to give while its features are cached: remove it, or "
                "say features: on_the_fly"
            )
        data = canonical(arm.config["data"])
        rows = {name: value for name, value in data["init_args"].items() if name not in INCIDENTAL}
        same = digest([target_contents(arm.target), contents({"class_path": data["class_path"], "init_args": rows})])
        of_arm.append(same)
        groups.setdefault(same, []).append(arm)
    made = {same: _cache_job(same, group, directory, alone if len(groups) == 1 else threads)
            for same, group in groups.items()}  # fmt: skip
    return {job.key: job for job in made.values()}, [made[same].key for same in of_arm]


def _cache_job(same: str, arms: Sequence[Arm], directory: Path, threads: int) -> Job:
    designs, first, rows = [arm.drafter for arm in arms], arms[0], _first_rows(arms)
    layers = sorted({b for d in designs for b in d.aux_layers if b < d.num_target_layers or not d.fusion.final_norm})
    key = key_of("cache", [same, layers, rows])
    model = first.config["model"]
    states = f"{len(layers)} boundaries" if len(layers) != 1 else "1 boundary"
    return Job(
        key=key, kind="cache", label=f"features of {len(arms)} arms, {states}",
        command=_command("cache", key, directory), directory=f"features/{key}", done=INDEX, resumes=True,
        threads=threads, memory_bytes=weights_bytes(first.target, first.parameters[0]),
        config={"model": {"target": model["target"], "drafter": model["drafter"]}, "data": first.config["data"],
                "layers": layers, "first_rows": rows},
    )  # fmt: skip


def _first_rows(arms: Sequence[Arm]) -> int | None:
    """How many rows of an epoch's beginning all the fits together draw; None where that cannot be told."""
    most = 0
    for arm in arms:
        trainer, drawn = arm.config["trainer"], arm.tokens
        alone = (str(trainer["devices"]), trainer["num_nodes"]) == ("1", 1)
        whole = str(trainer["limit_train_batches"]) in ("None", "1.0")
        alike = canonical(arm.config["data"]) == canonical(arms[0].config["data"])
        if drawn is None or not (alone and whole and alike):
            return None
        most = max(most, drawn // arm.data.seq_len)
    return most
