"""A study's plan: every arm, every run of it, and the jobs that make them, before any of them begins.

``features: cached`` reads the target once: one ``specdec cache`` for all arms and seeds whose target and data agree.
It stores the union of the layer boundaries that its arms tap; a row is found by its tokens, in whatever order.
"""

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from specdec.embedded.build import EmbeddedConfig
from specdec.embedded.corpus import held_out_prompts
from specdec.evaluation.prompts import fingerprint, load_prompts
from specdec.evaluation.style import ReportTable, print_report
from specdec.features.source import OnTheFly
from specdec.features.store import INCIDENTAL
from specdec.studies.arms import OF_PROMPTS, Arm, check_equal, differences, read_arms
from specdec.studies.keys import contents, digest, fit_decisive, key_of, target_contents
from specdec.studies.study import MEASURES, Study, arm_name, as_list, read_strictly
from specdec.studies.worker import Job, JobFolder, specdec_job, write_config
from specdec.target import EMBEDDED, TargetSource
from specdec.utils.config import canonical
from specdec.utils.files import write_json, write_text
from specdec.utils.machine import provenance

VERSION = 2
PLAN, STUDY = "plan.json", "study.yaml"
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
    jobs: dict[str, Job]
    prompts: Mapping[str, StudyPrompts]
    unequal: tuple[str, ...] = ()

    @property
    def baseline(self) -> Arm:
        """The arm that all others are compared with."""
        return next(arm for arm in self.arms if arm.levels == self.study.baseline)

    def is_done(self, key: str) -> bool:
        """Whether what a job makes is there."""
        return JobFolder(self.directory, self.jobs[key].kind, key).is_done()

    def left(self, arms: Sequence[str] | None = None) -> dict[str, Job]:
        """The jobs that are still to be run, of some arms alone if they are named; and, without needs, what is done.

        What only done jobs needed is not among them: a study's caches may be removed when its fits are done.
        """
        chosen = [runs for arm, runs in zip(self.arms, self.runs, strict=True) if arms is None or arm.name in arms]
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
        """What ``plan.json`` holds."""
        prompts = self.prompts.get("evaluate") or next(iter(self.prompts.values()), None)
        return {
            "version": VERSION,
            "name": self.study.name,
            "design": self.study.design,
            "axes": {axis: list(levels) for axis, levels in self.study.axes.items()},
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
            "prompts_sha256": prompts.sha256 if prompts else None,
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
            write_config(self.directory, job)
        write_json(self.directory / PLAN, self.to_json() | {"provenance": provenance()})

    def show(self) -> None:
        """Print the arms, what each changes against the baseline, and how much of it is done."""
        rows = []
        for arm, runs in zip(self.arms, self.runs, strict=True):
            changes = differences(self.baseline, arm) or ["this is the baseline"]
            keys = [[run[kind] for run in runs] for kind in ("fit", *self.prompts)]
            done = [f"{sum(map(self.is_done, each))}/{len(each)} done" for each in keys]
            rows.append([arm.name, "\n".join(changes), *done])
        headings = ["Arm", "Changes against the baseline", "Fits", *self.prompts]
        print_report([ReportTable(f"Study {self.study.name}", headings, rows, 2)], self.summary())

    def summary(self) -> list[str]:
        """The plan in sentences, the arms aside."""
        about = f"{self.study.design}: {len(self.arms)} arms, {len(self.study.seeds)} seeds"
        lines = [f"{about}; baseline {arm_name(self.study.baseline)}"]
        budgets = {arm.tokens for arm in self.arms}
        if len(budgets) == 1 and (budget := budgets.pop()) is not None:
            lines.append(f"every fit trains on {budget:,} tokens, padding included")
        lines += [f"not equal: {line}" for line in self.unequal]
        done: dict[str, list[bool]] = {}
        for key, job in self.jobs.items():
            done.setdefault(job.kind, []).append(self.is_done(key))
        return [*lines, "jobs: " + ", ".join(f"{sum(each)} of {len(each)} {kind} done" for kind, each in done.items())]


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
        ValueError: an arm is illegal, or not equal to others in its budget, or a measure's arguments are wrong; the
            message has the arm's name.
    """
    arms = read_arms(study)
    base = next(arm for arm in arms if arm.levels == study.baseline)
    unequal = check_equal(base, arms, allow_unequal)
    prompts = read_prompts(study, base.target, directory)
    jobs, cache_of = _cache_jobs(arms, directory, threads) if study.features == "cached" else ({}, {})
    for arm in arms:
        both = [target_contents(each.measures["evaluate"].target) for each in (base, arm) if "evaluate" in arm.measures]
        if both and both[0] != both[1]:
            raise ValueError(
                f"arm {arm.name}: it is evaluated on another target than the baseline, or in another dtype, so that "
                "their acceptance cannot be compared: make a study of each"
            )
    runs = [
        tuple(_run(arm, seed, cache_of.get(arm.name), prompts, directory, threads, jobs) for seed in study.seeds)
        for arm in arms
    ]
    return StudyPlan(study, directory, tuple(arms), tuple(runs), jobs, prompts, tuple(unequal))


def _run(
    arm: Arm, seed: int, cache: str | None, prompts: Mapping[str, StudyPrompts], directory: Path, threads: int,
    jobs: dict[str, Job],
) -> dict[str, Any]:  # fmt: skip
    """The keys of an arm's jobs with one seed; jobs that no other arm needs are added to ``jobs``."""
    fit = key_of("fit", fit_decisive(arm, "on_the_fly" if cache is None else "cached", seed))
    label = f"{arm.name} seed={seed}"
    if fit not in jobs:
        model, needs = dict(arm.config["model"]), tuple[str, ...]()
        if cache is not None:
            where = {"directory": str(JobFolder(directory, "cache", cache).output)}
            model["features"], needs = {"class_path": "Cached", "init_args": where}, (cache,)
        config = {"seed_everything": seed, **arm.config, "model": model}
        jobs[fit] = specdec_job(directory, "fit", fit, f"{label}: fit", config, threads, needs, "--ckpt_path", "auto")
    run: dict[str, Any] = {"seed": seed, "fit": fit, **dict.fromkeys(MEASURES)}
    drafter = ("--drafter", str(JobFolder(directory, "fit", fit).output / "drafter"))
    for kind, measure in arm.measures.items():
        decisive = {**measure.config, "target": target_contents(measure.target), "trees": measure.trees}
        key = run[kind] = key_of(kind, [fit, decisive, prompts[kind].sha256])
        config = {**measure.config, "prompts": list(prompts[kind].files)}
        jobs.setdefault(key, specdec_job(directory, kind, key, f"{label}: {kind}", config, threads, (fit,), *drafter))
    return run


def _cache_jobs(arms: Sequence[Arm], directory: Path, threads: int) -> tuple[dict[str, Job], dict[str, str]]:
    """One job for all arms of the same target and rows; and by arm the key of its own."""
    on_the_fly = {"class_path": "OnTheFly", "init_args": {"rows": OnTheFly().rows}}
    groups: dict[str, list[Arm]] = {}
    for arm in arms:
        if canonical(arm.config["model"]["features"]) != canonical(on_the_fly):
            raise ValueError(
                f"arm {arm.name}: model.features is the study's to give while its features are cached: remove it, or "
                "say features: on_the_fly"
            )
        data = canonical(arm.config["data"])
        rows = {name: value for name, value in data["init_args"].items() if name not in INCIDENTAL}
        same = digest([target_contents(arm.target), contents({"class_path": data["class_path"], "init_args": rows})])
        groups.setdefault(same, []).append(arm)
    jobs, cache_of = dict[str, Job](), dict[str, str]()
    for same, group in groups.items():
        layers = sorted({
            b for d in (arm.drafter for arm in group) for b in d.aux_layers
            if b < d.num_target_layers or not d.fusion.final_norm
        })  # fmt: skip
        count, config = _first_rows(group), group[0].config
        key = key_of("cache", [same, layers, count])
        parts = {"target": config["model"]["target"], "drafter": config["model"]["drafter"]}
        given = {"model": parts, "data": config["data"], "layers": layers, "first_rows": count}
        jobs[key] = specdec_job(directory, "cache", key, f"features of {len(group)} arms", given, threads, ())
        cache_of |= dict.fromkeys((arm.name for arm in group), key)
    return jobs, cache_of


def _first_rows(arms: Sequence[Arm]) -> int | None:
    """How many rows of an epoch's beginning all the fits together draw; None where that is not known."""
    most = 0
    for arm in arms:
        trainer, drawn = arm.config["trainer"], arm.tokens
        alone = (str(trainer["devices"]), trainer["num_nodes"]) == ("1", 1)
        all_batches = str(trainer["limit_train_batches"]) in ("None", "1.0")
        alike = canonical(arm.config["data"]) == canonical(arms[0].config["data"])
        if drawn is None or not (alone and all_batches and alike):
            return None
        most = max(most, drawn // arm.data.seq_len)
    return most


def read_prompts(study: Study, source: TargetSource, directory: Path) -> dict[str, StudyPrompts]:
    """The prompts of every measure; one that does not name any has those of ``evaluate``.

    Args:
        source: whose tokenizer cuts embedded prompts to ``prompt_tokens``.
        directory: the study's, in which embedded prompts get a file named after what it holds: a sweep of a study that
            was changed meanwhile does not write over what another one is about to ask.

    Raises:
        ValueError: files that cannot be read, or numbers that are out of range.
    """
    evaluate = study.measures.get("evaluate", {})
    common = {key: value for key, value in evaluate.items() if key in (*OF_PROMPTS, "layouts")}
    found = {}
    for measure, arguments in study.measures.items():
        given = arguments if set(OF_PROMPTS) & set(arguments) else {**common, **arguments}
        files, limit, layouts = given.get("prompts", EMBEDDED), given.get("limit"), as_list(given.get("layouts") or [])
        if files != EMBEDDED:
            if more := [name for name in OF_PROMPTS[1:] if name in given]:
                raise ValueError(f"{measure}: {more[0]} is of embedded prompts: leave it out, or say prompts: embedded")
            paths = tuple(str(file) for file in as_list(files))
            found[measure] = StudyPrompts(paths, fingerprint(load_prompts(paths, limit, layouts)))
            continue
        count, tokens = given.get("prompts_count", PROMPTS), given.get("prompt_tokens", PROMPT_TOKENS)
        if type(count) is not int or type(tokens) is not int or count < FEWEST_PROMPTS or tokens < 2:
            raise ValueError(
                f"{measure}: prompts_count is {count}, prompt_tokens {tokens}: at least {FEWEST_PROMPTS} and 2 are "
                "needed"
            )
        rows = held_out_prompts(count, tokens, EmbeddedConfig().seed, source.load_tokenizer())
        text = "".join(json.dumps({**row, "category": None}) + "\n" for row in rows)
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            sha256 = fingerprint(load_prompts([file.name], limit, layouts))
        name = f"prompts-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
        found[measure] = StudyPrompts((str(directory / name),), sha256, text)
    return found
