"""A study's plan: every arm, every run of it, and the jobs that make them, before any of them begins.

A job is known by a key, the hash of what decides its numbers (:mod:`specdec.studies.keys`).

``features: cached`` reads the target once: one ``specdec cache`` for all arms and seeds whose target and data agree.
It stores the union of the layer boundaries that its arms tap; a row is found by its tokens, in whatever order. A seed
is ``data.seed`` too unless the study gives that, so that every seed has its own cache.
"""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec.features.contract import INCIDENTAL
from specdec.features.source import OnTheFly
from specdec.report.tables import ReportTable, print_report
from specdec.studies.arms import (
    Arm,
    StudyPrompts,
    arm_differences,
    check_equal,
    read_arms,
    read_prompts,
)
from specdec.studies.keys import content_hashes, digest, fit_decisive, key_of, target_contents
from specdec.studies.outcomes import check_outcome
from specdec.studies.strict_yaml import read_strictly
from specdec.studies.study import MEASURES, Study, arm_name
from specdec.studies.worker import FOLDERS, Job, JobFolder, specdec_job, write_config
from specdec.utils.config import normalize_config
from specdec.utils.files import drop_sums, write_json, write_sums, write_text
from specdec.utils.links import refuse_links
from specdec.utils.machine import provenance
from specdec.utils.reading import read_json
from specdec.utils.text import how_many

VERSION = 3
PLAN = "plan.json"
STUDY = "study.yaml"
LISTED = (STUDY, PLAN, "prompts-*.jsonl")  # with their hashes


@dataclass(frozen=True)
class StudyPlan:
    """A study's arms, runs and jobs.

    Args:
        directory: the study's.
        runs: of every arm, one for each seed: its ``seed`` and, by kind, the keys of its jobs.
        jobs: by key; a job comes after those that it needs.
        unequal: what of the budget differs between arms, where that was allowed.
    """

    study: Study
    directory: Path
    arms: tuple[Arm, ...]
    runs: tuple[tuple[Mapping[str, Any], ...], ...]
    jobs: dict[str, Job]
    prompts: Mapping[str, StudyPrompts]
    unequal: tuple[str, ...] = ()

    @property
    def baseline(self) -> Arm:
        """The arm that all others are compared with."""
        return next(arm for arm in self.arms if arm.levels == self.study.baseline)

    def is_done(self, key: str) -> bool:
        """Whether a job is done."""
        return JobFolder(self.directory, self.jobs[key].kind, key).is_done()

    def left(self, arms: Sequence[str] | None = None) -> dict[str, Job]:
        """The jobs of some arms, or of all: those that are done without needs, so that what only they needed, as a
        cache that was removed, is not made again.
        """
        chosen = [
            runs
            for arm, runs in zip(self.arms, self.runs, strict=True)
            if arms is None or arm.name in arms
        ]
        keys = {run[kind] for runs in chosen for run in runs for kind in ("fit", *MEASURES)}
        for key, job in reversed(self.jobs.items()):  # a job comes after those that it needs
            if key in keys and not self.is_done(key):
                keys.update(job.needs)
        return {
            key: dataclasses.replace(job, needs=()) if self.is_done(key) else job
            for key, job in self.jobs.items()
            if key in keys
        }

    def to_json(self) -> dict[str, Any]:
        """Return what ``plan.json`` holds."""
        prompts = self.prompts.get("evaluate") or next(iter(self.prompts.values()), None)
        return {
            "version": VERSION,
            "name": self.study.name,
            "design": self.study.design,
            "axes": {axis: list(levels) for axis, levels in self.study.axes.items()},
            "baseline": self.study.baseline,
            "seeds": list(self.study.seeds),
            # what has no seed, as rows in their own order, does not vary
            "varies_data": self.study.varies_data
            and all("seed" in arm.config["data"]["init_args"] for arm in self.arms),
            "arms": [
                {
                    "name": arm.name,
                    "levels": arm.levels,
                    "is_baseline": arm.levels == self.study.baseline,
                    "differences": arm_differences(self.baseline, arm),
                    "trained_parameters": arm.trained_parameters,
                    "trained_depth": arm.config["model"]["ttt_steps"],
                    "tokens": arm.tokens,
                    "runs": [dict(run) for run in runs],
                }
                for arm, runs in zip(self.arms, self.runs, strict=True)
            ],
            "primary": [contrast.to_json() for contrast in self.study.primary],
            "unequal": list(self.unequal),
            "prompts_sha256": prompts.sha256 if prompts else None,
            "study_sha256": hashlib.sha256(self.study.text.encode()).hexdigest(),
        }

    def write(self) -> None:
        """Write the study, then its prompts and the configs of its jobs; ``plan.json`` last."""
        changed = self.primary_changed()
        drop_sums(self.directory, *LISTED)  # some are about to change
        write_text(self.directory / STUDY, self.study.text)
        for prompts in self.prompts.values():
            if prompts.text is not None:
                write_text(Path(prompts.files[0]), prompts.text)
        for job in self.jobs.values():
            write_config(self.directory, job)
        about = {"primary_changed": changed, "provenance": provenance()}
        write_json(self.directory / PLAN, self.to_json() | about)
        write_sums(self.directory, *LISTED)

    def primary_changed(self) -> bool:
        """Whether primary contrasts are others than those planned before anything was measured."""
        path = self.directory / PLAN
        declared = [contrast.to_json() for contrast in self.study.primary]
        planned = read_json(path) if path.is_file() else {}
        if not isinstance(planned, dict) or planned.get("version") != VERSION:
            planned = {"primary": []}  # of an earlier version, which had none
        measured = any(job.kind in MEASURES and self.is_done(key) for key, job in self.jobs.items())
        return bool(planned.get("primary_changed")) or (
            measured and planned["primary"] != json.loads(json.dumps(declared))
        )

    def show(self, further_lines: Sequence[str] = ()) -> None:
        """Print what each arm changes against the baseline, the summary, and further lines."""
        arms = [
            [arm.name, "\n".join(arm_differences(self.baseline, arm)) or "this is the baseline"]
            for arm in self.arms
        ]
        contrasts = [
            [contrast.outcome, str(contrast), contrast.expect or "-"]
            for contrast in self.study.primary
        ]
        changes = ["Arm", "Changes against the baseline"]
        tables = [
            ReportTable(f"Study {self.study.name}", changes, arms, 2),
            ReportTable("Primary contrasts", ["Outcome", "Contrast", "Expected"], contrasts, 3),
        ]
        print_report(tables, [*self.summary(), *further_lines])

    def summary(self) -> list[str]:
        """The design, the budget, and how many jobs of each kind are done, in sentences."""
        about = f"{self.study.design}: {how_many(len(self.arms), 'arm')}, {how_many(len(self.study.seeds), 'seed')}"
        lines = [f"{about}; baseline {arm_name(self.study.baseline)}"]
        if not self.unequal and (tokens := self.baseline.tokens) is not None:
            lines.append(f"every fit trains on {how_many(tokens, 'token')}, padding included")
        lines += [f"not equal: {line}" for line in self.unequal]
        if not self.study.primary:
            lines.append("no primary contrasts are declared: all results are exploratory")
        done = Counter(job.kind for key, job in self.jobs.items() if self.is_done(key))
        total = Counter(job.kind for job in self.jobs.values())
        counts = [f"{done[kind]} of {count} {kind} done" for kind, count in total.items()]
        return [*lines, f"jobs: {', '.join(counts)}"]


def claim(directory: Path, name: str) -> None:
    """Raise ValueError unless a directory is this study's, or not there, or holds at most another one's fits and
    features, which are taken by their keys."""
    if not directory.exists():
        return
    if directory.is_dir() and {path.name for path in directory.iterdir()} <= {*FOLDERS.values()}:
        return
    # another study's may be linked: docs/study.md
    refuse_links(directory, *FOLDERS.values())
    if not (directory / STUDY).is_file():
        raise ValueError(f"{directory} exists already and holds no study: choose another --out")
    if (held := read_strictly(directory / STUDY).get("name")) != name:
        raise ValueError(f"{directory} holds the study {held}, not {name}: choose another --out")


def make_plan(
    study: Study, directory: Path, threads: int = 1, allow_unequal: bool = False
) -> StudyPlan:
    """Work out a study's plan; nothing is written.

    Args:
        threads: of a job.
        allow_unequal: whether budgets may differ between arms.

    Raises:
        ValueError: an arm is illegal or has another budget, or a measure's arguments are wrong, with the arm's name.
    """
    arms = read_arms(study)
    base = next(arm for arm in arms if arm.levels == study.baseline)
    unequal = check_equal(base, arms, allow_unequal)
    prompts = read_prompts(study, base.target, directory)
    all_levels = [frozenset(arm.levels.items()) for arm in arms]
    for contrast in study.primary:
        needed = contrast.weights(all_levels)
        for arm, levels in zip(arms, all_levels, strict=True):
            if levels in needed:
                check_outcome(contrast.outcome, arm)
    planner = _Planner(study, directory, threads, prompts)
    for arm in arms:
        if "evaluate" in arm.measures:
            decoded, of_baseline = (
                target_contents(compared.measures["evaluate"].target) for compared in (arm, base)
            )
            if decoded != of_baseline:
                raise ValueError(
                    f"arm {arm.name}: it is evaluated on another target than the baseline, or in another dtype, so "
                    "that their acceptance cannot be compared: make a study of each"
                )
    by_seed = [planner.runs(arms, seed) for seed in study.seeds]
    runs = tuple(zip(*by_seed, strict=True))
    return StudyPlan(study, directory, tuple(arms), runs, planner.jobs, prompts, tuple(unequal))


@dataclass
class _Planner:
    """Makes the jobs of a study's arms, each of them once.

    Args:
        jobs: by key.
        cache_of: by arm the key of the job that stores its features, with the seed at hand.
    """

    study: Study
    directory: Path
    threads: int
    prompts: Mapping[str, StudyPrompts]
    jobs: dict[str, Job] = field(default_factory=dict)
    cache_of: dict[str, str] = field(default_factory=dict)

    def _add(
        self,
        kind: str,
        key: str,
        label: str,
        config: Mapping[str, Any],
        needs: tuple[str, ...],
        *arguments: str,
    ) -> None:
        job = specdec_job(self.directory, kind, key, label, config, self.threads, needs, *arguments)
        self.jobs.setdefault(key, job)

    def runs(self, arms: Sequence[Arm], seed: int) -> list[dict[str, Any]]:
        """The keys of every arm's jobs with a seed; those that no other arm or seed needs are added."""
        if self.study.varies_data:
            arms = [arm.with_data_seed(seed) for arm in arms]
        if self.study.features == "cached":
            self.add_caches(arms)
        return [self._run(arm, seed) for arm in arms]

    def _run(self, arm: Arm, seed: int) -> dict[str, Any]:
        model = dict(arm.config["model"])
        cache = self.cache_of.get(arm.name)
        if cache is not None:
            where = {"directory": str(JobFolder(self.directory, "cache", cache).output)}
            model["features"] = {"class_path": "Cached", "init_args": where}
        fit = key_of("fit", {**fit_decisive(arm, self.study.features), "seed": seed})
        label = f"{arm.name} seed={seed}"
        config = {"seed_everything": seed, **arm.config, "model": model}
        needs = (cache,) if cache else ()
        self._add("fit", fit, f"{label}: fit", config, needs, "--ckpt_path", "auto")
        run: dict[str, Any] = {"seed": seed, "fit": fit, **dict.fromkeys(MEASURES)}
        drafter = str(JobFolder(self.directory, "fit", fit).output / "drafter")
        for kind, measure in arm.measures.items():
            prompts = self.prompts[kind]
            decisive = {**measure.config, "target": target_contents(measure.target)}
            key = run[kind] = key_of(kind, [fit, decisive, prompts.sha256])
            config = {**measure.config, "prompts": list(prompts.files)}
            self._add(kind, key, f"{label}: {kind}", config, (fit,), "--drafter", drafter)
        return run

    def add_caches(self, arms: Sequence[Arm]) -> None:
        """Add one job for all arms of the same target and rows."""
        on_the_fly = {"class_path": "OnTheFly", "init_args": {"rows": OnTheFly().rows}}
        groups: dict[str, list[Arm]] = {}
        for arm in arms:
            if normalize_config(arm.config["model"]["features"]) != normalize_config(on_the_fly):
                raise ValueError(
                    f"arm {arm.name}: model.features is the study's to give while its features are cached: remove it, "
                    "or say features: on_the_fly"
                )
            data = normalize_config(arm.config["data"])
            rows = {
                name: value for name, value in data["init_args"].items() if name not in INCIDENTAL
            }
            data_rows = content_hashes({"class_path": data["class_path"], "init_args": rows})
            groups.setdefault(digest([target_contents(arm.target), data_rows]), []).append(arm)
        for same, group in groups.items():
            layers = sorted({
                b for d in (arm.drafter for arm in group) for b in d.aux_layers
                if b < d.num_target_layers or not d.fusion.final_norm
            })  # fmt: skip
            counts = {
                "--first_rows": _first_rows(group),
                "--first_val_rows": _first_validation_rows(group),
            }
            config = group[0].config
            key = key_of("cache", [same, layers, counts])
            model = {name: config["model"][name] for name in ("target", "drafter")}
            label = f"features of {how_many(len(group), 'arm')}"
            options = [
                word
                for option, count in counts.items()
                if count is not None
                for word in (option, str(count))
            ]
            self._add(
                "cache", key, label, {"model": model, "data": config["data"]}, (),
                "--layers", *map(str, layers), *options,
            )  # fmt: skip
            self.cache_of |= dict.fromkeys((arm.name for arm in group), key)


def _first_rows(arms: Sequence[Arm]) -> int | None:
    """The number of rows from an epoch's start that the fits read at most; None if it is not known."""
    most = 0
    for arm in arms:
        all_batches = str(arm.config["trainer"]["limit_train_batches"]) in ("None", "1.0")
        if arm.tokens is None or not (all_batches and _reads_alike(arm, arms[0])):
            return None
        most = max(most, arm.tokens // arm.data.seq_len)
    return most


def _first_validation_rows(arms: Sequence[Arm]) -> int | None:
    """The number of validation rows that the fits read at most, from the first on; None if it is not known."""
    most = 0
    for arm in arms:
        trainer = arm.config["trainer"]
        limit = trainer["limit_val_batches"]
        is_overfit = bool(trainer["overfit_batches"] or trainer["fast_dev_run"])
        if not isinstance(limit, int) or is_overfit or not _reads_alike(arm, arms[0]):
            return None
        most = max(most, limit * arm.data.batch_size)
    return most


def _reads_alike(arm: Arm, other: Arm) -> bool:
    """Whether one process reads an arm's data, and they are those of another arm, the size of batches included."""
    trainer = arm.config["trainer"]
    is_alone = (str(trainer["devices"]), trainer["num_nodes"]) == ("1", 1)
    return is_alone and normalize_config(arm.config["data"]) == normalize_config(
        other.config["data"]
    )
