"""Keeps in a card what it takes to train every run again, and compares the results bit by bit."""

import base64
import hashlib
import json
import logging
import sys
import zlib
from pathlib import Path
from typing import Any

from specdec.evaluation.compare import read_evaluation
from specdec.studies.recorded_run import Json, RecordedRun
from specdec.studies.results import RecordedStudy
from specdec.studies.worker import CONFIG, Job, JobFolder, specdec_job, write_config
from specdec.training.losses_file import read_losses
from specdec.training.run_directory import LOSSES
from specdec.utils.config import differences
from specdec.utils.files import write_json
from specdec.utils.machine import provenance
from specdec.utils.reading import check_sums, read_json
from specdec.utils.trust import check_reach, load_yaml, read_yaml_text

log = logging.getLogger(__name__)
CARD = "card.json"
VERSION = 4
# of a fit's config: where it ran, and how it went on
ELSEWHERE = ("out", "ckpt_path", "allow_changes")
MOST_LOSSES = 2**28
MOST_THREADS = 4096
# of a recorded run
FIELDS: dict[str, Any] = {
    "fit.config": dict, "fit.provenance": dict, "fit.losses": str, "fit.weights_sha256": str,
    "evaluate.config": dict, "evaluate.prompts_sha256": str | None, "evaluate.accepted_sha256": dict,
}  # fmt: skip
MACHINE = (
    "python",
    "platform",
    "cpu",
    "torch_threads",
    "gpus",
    "git_commit",
    "git_dirty",
    "versions",
)


def manifest(study: RecordedStudy) -> Json:
    """Where a card comes from, and of every finished run what it takes to make it again."""
    runs = {
        name: {str(run.seed): _recipe(run) for run in done}
        for name, done in study.done("fit").items()
        if done
    }
    return {
        "study_sha256": study.plan.get("study_sha256"),
        "prompts_sha256": study.plan.get("prompts_sha256"),
        "plan_provenance": study.plan.get("provenance"),
        "runs": runs,
        "provenance": provenance(),
    }


def _recipe(run: RecordedRun) -> Json:
    """Return a finished run's configs, where it was trained, and what is compared when it is made again."""
    fit = run.folders["fit"].output
    config = load_yaml(read_yaml_text(fit / "config.yaml"), fit / "config.yaml")
    losses = "".join(f"{line}\n" for line in read_losses(fit / LOSSES))
    out: Json = {
        "fit": {
            "config": {key: value for key, value in config.items() if key not in ELSEWHERE},
            "provenance": read_json(fit / "provenance.json"),
            "losses": base64.b64encode(zlib.compress(losses.encode(), 9)).decode(),
            "weights_sha256": _weights(fit),
        },
        "evaluate": None,
    }
    if run.done("evaluate"):
        folder = run.folders["evaluate"]
        check_sums(folder.path, partial=True)
        evaluate_config = load_yaml(read_yaml_text(folder.path / CONFIG), folder.path / CONFIG)
        out["evaluate"] = {"config": evaluate_config, **_accepted(folder.output)}
    return out


def _weights(fit: Path) -> str:
    return read_json(fit / "drafter" / "config.json")["weights_sha256"]


def _accepted(directory: Path) -> Json:
    """Return an evaluation's hash of prompts, and by draft shape a hash of what every target pass accepted."""
    evaluation = read_evaluation(directory)
    digests = {}
    for shape, answers in evaluation.answers.items():
        accepted = [[answer.prompt_id, list(answer.accepted)] for answer in answers]
        digests[shape] = hashlib.sha256(json.dumps(accepted).encode()).hexdigest()
    return {"prompts_sha256": evaluation.settings.get("prompts_sha256"), "accepted_sha256": digests}


def recorded_run(card: Path, arm: str, seed: int) -> Json:
    """The entry of one run in a card (``card.json``, or its directory); ValueError if it has no such run."""
    path = card
    if card.is_dir():
        path = card / CARD
        check_sums(card, partial=True)
    content = read_json(path)
    if (
        not isinstance(content, dict)
        or content.get("version") != VERSION
        or "manifest" not in content
    ):
        raise ValueError(f"{path}: not a study card of version {VERSION}")
    manifest = content["manifest"]
    runs = manifest.get("runs") if isinstance(manifest, dict) else None
    if not isinstance(runs, dict) or not all(
        isinstance(by_seed, dict) for by_seed in runs.values()
    ):
        raise ValueError(f"{path}: its manifest lists no runs by arm and seed: the card is damaged")
    if str(seed) not in runs.get(arm, {}):
        known = "; ".join(f"{name}, seeds {', '.join(seeds)}" for name, seeds in runs.items())
        raise ValueError(
            f"{path}: no finished fit of an arm {arm!r} with seed {seed}; there are: {known or 'none'}"
        )
    recorded: Json = runs[arm][str(seed)]
    _check(recorded, f"{path}: arm {arm}, seed {seed}")
    return recorded


def _check(recorded: Any, where: str) -> None:
    """Raise ValueError if a card's entry is not as :func:`_recipe` makes it, or does what no file may."""
    for path, kind in FIELDS.items():
        job, name = path.split(".")
        part = recorded.get(job) if isinstance(recorded, dict) else None
        if job == "evaluate" and part is None:
            continue
        if not isinstance(part, dict) or not isinstance(part.get(name), kind):
            raise ValueError(f"{where}: {path} is missing or of another type: the card is damaged")
        if name == "config":
            check_reach(part[name], f"{where}: {job}")
    threads = recorded["fit"]["provenance"].get("torch_threads")
    if type(threads) not in (int, type(None)) or not 0 <= (threads or 0) <= MOST_THREADS:
        raise ValueError(f"{where}: torch_threads is {threads!r}: the card is damaged")
    unpack_losses(recorded["fit"]["losses"])


def jobs_again(recorded: Json, directory: Path) -> list[Job]:
    """The run's fit, and its evaluation if it had one, as jobs in a new directory; writes their configs.

    Versions and machine that differ from the run's are logged: with other ones the last bits need not agree.
    """
    then = recorded["fit"]["provenance"]
    now = provenance()
    known = [name for name in MACHINE if name in then]
    for what, was, is_now in differences(
        {name: then[name] for name in known}, {name: now[name] for name in known}
    ):
        log.warning("%s: %s then, %s now", what.replace("_", " "), was, is_now)
    threads = then.get("torch_threads") or 1
    drafter = JobFolder(directory, "fit", "fit").output / "drafter"
    jobs = [specdec_job(directory, "fit", "fit", "fit", recorded["fit"]["config"], threads, ())]
    if recorded["evaluate"]:
        config = recorded["evaluate"]["config"] | {"drafter": str(drafter)}
        jobs.append(
            specdec_job(directory, "evaluate", "evaluate", "evaluate", config, threads, ("fit",))
        )
    for job in jobs:
        write_config(directory, job)
    return jobs


def compare_again(recorded: Json, directory: Path) -> int:
    """Print what is equal and what differs, and write ``reproduction.json``; 0 where all is equal, else 1."""
    fit = JobFolder(directory, "fit", "fit").output
    then = recorded["fit"]
    losses = unpack_losses(then["losses"]), read_losses(fit / LOSSES)
    checks = [
        {"what": "losses", "equal": losses[0] == losses[1], "found": _first_difference(*losses)}
    ]
    digests = [("weights", then["weights_sha256"], _weights(fit))]
    if then := recorded["evaluate"]:
        now = _accepted(JobFolder(directory, "evaluate", "evaluate").output)
        digests.append(("prompts", then["prompts_sha256"], now["prompts_sha256"]))
        digests += [(f"accepted drafts, {shape}", digest, now["accepted_sha256"].get(shape))
                    for shape, digest in then["accepted_sha256"].items()]  # fmt: skip
    checks += [{"what": what, "equal": was == is_now, "found": f"SHA-256 {str(was)[:12]} then, {str(is_now)[:12]} now"}
               for what, was, is_now in digests]  # fmt: skip
    write_json(directory / "reproduction.json", {"checks": checks, "provenance": provenance()})
    for check in checks:
        sys.stdout.write(
            f"{check['what']}: {'equal' if check['equal'] else 'differs'}, {check['found']}\n"
        )
    return 0 if all(check["equal"] for check in checks) else 1


def unpack_losses(losses: str) -> list[str]:
    """The lines of ``losses.txt``: optimizer step, batch within it, loss in hexadecimal; ValueError if not."""
    try:
        packed = base64.b64decode(losses, validate=True)
        reader = zlib.decompressobj()
        text = reader.decompress(packed, MOST_LOSSES)
        if not reader.eof:
            raise ValueError(f"more than {MOST_LOSSES:,} bytes, or cut off")
        lines = text.decode("ascii").splitlines()
        for line in lines:
            step, part, loss = line.split()
            int(step), int(part), float.fromhex(loss)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"the card's losses cannot be read: {error}") from error
    return lines


def _first_difference(then: list[str], now: list[str]) -> str:
    for line_then, line_now in zip(then, now, strict=False):
        if line_then != line_now:
            (step, part, was), now_is = line_then.split(), line_now.split()[2]
            values = f"{float.fromhex(was)!r} then, {float.fromhex(now_is)!r} now"
            return f"first at optimizer step {step} (batch {part}), of {len(then)}: {values}"
    return f"{min(len(then), len(now))} of {len(then)}, bit by bit"
