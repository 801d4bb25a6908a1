"""One flipped bit in a file, and the file's next use: it is named in an error, or changes nothing; never silent."""

import os
import random
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.faults import world
from benchmarks.faults.command import LIMIT, TRACEBACK, Command, Ended, finish
from benchmarks.faults.world import Made, World


@dataclass(frozen=True)
class Artefact:
    """What is flipped, and used.

    Args:
        flips: how many, in a full campaign.
        source: a folder.
        files: patterns of its files; one is drawn each time, then one of its bits.
        argv: its next use, by the flipped copy and where to write.
        made: of the copy and what was written the parts that must be equal, unless the file is named.
        prepare: what is done to a copy before the flip, as a kill would.
    """

    flips: int
    source: Path
    files: tuple[str, ...]
    argv: Callable[[Path, Path], list[str]]
    made: Callable[[Path, Path], Made]
    prepare: Callable[[Path], None] = lambda copy: None


@dataclass
class Count:
    """What became of the flips of one artefact: each is counted once."""

    artefact: str
    flips: int = 0
    named: int = 0  # an error that names the file
    folder: int = 0  # an error that names its folder
    identical: int = 0  # what the use made is that of the whole file
    unnamed: int = 0  # an error that names neither
    traceback: int = 0
    hung: int = 0
    silent: int = 0  # status 0, and something else was made
    findings: list[str] = field(default_factory=list)


def artefacts(a: World) -> dict[str, Artefact]:
    """All of them by name."""

    def begin(copy: Path) -> None:
        """Let the whole target answer, once: the journal knows it by its place, too."""
        if not (begun := copy.parent / "begun").exists():
            finish(a.regenerate(begun / "own.jsonl", target=copy), a.folder)

    def go_on(out: Path, target: Path) -> list[str]:
        world.cut_journal(world.copied(target.parent / "begun", out))
        return a.regenerate(out / "own.jsonl", target=target)

    def keep_there(copy: Path) -> None:
        """Let every later command of this process keep its tokens in the copy."""
        os.environ["SPECDEC_CACHE"] = str(copy)

    half = lambda copy, out: a.fit(copy)  # noqa: E731
    export = world.of_files("config.json", "model.safetensors")
    weights = ("drafter/*",)
    return {
        "drafter": Artefact(
            150, a.drafter, ("*",), lambda copy, out: ["export", *a.pair(drafter=copy), "--out", str(out)],
            lambda copy, out: export(out),
        ),
        "target, with its drafter": Artefact(
            100, a.target, ("*",), lambda copy, out: a.evaluate(out, target=copy),
            lambda copy, out: world.of_evaluation(out),
        ),
        "target, with answers begun": Artefact(
            100, a.target, ("*",), lambda copy, out: go_on(out, copy),
            lambda copy, out: world.of_files("own.jsonl")(out), begin,
        ),
        "run, gone on with": Artefact(
            80, a.half, ("*.yaml", "*.json", "losses.txt", "SHA256SUMS"), half, lambda copy, out: world.of_fit(copy)
        ),
        "checkpoint": Artefact(100, a.half, ("checkpoints/*",), half, lambda copy, out: world.of_fit(copy)),
        "run, exported": Artefact(
            100, a.run, ("*.yaml", "*.json", "losses.txt", "SHA256SUMS", *weights),
            lambda copy, out: ["export", *a.pair(drafter=copy / "drafter"), "--out", str(out)],
            lambda copy, out: {**export(out), **_told(out)},
        ),
        "journal": Artefact(
            100, a.answers, ("*.journal",), lambda copy, out: a.regenerate(copy / "own.jsonl"),
            lambda copy, out: world.of_files("own.jsonl")(copy), world.cut_journal,
        ),
        "evaluation": Artefact(
            150, a.one, ("*.json", "*.jsonl", "SHA256SUMS"), lambda copy, out: ["compare", str(copy), str(a.two)],
            lambda copy, out: {},
        ),
        "evaluation, with a table": Artefact(
            100, a.one, ("*.json", "*.jsonl", "table.tex", "SHA256SUMS"),
            lambda copy, out: ["compare", str(copy), str(a.two)], lambda copy, out: {},
            lambda copy: finish(["table", "--runs", str(copy), "--out", str(copy)], a.folder) and None,
        ),
        "features": Artefact(
            80, a.features, ("*.json", "*.safetensors"), lambda copy, out: a.fit(out, *a.cached(copy)),
            lambda copy, out: world.of_fit(out),
        ),
        "tokens and rows": Artefact(
            150, a.tokens, ("*/*/*",), lambda copy, out: a.fit(out), lambda copy, out: world.of_fit(out), keep_there,
        ),
        "export": Artefact(
            150, a.export, ("*.json", "*.safetensors", "SHA256SUMS"),
            lambda copy, out: a.imported(out, copy),
            lambda copy, out: export(out),
        ),
        "study": Artefact(
            80, a.study,
            ("*.yaml", "*.json", "jobs/*/*.yaml", "jobs/*/*.jsonl", "fits/*/*.yaml", "fits/*/*.json",
             "fits/*/losses.txt", "fits/*/drafter/*", "measures/*/*.json", "measures/*/*.jsonl",
             "SHA256SUMS", "*/*/SHA256SUMS"),
            lambda copy, out: ["sweep", str(copy), "--card_only"], lambda copy, out: world.of_card(copy),
        ),
    }  # fmt: skip


def _told(export: Path) -> Made:
    """What an export tells of its training, in the card too."""
    from specdec.utils.reading import read_json

    told = read_json(export / "specdec.json")
    return {"training": str(told.get("training")), "evaluations": str(told.get("evaluations"))}


def campaign(a: World, name: str, place: Path, share: float, seed: int = 0) -> Count:
    """Flips of one artefact; what became of them. ``share`` is of the flips of a full campaign."""
    one, draw, count = artefacts(a)[name], random.Random(f"{seed} {name}"), Count(name)
    place.mkdir(parents=True, exist_ok=True)
    ended, made = _use(one, a, place, lambda copy: None)
    if ended.status != 0:
        raise ValueError(f"{name}: status {ended.status} with nothing flipped: {ended.last}")
    reference = made() | {"said": ended.out} if name.startswith("evaluation") else made()
    for number in range(max(1, round(one.flips * share))):
        flipped: list[tuple[Path, int]] = []
        ended, made = _use(
            one, a, place, lambda copy, flipped=flipped: flipped.append(_flip(one, copy, draw))
        )
        ((file, bit),) = flipped
        what = _outcome(ended, file, place / "copy", reference, made, name)
        count.flips += 1
        setattr(count, what, getattr(count, what) + 1)
        if what not in ("named", "folder", "identical"):
            at = f"{file.relative_to(place / 'copy')}, bit {bit}"
            count.findings.append(f"{what}: {at}: status {ended.status}: {ended.last}")
        if number % 25 == 24:
            harness.tell(f"flips of {name}: {number + 1}, {count.silent} silent")
    shutil.rmtree(place)
    return count


def _use(
    one: Artefact, a: World, place: Path, change: Callable[[Path], None]
) -> tuple[Ended, Callable[[], dict[str, str]]]:
    copy, out = world.copied(one.source, place / "copy"), place / "out"
    shutil.rmtree(out, ignore_errors=True)
    one.prepare(copy)
    change(copy)
    return Command(one.argv(copy, out), cwd=a.folder).wait(LIMIT), lambda: dict(one.made(copy, out))


def _flip(one: Artefact, copy: Path, draw: random.Random) -> tuple[Path, int]:
    files = sorted(
        {file for pattern in one.files for file in copy.glob(pattern) if file.stat().st_size}
    )
    file = draw.choice(files)
    data = bytearray(file.read_bytes())
    bit = draw.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)
    return file, bit


def _outcome(
    ended: Ended,
    file: Path,
    copy: Path,
    reference: Mapping[str, str],
    made: Callable[[], dict[str, str]],
    name: str,
) -> str:
    if ended.status is None:
        return "hung"
    if TRACEBACK in ended.err or ended.status < 0:
        return "traceback"
    if ended.status != 0:
        told = ended.err
        if name.startswith("target") and re.search(
            r"target\.(fingerprint|template)|chat template", told
        ):
            return "named"  # by what of the target is another
        return "named" if file.name in told else "folder" if str(copy) in told else "unnamed"
    try:
        found = made() | {"said": ended.out} if name.startswith("evaluation") else made()
    except (OSError, ValueError, KeyError):
        return "silent"  # success, and nothing that can be read
    return "identical" if found == reference else "silent"


def table(counts: list[dict[str, Any]]) -> list[str]:
    """Markdown."""
    names = ("flips", "named", "folder", "identical", "unnamed", "traceback", "hung", "silent")
    columns = [
        "artefact",
        "flips",
        "named",
        "its folder named",
        "identical",
        "neither named",
        *names[5:],
    ]
    total = {name: sum(one[name] for one in counts) for name in names}
    return harness.table(columns, [[one["artefact"], *(str(one[n]) for n in names)] for one in [
        *counts, {"artefact": "all", **total}
    ]])  # fmt: skip
