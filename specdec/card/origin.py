"""Where a card's numbers come from, and the command that trains an arm again."""

import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from specdec.card.blocks import Block, Command, Grid, Heading, Text

Json = dict[str, Any]


def origin(card: Json, where: str) -> list[Block]:
    """The card's last section.

    Args:
        where: the path of ``card.json`` in commands.
    """
    manifest = card["manifest"]
    made = manifest["provenance"]
    out: list[Block] = [Heading(2, "How the numbers were made"), Text(card["statistics"]["intervals"] + "."),
                        Text(f"Corrections: {card['statistics']['corrections']}.")]  # fmt: skip
    fits = [run["fit"]["provenance"] for runs in manifest["runs"].values() for run in runs.values()]
    known = [each for each in fits if each]
    without = f"; {len(fits) - len(known)} of {len(fits)} without a record" if len(known) < len(fits) else ""
    rows = [["Trained", _commits(known) + without],
            ["Versions", _each(_versions(one) for one in known)],
            ["Python", _each(one.get("python") for one in known)],
            ["Machine", _each(_machine(one) for one in known)],
            ["Study's command", (manifest["plan_provenance"] or {}).get("command", "-")],
            ["Card made", f"{made['date']}, {_commits([made])}, {_machine(made)}"],
            ["Card's command", made["command"]],
            ["SHA-256 of the study", manifest["study_sha256"] or "-"],
            ["SHA-256 of the prompts", manifest["prompts_sha256"] or "-"],
            ["Inputs", f"{len(manifest['inputs'])} files, their SHA-256 in card.json"]]  # fmt: skip
    out.append(Grid(["What", "Value"], rows, left=2))
    first = next(((arm, seed) for arm, runs in manifest["runs"].items() for seed in runs), None)
    if first:
        line = shlex.join(["specdec", "reproduce", where, "--arm", first[0], "--seed", first[1]])
        out += [Text("An arm is trained again, and its losses compared bit by bit, by"), Command(line),
                Text("It reads the features and prompts in the study's folder: in another checkout the study's command "
                     "has to be run first.")]  # fmt: skip
    return out


def _each(found: Iterable[str | None]) -> str:
    """All that differ."""
    return "; ".join(sorted({one for one in found if one})) or "-"


def _versions(made: Json) -> str:
    return ", ".join(f"{name} {version}" for name, version in made.get("versions", {}).items() if version)


def _machine(made: Json) -> str:
    return ", ".join(each for each in (made.get("cpu"), *(made.get("gpus") or ()), made.get("platform")) if each)


def _commits(made: Sequence[Json]) -> str:
    """Those that it was made at."""
    found = {
        f"commit {each['git_commit']}{' with changes' if each.get('git_dirty') else ''}"
        if each.get("git_commit") else "not from a checkout" for each in made
    }  # fmt: skip
    return ", ".join(sorted(found)) or "-"
