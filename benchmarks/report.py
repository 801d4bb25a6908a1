"""What dated reports have in common: their files, the conditions of the run, and tables."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table


def places(out: Path, force: bool) -> tuple[Path, Path]:
    """The Markdown file and the JSON beside it.

    Raises:
        ValueError: not a ``.md`` path, or one of the two exists and ``force`` is false.
    """
    if out.suffix != ".md":
        raise ValueError(f"--out {out} must end in .md: the raw figures go to a .json beside it")
    both = out, out.with_suffix(".json")
    for path in both:
        if path.exists() and not force:
            raise ValueError(f"{path} exists already: choose another --out, or add --force")
    return both


def versions(found: Iterable[Mapping[str, str]], others: str) -> dict[str, str]:
    """Of the packages in every process; where a later one has another version, it is ``others``' own."""
    out: dict[str, str] = {}
    for each in found:
        for name, version in each.items():
            out[f"{name} ({others})" if out.get(name, version) != version else name] = version
    return out


def conditions(about: Mapping[str, Any], versions: Mapping[str, str], more: str = "") -> list[str]:
    """Lines of what :func:`benchmarks.machine.machine` found, with the load at the end too; ``more`` ends the last."""
    software = [f"Python {about['python']}", *(f"{name} {v}" for name, v in sorted(versions.items()))]
    return [
        f"- Command: `{about['command']}`",
        f"- Machine: {about['cpu']}, {about['cores']} cores, {about['threads']} thread{'s'[about['threads'] == 1 :]}, "
        f"{about['memory_gb']} GB; {about['platform']}",
        f"- Software: {', '.join(software)}",
        f"- Commit: {about['git_commit']}{', with changes' if about['git_dirty'] else ''}",
        f"- Load average at the start {about['load_at_start']}, at the end {about['load_at_end']}{more}.",
    ]


def rows(columns: Sequence[str], lines: Iterable[Sequence[str]], words: int) -> list[str]:
    """A table in Markdown; all but the first ``words`` columns are figures."""
    rule = "|---" * words + "|---:" * (len(columns) - words) + "|"
    return ["| " + " | ".join(columns) + " |", rule, *("| " + " | ".join(line) + " |" for line in lines)]


def table(columns: Sequence[str], lines: Iterable[Sequence[str]], words: int, title: str) -> Table:
    """The same for the terminal."""
    out = Table(*columns, title=title, title_justify="left")
    for column in out.columns[words:]:
        column.justify = "right"
    for line in lines:
        out.add_row(*line)
    return out
