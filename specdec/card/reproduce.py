"""``specdec reproduce``: train an arm of a card again, and compare every loss, the weights and what is accepted."""

import itertools
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from jsonargparse import ArgumentParser

from specdec.arguments import parse
from specdec.card.manifest import digest, unpacked
from specdec.card.write import CARD, VERSION
from specdec.compose import new_run
from specdec.evaluation.command import main as evaluate
from specdec.evaluation.compare_command import read as read_evaluation
from specdec.files import read_json, write_json, write_text
from specdec.fit import run as fit
from specdec.imports import flags, take
from specdec.provenance import provenance
from specdec.training.step_losses import LOSSES, read_lines

log = logging.getLogger(__name__)
Json = dict[str, Any]

_MACHINE = ("python", "platform", "cpu", "torch_threads", "gpus", "git_commit", "git_dirty")


class Check(NamedTuple):
    """One thing that was compared."""

    what: str
    equal: bool | None
    """None where the card has nothing to compare with."""
    said: str


def main(argv: list[str]) -> int:
    """Run the command; 0 where all is equal, else 1.

    Raises:
        ValueError: the card has no such run, or it cannot be run here.
    """
    parser = ArgumentParser(prog="specdec reproduce", description=__doc__, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("card", type=str, help="card.json, or the directory that it lies in")
    parser.add_argument("--arm", type=str, required=True, help="name of the arm")
    parser.add_argument("--seed", type=int, required=True, help="its seed")
    parser.add_argument("--out", type=str | None, default=None, help="directory of the new run; must be new")
    parser.add_argument("--evaluation", type=bool, default=True, help="evaluate the drafter again too")
    args = parse(parser, argv)
    path = Path(args.card)
    card = read_json(path / CARD if path.is_dir() else path)
    recorded = of_card(card, args.arm, args.seed, str(path))
    out = Path(args.out) if args.out else new_run("reproduce")
    if out.exists():
        raise ValueError(f"{out} exists already and is never overwritten: choose another --out")
    command = ["specdec", "reproduce", *flags(), *argv]
    checks = reproduce(recorded, out, evaluation=args.evaluation)
    record = {"card": str(path), "arm": args.arm, "seed": args.seed, "checks": [check._asdict() for check in checks]}
    write_json(out / "reproduction.json", {**record, "provenance": provenance(command, args.seed)})
    wide = max(len(check.what) for check in checks)
    lines = [f"{check.what:<{wide}}  {_WORDS[check.equal]:<{len(_WORDS[None])}}  {check.said}" for check in checks]
    sys.stdout.write("\n".join(line.rstrip() for line in lines) + "\n")
    return 0 if all(check.equal is not False for check in checks) and checks[0].equal else 1


_WORDS = {True: "equal", False: "differs", None: "not compared"}


def of_card(card: Any, arm: str, seed: int, where: str) -> Json:
    """What a card knows of one run.

    Raises:
        ValueError: it is no card of this version, or has no such finished run.
    """
    if not isinstance(card, dict) or card.get("version") != VERSION or "manifest" not in card:
        raise ValueError(f"{where}: not a study card of version {VERSION}")
    runs = card["manifest"]["runs"]
    if arm not in runs:
        raise ValueError(f"{where}: no finished fit of an arm {arm!r}; there are: {', '.join(runs) or 'none'}")
    if str(seed) not in runs[arm]:
        raise ValueError(f"{where}: no finished fit of {arm} with seed {seed}; its seeds: {', '.join(runs[arm])}")
    found: Json = runs[arm][str(seed)]
    return found


def reproduce(recorded: Json, out: Path, evaluation: bool = True) -> list[Check]:
    """Train and evaluate again into ``out``, and compare; losses come first.

    Threads are those of the recorded run while it lasts. What differs of versions and machine is logged before: with
    other ones the last bits need not agree.

    Raises:
        ValueError: the recorded config does not run here, or training was interrupted.
    """
    known = recorded["fit"]
    if digest(known["config"]) != known["config_sha256"]:
        log.warning("the card's config of this run was changed since the card was written")
    for line in _elsewhere(known["provenance"] or {}):
        log.warning("%s", line)
    config, threads = out / "config.yaml", torch.get_num_threads()
    write_text(config, yaml.safe_dump(known["config"], sort_keys=False, allow_unicode=True))
    torch.set_num_threads((known["provenance"] or {}).get("torch_threads") or threads)
    try:
        status = fit("fit", ["--config", str(config), "--out", str(out / "fit")])
        if status:
            raise ValueError(f"{out / 'fit'}: training ended with status {status} before it was done")
        checks = [_losses(known["losses"], out / "fit" / LOSSES), _weights(known["weights_sha256"], out / "fit")]
        if evaluation and recorded["evaluate"]:
            checks += _evaluation(recorded["evaluate"], out)
    finally:
        torch.set_num_threads(threads)
    return checks


def _elsewhere(known: Json) -> list[str]:
    """What differs here from where the run was: versions and machine."""
    here = provenance()
    versions = known.get("versions") or {}
    rows = [(f"version of {name}", versions.get(name), here["versions"].get(name)) for name in versions]
    rows += [(name.replace("_", " "), known.get(name), here[name]) for name in _MACHINE if name in known]
    return [f"{what}: {then} then, {now} now" for what, then, now in rows if then != now]


def _losses(known: Json | None, path: Path) -> Check:
    if known is None:
        return Check("losses", None, "the card has none of this run")
    then, now = unpacked(known), read_lines(path)
    for one, two in itertools.zip_longest(then, now):
        if one != two:
            return Check("losses", False, _first_difference(one, two, len(then)))
    return Check("losses", True, f"{len(then)} of {len(then)}, bit by bit")


def _first_difference(one: str | None, two: str | None, lines: int) -> str:
    if one is None or two is None:
        return (
            f"{'the new run goes on' if one is None else 'the new run ends'} at {(two or one or '').rsplit(' ', 1)[0]}"
        )
    step, part, value = one.split()
    was, now = float.fromhex(value), float.fromhex(two.split()[2])
    return f"first at optimizer step {step} (batch {part}), of {lines}: {was!r} then, {now!r} now"


def _weights(known: str, directory: Path) -> Check:
    now = read_json(directory / "drafter" / "config.json")["weights_sha256"]
    return Check("weights", now == known, f"SHA-256 {known[:12]}" + ("" if now == known else f" then, {now[:12]} now"))


def _evaluation(known: Json, out: Path) -> list[Check]:
    values = {"--drafter": str(out / "fit" / "drafter"), "--out": str(out / "evaluate")}
    if known["config"] is not None:
        values["--config"] = str(out / "evaluate.yaml")
        write_text(out / "evaluate.yaml", yaml.safe_dump(known["config"], sort_keys=False, allow_unicode=True))
    evaluate(_replaced(take(known["command"][1:])[1], values))
    found = read_evaluation(out / "evaluate")
    checks = []
    if found.settings.get("prompts_sha256") != known["prompts_sha256"]:
        checks.append(Check("prompts", False, "they are not those of the card"))
    for growth, then in known["accepted_sha256"].items():
        accepted = [[one.prompt_id, list(one.accepted)] for one in found.answers.get(growth, [])]
        now = read_json(out / "evaluate" / "metrics.json")["results"]
        length = next((one["acceptance_length"]["mean"] for one in now if one["growth"] == growth), None)
        equal = digest(accepted) == then
        was = known["acceptance_length"][growth]
        said = f"acceptance length {was:.4f}" + (
            "" if equal else f" then, {length if length is None else f'{length:.4f}'} now"
        )
        checks.append(Check(f"accepted drafts, {growth}", equal, said))
    return checks


def _replaced(argv: Sequence[str], values: dict[str, str]) -> list[str]:
    """The arguments with other values of some options, whichever way they were written."""
    out, words = [], iter(argv)
    for word in words:
        name = word.partition("=")[0]
        if name in values:
            if "=" not in word:
                next(words, None)
            continue
        out.append(word)
    return [*itertools.chain(*sorted(values.items())), *out]
