"""A link in what a command writes again, and the command: what lies behind the link stays as it is.

One file or folder is drawn each time, moved elsewhere, and linked from its place, by a symbolic or a hard link; or a
name that a command takes for its claim or lock is linked to a file of somebody else. The exit status does not matter.
"""

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.faults import world
from benchmarks.faults.command import TRACEBACK, Command
from benchmarks.faults.world import World
from specdec.utils.reading import sha256


@dataclass(frozen=True)
class Folder:
    """What is written again.

    Args:
        links: how many, in a full campaign.
        source: a folder, of which a copy is used.
        claims: names, from the copy, of claims and locks that need not be there.
        argv: the command, by the copy.
    """

    links: int
    source: Path
    claims: tuple[str, ...]
    argv: Callable[[Path], list[str]]


@dataclass
class Count:
    """What became of the links in one folder: each is counted once."""

    artefact: str
    links: int = 0
    refused: int = 0
    succeeded: int = 0
    traceback: int = 0
    changed: int = 0  # behind the link
    findings: list[str] = field(default_factory=list)


def folders(a: World) -> dict[str, Folder]:
    """All of them by name."""
    more = str(world.STEPS + 4)
    found = {
        "run, gone on with": Folder(60, a.half, (".claimed",), a.fit),
        "run, made longer": Folder(60, a.run, (".claimed",), lambda copy: [
            *world.without(a.fit(copy), "trainer.max_steps"), "--trainer.max_steps", more]),
        "answers": Folder(40, a.answers, ("own.jsonl.journal",), lambda copy: a.regenerate(copy / "own.jsonl")),
        "features": Folder(40, a.features, (".lock",), lambda copy: ["cache", *a.model_and_data(), "--out", str(copy)]),
        "nothing yet": Folder(20, a.prompts, ("../.copy-2.claimed", "../copy-2/.claimed"), lambda copy: [
            "export", *a.pair(), "--out", str(copy.with_name("copy-2"))]),
    }  # fmt: skip
    if a.study.exists():
        found["study"] = Folder(40, a.study, ("jobs/.lock",), a.sweep)
    return found


def campaign(a: World, name: str, place: Path, share: float, seed: int = 0) -> Count:
    """Links in one folder; what became of them. ``share`` is of the links of a full campaign."""
    folder, draw, count = folders(a)[name], random.Random(f"{seed} {name}"), Count(name)
    place.mkdir(parents=True, exist_ok=True)
    for _ in range(max(1, round(folder.links * share))):
        shutil.rmtree(place)
        place.mkdir()
        copy = world.copied(folder.source, place / "copy")
        link, behind = _link(folder, copy, place / "elsewhere", draw)
        before = _content(behind)
        ended = Command(folder.argv(copy), cwd=a.folder).wait()
        count.links += 1
        what = "refused" if ended.status else "succeeded"
        if _content(behind) != before:
            what = "changed"
        elif TRACEBACK in ended.err or ended.status is None or ended.status < 0:
            what = "traceback"
        setattr(count, what, getattr(count, what) + 1)
        if what in ("changed", "traceback"):
            at = os.path.relpath(link, copy)
            count.findings.append(f"{what}: {at}: status {ended.status}: {ended.last}")
    shutil.rmtree(place)
    return count


def _link(folder: Folder, copy: Path, elsewhere: Path, draw: random.Random) -> tuple[Path, Path]:
    """Plant a link; where it lies, and what lies behind it."""
    elsewhere.mkdir()
    behind = elsewhere / "behind"
    entries = sorted(path for path in copy.rglob("*") if path.name not in folder.claims)
    if draw.random() < 0.3 or not entries:
        link = copy.parent / "copy" / draw.choice(folder.claims)
        link = Path(os.path.normpath(link))
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        behind.write_text("somebody's file\n")
    else:
        link = draw.choice(entries)
        link.rename(behind)
    if behind.is_file() and draw.random() < 0.3:
        os.link(behind, link)
    else:
        link.symlink_to(behind)
    return link, behind


def _content(path: Path) -> dict[str, Any]:
    """Every file of a file or folder with its hash and date."""
    files = [path, *sorted(path.rglob("*"))]
    return {
        str(file.relative_to(path)): (file.stat().st_mtime_ns, sha256(file))
        for file in files
        if file.is_file()
    }


def table(counts: list[dict[str, Any]]) -> list[str]:
    """Markdown."""
    names = ("links", "refused", "succeeded", "traceback", "changed")
    total = {name: sum(one[name] for one in counts) for name in names}
    rows = [
        [one["artefact"], *(str(one[name]) for name in names)]
        for one in [*counts, {"artefact": "all", **total}]
    ]
    return harness.table(
        ["folder", "links", "refused", "succeeded", "traceback", "changed behind"], rows
    )
