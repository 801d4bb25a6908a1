"""``specdec diff``: how two configs, drafters or runs differ, in the parts' own terms."""

import contextlib
import dataclasses
import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from specdec.arguments import parse, short
from specdec.compose import compose, shipped
from specdec.drafter import DrafterConfig, DrafterSpec
from specdec.drafter.config import AXES
from specdec.drafter.io import FORMAT
from specdec.drafter.parts import describe
from specdec.files import read_json
from specdec.values import canonical, pairs, words

SPEC = tuple(field.name for field in dataclasses.fields(DrafterSpec))
ORDER = ("fusion", "entry", "norms", "recurrence", "head", "aux_layers", "dimensions", "target")
RUN = {"model", "data", "trainer", "checkpoint", "seed_everything"}  # any of these makes a config a run's
ELSEWHERE = {"out", "ckpt_path", "config", "data", "model", "trainer"}  # not what a trainer is: where, or told apart


@dataclass(frozen=True)
class Side:
    """One of the two that are compared.

    Args:
        kind: ``preset``, ``saved`` or ``run``.
        values: a drafter's fields, or a run's groups.
        design: a preset's.
        weights: their hash, where there are any.
    """

    name: str
    kind: str
    values: dict[str, Any]
    design: DrafterSpec | None = None
    weights: str | None = None


@dataclass(frozen=True)
class Difference:
    """One group in which two sides differ: ``(key, a's value, b's value)`` of whatever is not equal."""

    group: str
    pairs: list[tuple[str, Any, Any]]

    @property
    def what(self) -> str:
        """The group, and the key too where only one differs."""
        key = self.pairs[0][0]
        return self.group if len(self.pairs) > 1 or key in ("", self.group) else f"{self.group}.{key}"

    def side(self, index: int) -> Any:
        """The value of side 0 or 1; with several keys a mapping."""
        values = {pair[0]: pair[1 + index] for pair in self.pairs}
        return values if len(values) > 1 else self.pairs[0][1 + index]

    def text(self, index: int) -> str:
        """The same to be read."""
        texts = {pair[0]: words(pair[1 + index]) for pair in self.pairs}
        bare = len(texts) == 1
        return ", ".join(text if bare or key == self.group else f"{key} {text}" for key, text in texts.items())


def main(argv: list[str]) -> int:
    """Run the command; 0 where nothing differs, else 1, as diff(1).

    Raises:
        ValueError: one cannot be read, or they are not of one kind.
    """
    parser = ArgumentParser(prog="specdec diff", description=__doc__, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("a", type=str, help="a drafter preset, a fit config, a saved drafter or a run directory")
    parser.add_argument("b", type=str, help="another of the same kind; a preset and a saved drafter go together")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parse(parser, argv)
    a, b = read(args.a), read(args.b)
    found, weights = differences(a, b), same_weights(a, b)
    if args.json:
        told = [{"what": each.what, "a": each.side(0), "b": each.side(1)} for each in found]
        text = json.dumps({"a": args.a, "b": args.b, "same_weights": weights, "differences": told}, indent=2)
    else:
        lines = aligned([(each.what, each.text(0), each.text(1)) for each in found])
        head = ["the weights differ" + ("" if lines else "; no other difference")] if weights is False else []
        text = "\n".join(head + lines) or "no difference"
    sys.stdout.write(f"{text}\n")
    return int(bool(found) or weights is False)


def aligned(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """A line for each difference: what, on one side, on the other."""
    wide = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    return [f"{what:<{wide[0]}}  {one:<{wide[1]}}  {two}".rstrip() for what, one, two in rows]


def differences(a: Side, b: Side) -> list[Difference]:
    """What differs beside the weights, group by group.

    Raises:
        ValueError: one is a run and the other is not.
    """
    if (a.kind == "run") != (b.kind == "run"):
        run, other = (a, b) if a.kind == "run" else (b, a)
        raise ValueError(f"{run.name} is a run, {other.name} is a drafter: give two of a kind")
    one, two = (canonical(side) for side in (_beside(a, b), _beside(b, a)))
    if a.kind != "run":
        one, two = _grouped(one), _grouped(two)
    found = [Difference(group, list(pairs(one.get(group), two.get(group)))) for group in one | two]
    return [each for each in found if each.pairs]


def same_weights(a: Side, b: Side) -> bool | None:
    """Whether two drafters' weights are equal; None where one has none."""
    return None if a.weights is None or b.weights is None else a.weights == b.weights


def read(name: str) -> Side:
    """What a path holds.

    Raises:
        ValueError: nothing that can be compared, or something illegal.
    """
    path = Path(shipped(name))
    if (path / "config.json").is_file():
        values, weights = _saved(path)
        return Side(name, "saved", values, weights=weights)
    if (path / "config.yaml").is_file():
        weights = _saved(path / "drafter")[1] if (path / "drafter" / "config.json").is_file() else None
        return Side(name, "run", _run(path / "config.yaml"), weights=weights)
    if path.is_dir():
        raise ValueError(
            f"{name}: neither a saved drafter, for want of config.json, nor a run, for want of config.yaml"
        )
    config = compose(["--config", str(path)])[0]
    if RUN & set(config):
        return Side(name, "run", _run(path))
    if not config or not set(config) <= set(SPEC):
        raise ValueError(f"{name}: neither a drafter's design ({', '.join(SPEC)}) nor a fit config (model, data, ...)")
    spec = _spec(config, name)
    return Side(name, "preset", _fields(spec), spec)


def _saved(directory: Path) -> tuple[dict[str, Any], str | None]:
    """A saved drafter's fields and the hash of its weights."""
    where = directory / "config.json"
    stored = read_json(where)
    if not isinstance(stored, dict) or stored.get("format") != FORMAT or not isinstance(stored.get("drafter"), dict):
        raise ValueError(f"{where}: not a specdec drafter (its format is not {FORMAT!r})")
    if missing := sorted({field.name for field in dataclasses.fields(DrafterConfig)} - set(stored["drafter"])):
        raise ValueError(f"{where}: the drafter's config lacks {', '.join(missing)}")
    return stored["drafter"], stored.get("weights_sha256")


def _spec(config: dict[str, Any], where: str) -> DrafterSpec:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--drafter", type=DrafterSpec)
    try:
        return parser.instantiate(parser.parse_object({"drafter": config})).drafter
    except ArgumentError as error:
        raise ValueError(f"{where}: {short(str(error))}") from error
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _fields(spec: DrafterSpec) -> dict[str, Any]:
    values = {name: getattr(spec, name) for name in SPEC}
    values |= {name: describe(values[name]) for name in AXES}
    return {**values, "norms": dataclasses.asdict(spec.norms)}


def _run(config: Path) -> dict[str, Any]:
    """A run's groups, everything that was left to a default included: what ``fit --print_config`` says."""
    from specdec.fit import run

    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            run("fit", ["--config", str(config), "--print_config"])
    except ValueError as error:
        raise ValueError(str(error) if str(config) in str(error) else f"{config}: {error}") from error
    return run_groups(yaml.safe_load(printed.getvalue()), str(config))


def run_groups(full: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The groups of a run's config in which everything stands.

    Raises:
        ValueError: its drafter is illegal.
    """
    model, trainer = dict(full["model"]), full.get("trainer") or {}
    rest = {name: value for name, value in full.items() if name not in ELSEWHERE}
    groups = _grouped(_fields(_spec(model.pop("drafter"), where)))
    groups |= {name: model.pop(name, None) for name in ("target", "optimizer", "schedule")}
    groups |= {"training": model, "data": full.get("data"), "trainer": {**trainer, **rest}}
    return groups


def _beside(side: Side, other: Side) -> dict[str, Any]:
    """The values to compare with another's: a preset and a saved drafter have their design in common.

    The preset gets what the saved drafter's target would give it.
    """
    if {side.kind, other.kind} != {"preset", "saved"}:
        return side.values
    values = {name: side.values.get(name) for name in SPEC}
    if side.design is None:
        return values
    met, vocabulary = other.values, other.values["vocab_size"]
    if values["aux_layers"] == "default":
        with contextlib.suppress(ValueError):  # not on a target this deep
            values["aux_layers"] = list(side.design.fusion.default_layers(met["num_target_layers"]))
    if values["hidden_size"] == "target":
        values["hidden_size"] = met["target_hidden_size"]
    if values["intermediate_size"] == "target":  # which a saved drafter does not tell
        values["intermediate_size"] = met["intermediate_size"]
    asked = values["draft_vocab_size"]
    values["draft_vocab_size"] = vocabulary if asked == "all" else min(asked, vocabulary)
    return values


def _grouped(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A drafter's fields by what they are about; a group of one field is its value."""
    groups: dict[str, dict[str, Any]] = {group: {} for group in ORDER}
    for name, value in fields.items():
        groups[name if name in ORDER else "head" if name == "draft_vocab_size" else "dimensions"][name] = value
    return {group: values.get(group) if len(values) == 1 else values for group, values in groups.items() if values}
