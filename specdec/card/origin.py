"""Where a card's numbers come from, and the command that trains an arm again."""

import shlex
from collections.abc import Sequence
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
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items() if version)
    fits = [run["fit"]["provenance"] for runs in manifest["runs"].values() for run in runs.values()]
    rows = [["Trained", _commits([each for each in fits if each])],
            ["Study's command", (manifest["plan_provenance"] or {}).get("command", "-")],
            ["Card made", f"{made['date']}, {_commits([made])}"], ["Card's command", made["command"]],
            ["Versions", versions],
            ["Python", made["python"]], ["Machine", f"{made['cpu']}, {made['platform']}"],
            ["SHA-256 of the study", manifest["study_sha256"] or "-"],
            ["SHA-256 of the prompts", manifest["prompts_sha256"] or "-"],
            ["Inputs", f"{len(manifest['inputs'])} files, their SHA-256 in card.json"]]  # fmt: skip
    out.append(Grid(["What", "Value"], rows, left=2))
    first = next(((arm, seed) for arm, runs in manifest["runs"].items() for seed in runs), None)
    if first:
        line = shlex.join(["specdec", "reproduce", where, "--arm", first[0], "--seed", first[1]])
        out += [Text("An arm is trained again, and its losses compared bit by bit, by"), Command(line)]
    return out


def _commits(made: Sequence[Json]) -> str:
    """Those that it was made at."""
    found = {
        f"commit {each['git_commit']}{' with changes' if each.get('git_dirty') else ''}"
        if each.get("git_commit") else "not from a checkout" for each in made
    }  # fmt: skip
    return ", ".join(sorted(found)) or "-"
