"""A study's plan: every arm, every run of it, and the jobs that make them, before any of them begins.

``features: cached`` reads the target once: one ``specdec cache`` for all arms and seeds whose target and data agree.
It stores the union of the layer boundaries that its arms tap; a row is found by its tokens, in whatever order.
"""

import dataclasses
import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich.console import Console
from rich.table import Table

from specdec.embedded.build import EmbeddedConfig
from specdec.embedded.corpus import held_out_prompts
from specdec.evaluation.prompts import fingerprint, load_prompts
from specdec.features.source import OnTheFly
from specdec.features.store import INCIDENTAL, INDEX
from specdec.studies.arms import (
    COMMANDS,
    OF_PROMPTS,
    Arm,
    Measure,
    as_list,
    check_equal,
    differences,
    parse_measure,
    read_arms,
)
from specdec.studies.keys import contents, digest, fit_decisive, key_of, target_contents
from specdec.studies.study import Study, arm_name, read_strictly
from specdec.studies.worker import CONFIG, JOBS, Job
from specdec.target import EMBEDDED, TargetSource
from specdec.utils.config_diff import canonical
from specdec.utils.files import write_json, write_text
from specdec.utils.imports import flags
from specdec.utils.machine import provenance

VERSION = 2
PLAN, STUDY = "plan.json", "study.yaml"
DONE = {"fit": "DONE.json", "evaluate": "metrics.json", "drift": "drift.json", "robustness": "robustness.json"}
FOLDERS = {"cache": "features", "fit": "fits"}  # of what measures leave: measures
FEWEST_PROMPTS, PROMPTS, PROMPT_TOKENS = 2, 40, 64


class StudyPrompts(NamedTuple):
    """The files that a measure reads, and the hash of what it asks."""

    files: tuple[str, ...]
    sha256: str
    text: str | None = None
    """Of the one file, in the study's directory, where the prompts are embedded ones and it has to be written."""


@dataclass(frozen=True)
class StudyPlan:
    """Everything that a study comes to.

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
                    "trained_parameters": arm.trained_parameters,
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
            if prompts.text is not None:
                write_text(Path(prompts.files[0]), prompts.text)
        for job in self.jobs.values():
            text = yaml.safe_dump(dict(job.config), sort_keys=False, allow_unicode=True)
            write_text(self.directory / JOBS / job.key / CONFIG, text)
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
        about = f"{self.study.design}: {len(self.arms)} arms, {len(self.study.seeds)} seeds"
        lines = [f"{about}; baseline {arm_name(self.study.baseline)}"]
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
    if not (directory / STUDY).is_file():
        raise ValueError(f"{directory} exists already and holds no study: choose another --out")
    if (found := read_strictly(directory / STUDY).get("name")) != name:
        raise ValueError(f"{directory} holds the study {found}, not {name}: choose another --out")


def make_plan(study: Study, directory: Path, threads: int = 1, allow_unequal: bool = False) -> StudyPlan:
    """Work out a study's plan; nothing is written.

    Args:
        threads: that a job asks for.
        allow_unequal: whether budgets may differ between arms.

    Raises:
        ValueError: an arm is illegal, or not equal to others in its budget, or a measure cannot be taken; the
            message has the arm's name.
    """
    arms = read_arms(study)
    unequal = check_equal(study, arms, allow_unequal)
    base = next(number for number, arm in enumerate(arms) if arm.levels == study.baseline)
    prompts = read_prompts(study, arms[base].target, directory)
    jobs: dict[str, Job] = {}
    cache_of: Sequence[str | None] = [None] * len(arms)
    if study.features == "cached":
        jobs, cache_of = _cache_jobs(arms, directory, threads)
    taken = [{kind: parse_measure(arm, kind) for kind in arm.measures} for arm in arms]
    for arm, measures in zip(arms, taken, strict=True):
        both = [each["evaluate"].target for each in (measures, taken[base]) if "evaluate" in each]
        if len({str(target_contents(target)) for target in both}) > 1:
            raise ValueError(
                f"arm {arm.name}: it is evaluated on another target than the baseline, or in another dtype, so that "
                "their acceptance cannot be compared: make a study of each"
            )
    runs = [
        tuple(_run(arm, seed, cache, measures, prompts, directory, threads, jobs) for seed in study.seeds)
        for arm, cache, measures in zip(arms, cache_of, taken, strict=True)
    ]
    return StudyPlan(study, directory, tuple(arms), tuple(runs), jobs, prompts, tuple(unequal))


def _run(
    arm: Arm, seed: int, cache: str | None, measures: Mapping[str, Measure], prompts: Mapping[str, StudyPrompts],
    directory: Path, threads: int, jobs: dict[str, Job],
) -> dict[str, Any]:  # fmt: skip
    """The keys of an arm's jobs with one seed; jobs that no other arm has asked for are added to ``jobs``."""
    fit = key_of("fit", fit_decisive(arm, "on_the_fly" if cache is None else "cached", seed))
    label = f"{arm.name} seed={seed}"
    if fit not in jobs:
        model = dict(arm.config["model"])
        if cache is not None:
            where = {"directory": str(directory / "features" / cache)}
            model["features"] = {"class_path": "Cached", "init_args": where}
        config = {"seed_everything": seed, **arm.config, "model": model}
        needs = () if cache is None else (cache,)
        jobs[fit] = _job(directory, "fit", fit, f"{label}: fit", config, threads, needs, "--ckpt_path", "auto")
    run: dict[str, Any] = {"seed": seed, "fit": fit, **dict.fromkeys(COMMANDS)}
    drafter = ("--drafter", str(directory / "fits" / fit / "drafter"))
    for kind, measure in measures.items():
        asked = prompts[kind]
        key = key_of(kind, [fit, measure.decisive, target_contents(measure.target), asked.sha256])
        config = {**measure.config, "prompts": list(asked.files)}
        jobs.setdefault(key, _job(directory, kind, key, f"{label}: {kind}", config, threads, (fit,), *drafter))
        run[kind] = key
    return run


def _job(
    study: Path, kind: str, key: str, label: str, config: Mapping[str, Any], threads: int, needs: tuple[str, ...],
    *more: str,
) -> Job:  # fmt: skip
    """The job of a command, with further arguments beside its config file and ``--out``."""
    directory = f"{FOLDERS.get(kind, 'measures')}/{key}"
    given = ("--config", str(study / JOBS / key / CONFIG), "--out", str(study / directory))
    return Job(
        key=key, kind=kind, label=label, command=(kind, *flags(), *given, *more), directory=directory,
        done=DONE.get(kind, INDEX), needs=needs, resumes=kind in ("cache", "fit"), threads=threads, config=config,
    )  # fmt: skip


# features


def _cache_jobs(arms: Sequence[Arm], directory: Path, threads: int) -> tuple[dict[str, Job], list[str | None]]:
    """One job for all arms of the same target and rows; and of every arm the key of its own."""
    on_the_fly = {"class_path": "OnTheFly", "init_args": {"rows": OnTheFly().rows}}
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
    made = {same: _cache_job(same, group, directory, threads) for same, group in groups.items()}
    return {job.key: job for job in made.values()}, [made[same].key for same in of_arm]


def _cache_job(same: str, arms: Sequence[Arm], directory: Path, threads: int) -> Job:
    designs, first, rows = [arm.drafter for arm in arms], arms[0], _first_rows(arms)
    layers = sorted({b for d in designs for b in d.aux_layers if b < d.num_target_layers or not d.fusion.final_norm})
    key = key_of("cache", [same, layers, rows])
    model = first.config["model"]
    parts = {"target": model["target"], "drafter": model["drafter"]}
    config = {"model": parts, "data": first.config["data"], "layers": layers, "first_rows": rows}
    return _job(directory, "cache", key, f"features of {len(arms)} arms", config, threads, ())


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


# prompts


def read_prompts(study: Study, source: TargetSource, directory: Path) -> dict[str, StudyPrompts]:
    """The prompts of every measure; one that does not name any has those of ``evaluate``.

    Args:
        source: whose tokenizer cuts embedded prompts to ``prompt_tokens``.
        directory: the study's, in which embedded prompts get a file named after what it holds: a sweep of a study that
            was changed meanwhile does not write over what another one is about to ask.

    Raises:
        ValueError: files that cannot be read, or numbers that are out of range.
    """
    common = {
        key: value for key, value in study.measures.get("evaluate", {}).items() if key in (*OF_PROMPTS, "layouts")
    }
    return {
        kind: _prompts(kind, given if set(OF_PROMPTS) & set(given) else {**common, **given}, source, directory)
        for kind, given in study.measures.items()
    }


def _prompts(measure: str, given: Mapping[str, Any], source: TargetSource, directory: Path) -> StudyPrompts:
    asked, limit, layouts = given.get("prompts", EMBEDDED), given.get("limit"), as_list(given.get("layouts") or [])
    if asked != EMBEDDED:
        if more := [name for name in OF_PROMPTS[1:] if name in given]:
            raise ValueError(f"{measure}: {more[0]} is of embedded prompts: leave it out, or say prompts: {EMBEDDED}")
        files = [str(file) for file in as_list(asked)]
        return StudyPrompts(tuple(files), fingerprint(load_prompts(files, limit, layouts)))
    count, tokens = given.get("prompts_count", PROMPTS), given.get("prompt_tokens", PROMPT_TOKENS)
    if type(count) is not int or type(tokens) is not int or count < FEWEST_PROMPTS or tokens < 2:
        raise ValueError(
            f"{measure}: prompts_count is {count}, prompt_tokens {tokens}: at least {FEWEST_PROMPTS} and 2 are needed"
        )
    rows = held_out_prompts(count, tokens, EmbeddedConfig().seed, source.load_tokenizer())
    text = "".join(json.dumps({**row, "category": None}) + "\n" for row in rows)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        sha256 = fingerprint(load_prompts([file.name], limit, layouts))
    name = f"prompts-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    return StudyPrompts((str(directory / name),), sha256, text)
