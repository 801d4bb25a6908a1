"""``specdec reproduce``: what a card keeps of every run to make it again, and the comparison, bit by bit."""

import base64
import hashlib
import itertools
import json
import logging
import os
import shlex
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from specdec.evaluation.compare import read_evaluation
from specdec.studies.record import KINDS, RecordedRun, RecordedStudy
from specdec.studies.worker import ATTEMPTS, CONFIG, JOBS, THREADS
from specdec.training.callbacks import LOSSES, read_lines
from specdec.utils.config import new_run
from specdec.utils.files import read_json, sha256, write_json, write_text
from specdec.utils.imports import flags
from specdec.utils.machine import provenance

log = logging.getLogger(__name__)
Json = dict[str, Any]

CARD, VERSION = "card.json", 2
READ = {
    "fit": ("DONE.json", "config.yaml", "provenance.json", LOSSES, "drafter/config.json", "csv/version_*/metrics.csv"),
    "evaluate": ("metrics.json", "answers.jsonl"),
    "drift": ("drift.json",),
    "robustness": ("robustness.json",),
}
ELSEWHERE = ("out", "ckpt_path", "allow_changes")  # of a fit's config: where it ran, and how it went on
MACHINE = ("python", "platform", "cpu", "torch_threads", "gpus", "git_commit", "git_dirty")


def inputs(study: RecordedStudy) -> dict[str, str]:
    """The SHA-256 of every file that a card reads, by its path below the study's directory."""
    paths = [study.directory / "plan.json"]
    for run, kind in itertools.product((run for arm in study.arms for run in arm.runs), KINDS):
        if (key := run.keys[kind]) is not None:
            paths += [study.directory / JOBS / key / name for name in (ATTEMPTS, CONFIG)]
            if run.done(kind):
                paths += [path for name in READ[kind] for path in run.place(kind).glob(name)]
    found = {path.relative_to(study.directory).as_posix(): sha256(path) for path in paths if path.is_file()}
    return dict(sorted(found.items()))


def manifest(study: RecordedStudy, read: dict[str, str]) -> Json:
    """Where a card comes from, and of every finished run what it takes to make it again."""
    runs = {
        arm.name: {str(run.seed): _remake(study, run) for run in done}
        for arm in study.arms
        if (done := arm.done("fit"))
    }
    return {
        "study_sha256": study.plan.get("study_sha256"),
        "prompts_sha256": study.plan.get("prompts_sha256"),
        "plan_provenance": study.plan.get("provenance"),
        "inputs": read,
        "runs": runs,
        "provenance": provenance(),
    }


def _remake(study: RecordedStudy, run: RecordedRun) -> Json:
    fit, losses = run.place("fit"), None
    config = yaml.safe_load((fit / "config.yaml").read_text(encoding="utf-8"))
    if (fit / LOSSES).is_file():
        text = (fit / LOSSES).read_bytes()
        packed = base64.b64encode(zlib.compress(text, 9)).decode()
        losses = {"encoding": f"base64 of zlib of {LOSSES}", "lines": text.count(b"\n"), "data": packed}
    out: Json = {
        "fit": {
            "config": {key: value for key, value in config.items() if key not in ELSEWHERE},
            "provenance": read_json(fit / "provenance.json") if (fit / "provenance.json").is_file() else None,
            "losses": losses,
            "weights_sha256": read_json(fit / "drafter" / "config.json")["weights_sha256"],
        },
        "evaluate": None,
    }
    path = study.directory / JOBS / str(run.keys["evaluate"]) / CONFIG
    if run.done("evaluate") and path.is_file():
        out["evaluate"] = {
            "config": yaml.safe_load(path.read_text(encoding="utf-8")),
            "prompts_sha256": run.evaluation.settings.get("prompts_sha256"),
            **_accepted(run.place("evaluate")),
        }
    return out


def _accepted(directory: Path) -> Json:
    """Of an evaluation: what every target pass accepted, hashed, and the mean acceptance length, by draft shape."""
    answers = read_evaluation(directory).answers
    digests, lengths = {}, {}
    for shape, own in answers.items():
        accepted = [[one.prompt_id, list(one.accepted)] for one in own]
        digests[shape] = hashlib.sha256(json.dumps(accepted).encode()).hexdigest()
        passes = [count for one in own for count in one.accepted]
        lengths[shape] = sum(passes) / len(passes) + 1 if passes else None
    return {"accepted_sha256": digests, "acceptance_length": lengths}


class Check(NamedTuple):
    """One thing that was compared with the card."""

    what: str
    equal: bool | None
    """None where the card has nothing to compare with."""
    told: str


def reproduce(card: Path, *, arm: str, seed: int, out: Path | None = None, evaluation: bool = True) -> int:
    """Train an arm of a card again, and compare every loss, the weights and what is accepted, bit by bit.

    The exit status is 0 where all is equal, else 1. What differs here in versions and machine is logged first: with
    other ones the last bits need not agree.

    Example: specdec reproduce runs/studies/fusion/card --arm "how=concat layers=mid" --seed 1

    Args:
        card: card.json, or the directory that it lies in
        arm: name of the arm
        seed: its seed
        out: directory of the new run; must be new
        evaluation: evaluate the drafter again too

    Raises:
        ValueError: the card has no such run, or it cannot be run here.
    """
    path = card / CARD if card.is_dir() else card
    recorded = _recorded(read_json(path), arm, seed, path)
    out = out or new_run("reproduce")
    if out.exists():
        raise ValueError(f"{out} exists already and is never overwritten: choose another --out")
    fit = recorded["fit"]
    for line in _elsewhere(fit["provenance"] or {}):
        log.warning("%s", line)
    threads = (fit["provenance"] or {}).get("torch_threads")
    _run(out, "fit", fit["config"], threads)
    checks = [_losses(fit["losses"], out / "fit" / LOSSES), _weights(fit["weights_sha256"], out / "fit")]
    if evaluation and recorded["evaluate"]:
        _run(out, "evaluate", recorded["evaluate"]["config"] | {"drafter": str(out / "fit" / "drafter")}, threads)
        checks += _evaluation(recorded["evaluate"], out / "evaluate")
    record = {"card": str(card), "arm": arm, "seed": seed, "checks": [check._asdict() for check in checks]}
    write_json(out / "reproduction.json", {**record, "provenance": provenance(seed=seed)})
    words = {True: "equal", False: "differs", None: "not compared"}
    for check in checks:
        sys.stdout.write(f"{check.what}: {words[check.equal]}, {check.told}\n")
    return 0 if all(check.equal is not False for check in checks) and checks[0].equal else 1


def _recorded(found: Any, arm: str, seed: int, where: Path) -> Json:
    """What a card knows of one run."""
    if not isinstance(found, dict) or found.get("version") != VERSION or "manifest" not in found:
        raise ValueError(f"{where}: not a study card of version {VERSION}")
    runs = found["manifest"]["runs"]
    if arm not in runs:
        raise ValueError(f"{where}: no finished fit of an arm {arm!r}; there are: {', '.join(runs) or 'none'}")
    if str(seed) not in runs[arm]:
        raise ValueError(f"{where}: no finished fit of {arm} with seed {seed}; its seeds: {', '.join(runs[arm])}")
    return runs[arm][str(seed)]


def _run(out: Path, command: str, config: Json, threads: int | None) -> None:
    """Run a command of specdec into ``out / command``, with the threads of the recorded run."""
    write_text(out / f"{command}.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    given = ["--config", str(out / f"{command}.yaml"), "--out", str(out / command)]
    line = [sys.executable, "-m", "specdec", command, *flags(), *given]
    environment = dict.fromkeys(THREADS, str(threads)) if threads else {}
    if status := subprocess.run(line, env=os.environ | environment, check=False).returncode:
        raise ValueError(f"{shlex.join(line[2:])}: it ended with status {status}")


def _elsewhere(known: Json) -> list[str]:
    """What differs here from where the run was: versions and machine."""
    here, versions = provenance(), known.get("versions") or {}
    rows = [(f"version of {name}", versions.get(name), here["versions"].get(name)) for name in versions]
    rows += [(name.replace("_", " "), known.get(name), here[name]) for name in MACHINE if name in known]
    return [f"{what}: {then} then, {now} now" for what, then, now in rows if then != now]


def unpacked(losses: Json) -> list[str]:
    """The lines of ``losses.txt``: optimizer step, batch within it, loss in hexadecimal.

    Raises:
        ValueError: they are damaged.
    """
    try:
        return zlib.decompress(base64.b64decode(losses["data"], validate=True)).decode("ascii").splitlines()
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise ValueError(f"the card's losses are damaged ({error}): write the card again") from error


def _losses(known: Json | None, path: Path) -> Check:
    if known is None:
        return Check("losses", None, "the card has none of this run")
    then, now = unpacked(known), read_lines(path)
    for one, two in itertools.zip_longest(then, now):
        if one is None or two is None:
            longer = "goes on" if one is None else "ends"
            return Check("losses", False, f"the new run {longer} at {(two or one or '').rsplit(' ', 1)[0]}")
        if one != two:
            (step, part, was), now_is = one.split(), two.split()[2]
            values = f"{float.fromhex(was)!r} then, {float.fromhex(now_is)!r} now"
            told = f"first at optimizer step {step} (batch {part}), of {len(then)}: {values}"
            return Check("losses", False, told)
    return Check("losses", True, f"{len(then)} of {len(then)}, bit by bit")


def _weights(known: str, directory: Path) -> Check:
    now = read_json(directory / "drafter" / "config.json")["weights_sha256"]
    return Check("weights", now == known, f"SHA-256 {known[:12]}" + ("" if now == known else f" then, {now[:12]} now"))


def _evaluation(known: Json, directory: Path) -> list[Check]:
    now, checks = _accepted(directory), []
    if read_evaluation(directory).settings.get("prompts_sha256") != known["prompts_sha256"]:
        checks.append(Check("prompts", False, "they are not those of the card"))
    for shape, then in known["accepted_sha256"].items():
        equal = now["accepted_sha256"].get(shape) == then
        was, is_now = known["acceptance_length"][shape], now["acceptance_length"].get(shape)
        told = f"acceptance length {was}" + ("" if equal else f" then, {is_now} now")
        checks.append(Check(f"accepted drafts, {shape}", equal, told))
    return checks
