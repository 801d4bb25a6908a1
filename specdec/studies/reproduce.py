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
from specdec.studies.record import Json, RecordedRun, RecordedStudy
from specdec.studies.worker import CONFIG, JOBS, THREADS
from specdec.training.callbacks import LOSSES, read_lines
from specdec.utils.config import new_run
from specdec.utils.files import read_json, write_json, write_text
from specdec.utils.imports import flags
from specdec.utils.machine import provenance

log = logging.getLogger(__name__)
CARD, VERSION = "card.json", 3
ELSEWHERE = ("out", "ckpt_path", "allow_changes")  # of a fit's config: where it ran, and how it went on
MACHINE = ("python", "platform", "cpu", "torch_threads", "gpus", "git_commit", "git_dirty")


def manifest(study: RecordedStudy) -> Json:
    """Where a card comes from, and of every finished run what it takes to make it again."""
    runs = {arm.name: {str(run.seed): _remake(study, run) for run in arm.done("fit")} for arm in study.arms}
    return {
        "study_sha256": study.plan.get("study_sha256"),
        "prompts_sha256": study.plan.get("prompts_sha256"),
        "plan_provenance": study.plan.get("provenance"),
        "runs": {name: own for name, own in runs.items() if own},
        "provenance": provenance(),
    }


def _remake(study: RecordedStudy, run: RecordedRun) -> Json:
    fit = run.place("fit")
    config = yaml.safe_load((fit / "config.yaml").read_text(encoding="utf-8"))
    out: Json = {
        "fit": {
            "config": {key: value for key, value in config.items() if key not in ELSEWHERE},
            "provenance": read_json(fit / "provenance.json"),
            "losses": base64.b64encode(zlib.compress((fit / LOSSES).read_bytes(), 9)).decode(),
            "weights_sha256": _weights(fit),
        },
        "evaluate": None,
    }
    if run.done("evaluate"):
        path = study.directory / JOBS / str(run.keys["evaluate"]) / CONFIG
        asked = yaml.safe_load(path.read_text(encoding="utf-8"))
        out["evaluate"] = {"config": asked, **_accepted(run.place("evaluate"))}
    return out


def _weights(fit: Path) -> str:
    return read_json(fit / "drafter" / "config.json")["weights_sha256"]


def _accepted(directory: Path) -> Json:
    """Of an evaluation: its prompts' hash, and by draft shape a hash of what every target pass accepted."""
    evaluation = read_evaluation(directory)
    digests = {}
    for shape, own in evaluation.answers.items():
        accepted = [[one.prompt_id, list(one.accepted)] for one in own]
        digests[shape] = hashlib.sha256(json.dumps(accepted).encode()).hexdigest()
    return {"prompts_sha256": evaluation.settings.get("prompts_sha256"), "accepted_sha256": digests}


class Check(NamedTuple):
    """One thing that was compared with the card."""

    what: str
    equal: bool
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
    for line in _elsewhere(fit["provenance"]):
        log.warning("%s", line)
    threads = fit["provenance"].get("torch_threads")
    _run(out, "fit", fit["config"], threads)
    checks = [_losses(unpacked(fit["losses"]), read_lines(out / "fit" / LOSSES)),
              _same("weights", fit["weights_sha256"], _weights(out / "fit"))]  # fmt: skip
    if evaluation and (known := recorded["evaluate"]):
        _run(out, "evaluate", known["config"] | {"drafter": str(out / "fit" / "drafter")}, threads)
        now = _accepted(out / "evaluate")
        checks.append(_same("prompts", known["prompts_sha256"], now["prompts_sha256"]))
        checks += [_same(f"accepted drafts, {shape}", then, now["accepted_sha256"].get(shape))
                   for shape, then in known["accepted_sha256"].items()]  # fmt: skip
    record = {"card": str(card), "arm": arm, "seed": seed, "checks": [check._asdict() for check in checks]}
    write_json(out / "reproduction.json", {**record, "provenance": provenance(seed=seed)})
    for check in checks:
        sys.stdout.write(f"{check.what}: {'equal' if check.equal else 'differs'}, {check.told}\n")
    return 0 if all(check.equal for check in checks) else 1


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


def unpacked(losses: str) -> list[str]:
    """The lines of ``losses.txt``: optimizer step, batch within it, loss in hexadecimal."""
    return zlib.decompress(base64.b64decode(losses)).decode("ascii").splitlines()


def _same(what: str, then: str, now: str | None) -> Check:
    return Check(what, then == now, f"SHA-256 {then[:12]}" + ("" if then == now else f" then, {str(now)[:12]} now"))


def _losses(then: list[str], now: list[str]) -> Check:
    """Line by line, to the first that differs."""
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
