"""A study's plan: every arm, every run of it, and the jobs that make them, before any of them begins."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.embedded.source import TargetSource
from specdec.files import read_json, write_json, write_text
from specdec.imports import flags
from specdec.provenance import provenance
from specdec.sweep.arms import Arm, read_arms
from specdec.sweep.budget import check_equal
from specdec.sweep.caches import cache_jobs, features_of
from specdec.sweep.job import Job
from specdec.sweep.keys import fit_decisive, key_of
from specdec.sweep.measures import COMMANDS, Measure, measure_of
from specdec.sweep.memory import PROCESS_BYTES
from specdec.sweep.prompts import Prompts, prompts_of
from specdec.sweep.reading import read
from specdec.sweep.study import Study
from specdec.sweep.written import Written, config_of

VERSION = 1
PLAN, STUDY = "plan.json", "study.yaml"


@dataclass(frozen=True)
class Plan:
    """Everything that a study comes to.

    Args:
        directory: the study's.
        runs: of every arm, one for each seed: its ``seed`` and, by kind, the keys of its jobs.
        unequal: what of budget and data differs between arms, where that was allowed.
    """

    study: Study
    directory: Path
    arms: tuple[Arm, ...]
    runs: tuple[tuple[Mapping[str, Any], ...], ...]
    written: Mapping[str, Written]
    prompts: Mapping[str, Prompts]
    unequal: tuple[str, ...] = ()

    @property
    def jobs(self) -> dict[str, Job]:
        """By key; a job comes after those that it needs."""
        return {key: one.job for key, one in self.written.items()}

    def is_done(self, key: str) -> bool:
        """Whether what a job makes is there."""
        job = self.written[key].job
        return (self.directory / job.directory / job.done).is_file()

    def left(self, arms: list[str] | None = None) -> dict[str, Job]:
        """The jobs that are still to be run, of some arms alone if they are named; and, without needs, what is done.

        What only done jobs needed is not among them: a study's caches may be removed when its fits are done.
        """
        wanted = dict[str, Job]()

        def want(key: str) -> None:
            job = self.written[key].job
            done = self.is_done(key)
            for need in () if done else job.needs:
                want(need)
            wanted[key] = dataclasses.replace(job, needs=()) if done else job

        for arm, runs in zip(self.arms, self.runs, strict=True):
            if arms is None or arm.name in arms:
                for run in runs:
                    for kind in ("fit", *COMMANDS):
                        if run[kind] is not None:
                            want(run[kind])
        return wanted

    def to_json(self) -> dict[str, Any]:
        """What ``plan.json`` holds."""
        study, design = self.study, self.study.design
        asked = self.prompts.get("evaluate") or next(iter(self.prompts.values()), None)
        return {
            "version": VERSION,
            "name": study.name,
            "design": design.name,
            "fraction": design.fraction,
            "generators": list(design.generators),
            "resolution": design.resolution,
            "aliases": dict(design.aliases or {}),
            "axes": {axis.name: axis.names for axis in study.axes},
            "baseline": study.baseline,
            "seeds": list(study.seeds),
            "arms": [
                {
                    "name": arm.name,
                    "levels": arm.levels,
                    "is_baseline": arm.levels == study.baseline,
                    "differences": list(arm.differences),
                    "runs": [dict(run) for run in runs],
                }
                for arm, runs in zip(self.arms, self.runs, strict=True)
            ],
            "unequal": list(self.unequal),
            "jobs": {key: job.to_json() for key, job in self.jobs.items()},
            "prompts_sha256": asked.sha256 if asked else None,
            "study_sha256": hashlib.sha256(study.text.encode()).hexdigest(),
        }

    def write(self, command: list[str]) -> None:
        """Write the study, then its other files and those of its jobs; ``plan.json`` last.

        Raises:
            ValueError: they cannot be written.
        """
        write_text(self.directory / STUDY, self.study.text)
        for prompts in self.prompts.values():
            if prompts.name is not None:
                write_text(self.directory / prompts.name, prompts.text)
        for one in self.written.values():
            one.write(self.directory)
        write_json(self.directory / PLAN, self.to_json() | {"provenance": provenance(command)})


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
        given = read(directory / STUDY)
    else:
        raise ValueError(f"{directory} exists already and holds no study: choose another --out")
    if (found := given.get("name") if isinstance(given, dict) else None) != name:
        raise ValueError(f"{directory} holds the study {found}, not {name}: choose another --out")


def make(
    study: Study, directory: Path, threads: int = 1, allow_unequal: bool = False, alone: int | None = None
) -> Plan:
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
    source = next(arm for arm in arms if arm.levels == study.baseline).target
    prompts = _prompts(study, source, directory)
    written: dict[str, Written] = {}
    cache_of: Sequence[str | None] = [None] * len(arms)
    if study.features == "cached":
        written, cache_of = cache_jobs(arms, directory, threads, alone or threads)
    taken = [{kind: measure_of(arm, kind, prompts[kind]) for kind in arm.measures} for arm in arms]
    _check_targets(arms, taken, next(own for arm, own in zip(arms, taken, strict=True) if arm.levels == study.baseline))
    runs = []
    for arm, cache, measures in zip(arms, cache_of, taken, strict=True):
        runs.append(tuple(_run(arm, seed, cache, measures, directory, threads, written) for seed in study.seeds))
    return Plan(study, directory, tuple(arms), tuple(runs), written, prompts, tuple(unequal))


def _run(
    arm: Arm,
    seed: int,
    cache: str | None,
    measures: Mapping[str, Measure],
    directory: Path,
    threads: int,
    written: dict[str, Written],
) -> dict[str, Any]:
    """The keys of an arm's jobs with one seed; jobs that no other arm has asked for are added to ``written``."""
    key = key_of("fit", fit_decisive(arm, "on_the_fly" if cache is None else "cached", seed))
    label = f"{arm.name} seed={seed}"
    if key not in written:
        features = {} if cache is None else {"features": features_of(directory, cache)}
        config = {"seed_everything": seed, **arm.config, "model": {**arm.config["model"], **features}}
        command = ("fit", *flags(), "--config", config_of(directory, key), "--out", str(directory / "fits" / key))
        job = Job(
            key=key, kind="fit", label=f"{label}: fit", command=(*command, "--ckpt_path", "auto"),
            directory=f"fits/{key}", done="DONE.json", needs=() if cache is None else (cache,), resumes=True,
            threads=threads, memory_bytes=None if arm.memory_bytes is None else arm.memory_bytes + PROCESS_BYTES,
        )  # fmt: skip
        written[key] = Written(job, config)
    run: dict[str, Any] = {"seed": seed, "fit": key, **dict.fromkeys(COMMANDS)}
    for kind, measure in measures.items():
        one = measure.job(f"{label}: {kind}", key, directory, threads)
        written.setdefault(one.job.key, one)
        run[kind] = one.job.key
    return run


def _check_targets(
    arms: Sequence[Arm], taken: Sequence[Mapping[str, Measure]], baseline: Mapping[str, Measure]
) -> None:
    """See that all arms are evaluated on one target in one dtype; that in which it teaches may differ."""
    for arm, measures in zip(arms, taken, strict=True):
        if "evaluate" in measures and measures["evaluate"].target != baseline["evaluate"].target:
            raise ValueError(
                f"arm {arm.name}: it is evaluated on another target than the baseline, or in another dtype, so that "
                "their acceptance cannot be compared: make a study of each"
            )


def _prompts(study: Study, source: TargetSource, directory: Path) -> dict[str, Prompts]:
    """Of every measure; one that does not name any has those of ``evaluate``."""
    found: dict[str, Prompts] = {}
    own = {"prompts", "prompts_count", "prompt_tokens"}
    shared = {key: value for key, value in study.measures.get("evaluate", {}).items() if key in own | {"layouts"}}
    for kind, given in study.measures.items():
        full = given if own & set(given) else {**shared, **given}
        found[kind] = prompts_of(kind, full, source, directory)
    return found
