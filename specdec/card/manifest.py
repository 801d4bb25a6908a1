"""What a card was made from, hashed, and what it takes to run an arm again."""

import base64
import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import yaml

from specdec.card.cost import fit_config
from specdec.card.study import KINDS, Run, Study
from specdec.files import read_json, sha256
from specdec.provenance import provenance
from specdec.training.step_losses import LOSSES

Json = dict[str, Any]
_READ = {
    "fit": ("DONE.json", "config.yaml", "provenance.json", LOSSES, "drafter/config.json", "csv/version_*/metrics.csv"),
    "evaluate": ("metrics.json", "answers.jsonl"),
    "drift": ("drift.json",),
    "robustness": ("robustness.json",),
}
ELSEWHERE = ("out", "ckpt_path", "allow_changes")  # of a fit's config: where it ran, and how it went on


def inputs(study: Study) -> dict[str, str]:
    """The SHA-256 of every file that a card reads, by its path below the study's directory."""
    found = {"plan.json": sha256(study.directory / "plan.json")}
    for arm in study.arms:
        for run in arm.runs:
            for kind in KINDS:
                found |= _of(study.directory, run, kind)
    return dict(sorted(found.items()))


def _of(directory: Path, run: Run, kind: str) -> dict[str, str]:
    key = run.keys[kind]
    if key is None:
        return {}
    paths = [directory / "jobs" / key / name for name in ("state.json", "config.yaml")]
    if run.done(kind):
        paths += [path for name in _READ[kind] for path in sorted(run.place(kind).glob(name))]
    return {path.relative_to(directory).as_posix(): sha256(path) for path in paths if path.is_file()}


def digest(value: Any) -> str:
    """SHA-256 of JSON-able data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def manifest(study: Study, read: dict[str, str], command: list[str]) -> Json:
    """Where the card comes from, and of every finished run what it takes to make it again."""
    runs: dict[str, dict[str, Json]] = {}
    for arm in study.arms:
        for run in arm.done("fit"):
            runs.setdefault(arm.name, {})[str(run.seed)] = _rerun(study, run)
    return {
        "study_directory": str(study.directory.resolve()),
        "study_sha256": study.plan.get("study_sha256"),
        "prompts_sha256": study.plan.get("prompts_sha256"),
        "plan_provenance": study.plan.get("provenance"),
        "inputs": read,
        "runs": runs,
        "provenance": provenance(command),
    }


def _rerun(study: Study, run: Run) -> Json:
    fit = run.place("fit")
    config = {key: value for key, value in fit_config(fit).items() if key not in ELSEWHERE}
    out: Json = {
        "fit": {
            "config": config,
            "config_sha256": digest(config),
            "provenance": read_json(fit / "provenance.json") if (fit / "provenance.json").is_file() else None,
            "losses": _losses(fit / LOSSES),
            "weights_sha256": read_json(fit / "drafter" / "config.json")["weights_sha256"],
        },
        "evaluate": None,
    }
    key = run.keys["evaluate"]
    if run.done("evaluate") and key in study.plan.get("jobs", {}):
        found = read_json(run.place("evaluate") / "metrics.json")
        accepted = {growth: [[one.prompt_id, list(one.accepted)] for one in each]
                    for growth, each in run.evaluation.answers.items()}  # fmt: skip
        out["evaluate"] = {
            "command": study.plan["jobs"][key]["command"],
            "config": _config(study.directory / "jobs" / str(key) / "config.yaml"),
            "provenance": found["provenance"],
            "prompts_sha256": run.evaluation.settings.get("prompts_sha256"),
            "accepted_sha256": {growth: digest(each) for growth, each in accepted.items()},
            "acceptance_length": {one["growth"]: one["acceptance_length"]["mean"] for one in found["results"]},
        }
    return out


def _config(path: Path) -> Json | None:
    """The config file that a measure's command names."""
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None


def _losses(path: Path) -> Json | None:
    """Every step's loss to the last bit, packed: ``losses.txt`` as zlib has it, in base64."""
    if not path.is_file():
        return None
    text = path.read_bytes()
    packed = base64.b64encode(zlib.compress(text, 9)).decode()
    return {"encoding": "base64 of zlib of losses.txt", "lines": text.count(b"\n"), "data": packed}


def unpacked(losses: Json) -> list[str]:
    """The lines of ``losses.txt``: optimizer step, batch within it, loss in hexadecimal.

    Raises:
        ValueError: they are damaged.
    """
    try:
        text = zlib.decompress(base64.b64decode(losses["data"], validate=True)).decode("ascii")
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise ValueError(f"the card's losses are damaged ({error}): write the card again") from error
    return text.splitlines()
