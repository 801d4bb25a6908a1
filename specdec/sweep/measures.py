"""What is measured of every fit: by ``specdec evaluate``, ``drift`` and ``robustness``, whose parsers check it."""

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from specdec.arguments import short
from specdec.decoding import parse_growth
from specdec.evaluation.baselines import parse_baseline
from specdec.imports import flags, guard
from specdec.sweep.arms import Arm
from specdec.sweep.contents import target_contents
from specdec.sweep.job import Job, Kind
from specdec.sweep.keys import key_of, measure_decisive
from specdec.sweep.memory import of_weights
from specdec.sweep.prompts import OWN, Prompts
from specdec.sweep.reading import nearest
from specdec.sweep.written import Written, config_of

COMMANDS = {
    "evaluate": "specdec.evaluation.command",
    "drift": "specdec.drift.command",
    "robustness": "specdec.robustness.command",
}
DONE = {"evaluate": "metrics.json", "drift": "drift.json", "robustness": "robustness.json"}
DEFAULTS: dict[str, dict[str, Any]] = {"evaluate": {"compile": "off", "plain": False}}  # acceptance is compared
WHERE = ("config", "drafter", "out", "prompts", "target")  # of the parsed arguments: told otherwise in a key


@dataclasses.dataclass(frozen=True)
class Measure:
    """What an arm is measured with, parsed: the same for all of its seeds.

    Args:
        config: of the command, as its config file has it.
        settings: every argument, those left to a default included, without where things lie.
        target: which model, as the measure runs it.
        memory_bytes: of its weights and a process.
    """

    kind: Kind
    config: Mapping[str, Any]
    settings: Mapping[str, Any]
    target: Any
    prompts: Prompts
    memory_bytes: int

    def job(self, label: str, fit: str, directory: Path, threads: int) -> Written:
        """For the drafter of a fit."""
        key = key_of(self.kind, measure_decisive(fit, self.settings, self.target, self.prompts.sha256))
        out, drafter = directory / "measures" / key, directory / "fits" / fit / "drafter"
        command = (self.kind, *flags(), "--config", config_of(directory, key), "--drafter", str(drafter))
        job = Job(
            key=key, kind=self.kind, label=label, command=(*command, "--out", str(out)), directory=f"measures/{key}",
            done=DONE[self.kind], needs=(fit,), threads=threads, memory_bytes=self.memory_bytes,
        )  # fmt: skip
        return Written(job, self.config)


def measure_of(arm: Arm, kind: str, prompts: Prompts) -> Measure:
    """Check an arm's arguments of a measure by its command's own parser.

    Raises:
        ValueError: they are wrong; the message has the arm's name.
    """
    given = {key: value for key, value in arm.measures[kind].items() if key not in OWN}
    target: dict[str, Any] = {"source": arm.target.source, "revision": arm.target.revision}
    if arm.target.trust_remote_code:
        target["trust_remote_code"] = True
    config = _nested({**DEFAULTS.get(kind, {}), **given})
    config |= {"target": {**target, **config.get("target", {})}, "prompts": list(prompts.files)}
    parser = _parser(kind)
    several = {action.dest for action in parser._actions if action.nargs in ("+", "*")}
    config = {name: _list(value) if name in several else value for name, value in config.items()}
    guard()
    try:
        place = "of a fit that is yet to be run"
        parsed = parser.parse_object({**config, "drafter": [place] if "drafter" in several else place})
        built = parser.instantiate(parsed)
        _check(kind, built)
        memory = of_weights(built.target, *arm.parameters)
    except (ArgumentError, ValueError) as error:
        raise ValueError(f"arm {arm.name}: {kind}: {short(str(error))}{_hint(str(error), parser, config)}") from error
    full = yaml.safe_load(parser.dump(parsed, skip_none=False))  # so that a default that changes is noticed
    settings = {name: value for name, value in full.items() if name not in WHERE}
    if "growth" in full:  # a static tree's file may change
        settings["trees"] = [parse_growth(text).describe() for text in _list(full["growth"])]
    return Measure(cast(Kind, kind), config, settings, target_contents(built.target), prompts, memory)


def _parser(kind: str) -> ArgumentParser:
    try:
        return importlib.import_module(COMMANDS[kind]).parser()
    except ModuleNotFoundError as error:
        if error.name != COMMANDS[kind]:
            raise
        raise ValueError(f"{kind}: this version of specdec does not measure it: remove it from the study") from error


def _check(kind: str, built: Any) -> None:
    """What the commands check when they begin."""
    for text in _list(getattr(built, "growth", [])):
        parse_growth(text)
    for text in _list(getattr(built, "baselines", [])):
        parse_baseline(text)
    if kind == "robustness":
        importlib.import_module("specdec.robustness.parse").parse_conditions(built.conditions)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _nested(given: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as mappings in one another."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        *above, last = key.split(".")
        place = found
        for name in above:
            inner = place.setdefault(name, {})
            place[name] = inner if isinstance(inner, dict) else {"class_path": inner}
            place = place[name]
        if isinstance(value, dict) and isinstance(place.get(last), dict):
            place[last] |= value
        else:
            place[last] = value
    return found


def _hint(message: str, parser: ArgumentParser, config: Mapping[str, Any]) -> str:
    known = {action.dest.partition(".")[0] for action in parser._actions}
    wrong = next((key for key in config if key not in known and key in message), None)
    close = nearest(wrong, known) if wrong else ""
    return close if "did you mean" in close else ""
