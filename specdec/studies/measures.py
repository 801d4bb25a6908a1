"""What is measured of every fit: by ``specdec evaluate``, ``drift`` and ``robustness``, whose own parsers check it.

All arms answer the same prompts: files, or text that the embedded target was never trained on.
"""

import hashlib
import importlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_origin

import yaml

from specdec.decoding import parse_shape
from specdec.diagnostics.conditions import parse_conditions
from specdec.embedded.build import EmbeddedConfig
from specdec.embedded.data import held_out_prompts
from specdec.evaluation.benchmark import parse_baseline
from specdec.evaluation.prompts import fingerprint, load_prompts
from specdec.studies.arms import Arm, argument
from specdec.studies.keys import target_contents
from specdec.studies.study import Study
from specdec.target import EMBEDDED, TargetSource
from specdec.target.loading import DTYPES
from specdec.utils.command import parse, parser_of

COMMANDS = {
    "evaluate": "specdec.evaluation.run:evaluate_command",
    "drift": "specdec.diagnostics.drift:drift",
    "robustness": "specdec.diagnostics.robustness:robustness",
}
DONE = {"evaluate": "metrics.json", "drift": "drift.json", "robustness": "robustness.json"}
DEFAULTS: dict[str, dict[str, Any]] = {"evaluate": {"compile": False, "plain": False}}  # acceptance is compared
OWN = ("prompts", "prompts_count", "prompt_tokens")  # arguments that are the study's, not the command's
FEWEST_PROMPTS, PROMPTS, PROMPT_TOKENS = 2, 40, 64
PROCESS_BYTES = 700_000_000  # of Python, torch and Lightning, before a model


class StudyPrompts(NamedTuple):
    """The files that a measure reads, and the hash of what it asks."""

    files: tuple[str, ...]
    sha256: str
    name: str | None = None
    """Of the file in the study's directory that has to be written, if any."""
    text: str = ""


@dataclass(frozen=True)
class Measure:
    """What an arm is measured with, parsed: the same for all of its seeds.

    Args:
        config: of the command, defaults included, so that one that changes is noticed; without drafter and ``out``.
        settings: the same without where things lie.
        target: which model, as the measure runs it.
        memory_bytes: of its weights and a process.
    """

    kind: str
    config: Mapping[str, Any]
    settings: Mapping[str, Any]
    target: Any
    prompts: StudyPrompts
    memory_bytes: int


def weights_bytes(target: TargetSource, target_parameters: int, drafter_parameters: int = 0) -> int:
    """Bytes of a process that runs a target and a float32 drafter; caches and activations come on top.

    Raises:
        ValueError: there is no such dtype.
    """
    if target.dtype not in DTYPES:
        raise ValueError(f"unknown dtype {target.dtype!r}: choose from {', '.join(DTYPES)}")
    return target_parameters * DTYPES[target.dtype].itemsize + 4 * drafter_parameters + PROCESS_BYTES


def parse_measure(arm: Arm, kind: str, prompts: StudyPrompts) -> Measure:
    """Check an arm's arguments of a measure by its command's own parser.

    Raises:
        ValueError: they are wrong; the message has the arm's name.
    """
    module, _, name = COMMANDS[kind].partition(":")
    parser = parser_of(getattr(importlib.import_module(module), name), kind)
    target: dict[str, Any] = {"target.source": arm.target.source, "target.revision": arm.target.revision}
    target |= {"target.trust_remote_code": True} if arm.target.trust_remote_code else {}
    given = {key: value for key, value in arm.measures[kind].items() if key not in OWN}
    given = {**target, **DEFAULTS.get(kind, {}), **given}
    given |= {"prompts": list(prompts.files), "drafter": "of a fit that is yet to be run"}
    several = {action.dest for action in parser._actions if get_origin(getattr(action, "_typehint", None)) is list}
    argv = [argument(key, _list(value) if key in several else value) for key, value in given.items()]
    try:
        built = parse(parser, argv)
        trees = _check_values(kind, built)
        memory = weights_bytes(built.target, *arm.parameters)
    except ValueError as error:
        raise ValueError(f"arm {arm.name}: {kind}: {error}") from error
    full = yaml.safe_load(parser.dump(parser.parse_args(argv), skip_none=False))
    config = {name: value for name, value in full.items() if name not in ("config", "drafter", "out")}
    settings = {name: value for name, value in config.items() if name not in ("prompts", "target")} | {"trees": trees}
    return Measure(kind, config, settings, target_contents(built.target), prompts, memory)


def _check_values(kind: str, built: Any) -> list[Any]:
    """What the commands check only when they begin; what the draft shapes come to, whose trees may lie in files."""
    for text in _list(getattr(built, "baselines", [])):
        parse_baseline(text)
    if kind == "robustness":
        parse_conditions(built.conditions)
    return [parse_shape(text).describe() for text in _list(built.shape if "shape" in built else [])]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def read_prompts(study: Study, source: TargetSource, directory: Path) -> dict[str, StudyPrompts]:
    """The prompts of every measure; one that does not name any has those of ``evaluate``.

    Args:
        source: whose tokenizer cuts embedded prompts to ``prompt_tokens``.
        directory: the study's, in which embedded prompts get a file named after what it holds: a sweep of a study that
            was changed meanwhile does not write over what another one is about to ask.

    Raises:
        ValueError: files that cannot be read, or numbers that are out of range.
    """
    found: dict[str, StudyPrompts] = {}
    common = {key: value for key, value in study.measures.get("evaluate", {}).items() if key in (*OWN, "layouts")}
    for kind, given in study.measures.items():
        full = given if set(OWN) & set(given) else {**common, **given}
        found[kind] = _prompts(kind, full, source, directory)
    return found


def _prompts(measure: str, given: Mapping[str, Any], source: TargetSource, directory: Path) -> StudyPrompts:
    asked, limit, layouts = given.get("prompts", EMBEDDED), given.get("limit"), _list(given.get("layouts") or [])
    if asked != EMBEDDED:
        if more := [name for name in OWN[1:] if name in given]:
            raise ValueError(f"{measure}: {more[0]} is of embedded prompts: leave it out, or say prompts: {EMBEDDED}")
        files = _list(asked)
        if not all(isinstance(file, str) for file in files):
            raise ValueError(f"{measure}: prompts must be {EMBEDDED}, a file or a list of files, not {asked!r}")
        return StudyPrompts(tuple(files), fingerprint(load_prompts(files, limit, layouts)))
    count, tokens = given.get("prompts_count", PROMPTS), given.get("prompt_tokens", PROMPT_TOKENS)
    if type(count) is not int or type(tokens) is not int or count < FEWEST_PROMPTS or tokens < 2:
        raise ValueError(
            f"{measure}: prompts_count is {count}, prompt_tokens {tokens}: at least {FEWEST_PROMPTS} and 2 are needed"
        )
    rows = held_out_prompts(count, tokens, EmbeddedConfig().seed, source.load_tokenizer())
    text = "".join(json.dumps({**row, "category": None}) + "\n" for row in rows)
    name = f"prompts-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        sha256 = fingerprint(load_prompts([file.name], limit, layouts))
    return StudyPrompts((str(directory / name),), sha256, name, text)
