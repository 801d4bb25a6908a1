"""A disk that fills up, two commands in one folder, and a folder deleted while a command writes: nothing is lost.

Whatever happens is told in one line, and the same command ends well afterwards, with what an undisturbed one makes.
"""

import contextlib
import os
import random
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.faults import world
from benchmarks.faults.command import PATIENCE, TRACEBACK, Command, Ended, Inside
from benchmarks.faults.inputs import LINES
from benchmarks.faults.world import Made, World

SHARES = (0.1, 0.4, 0.7, 0.95)  # of what a command writes: so large is the disk
SPARE = 1 << 30  # bytes of a disk that is large enough


@dataclass
class Count:
    """What became of one command."""

    command: str
    what: str
    tries: int = 0
    ended_well: int = 0  # nothing was disturbed: it was too late, or the other one waited
    refused: int = 0  # in one line, or three
    traceback: int = 0
    wordy: int = 0
    lost: int = 0  # the same command again failed, or made something else
    findings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Writer:
    """A command that writes, and what must be equal of it; ``goes_on`` with what is there, and has nothing against it
    when that is all: of two at once both may end well then."""

    argv: Callable[[Path], list[str]]
    made: Callable[[Path], Made]
    goes_on: bool = False


def beside(out: Path) -> Path:
    """Of a run whose logger alone writes into ``out``, its own folder, on another disk."""
    return Path(f"{out.parent}-{out.name}")


def writers(a: World) -> dict[str, Writer]:
    """All of them."""
    files = world.of_files("config.json", "model.safetensors")
    return {
        "export": Writer(lambda out: ["export", *a.pair(), "--out", str(out)], files),
        "import": Writer(a.imported, files),
        "evaluate": Writer(a.evaluate, world.of_evaluation),
        "regenerate": Writer(lambda out: a.regenerate(out / "own.jsonl"), world.of_files("own.jsonl"), True),
        "cache": Writer(lambda out: ["cache", *a.model_and_data(), "--out", str(out)],
                        world.of_files("index.json", "*.safetensors"), True),
        "fit": Writer(a.fit, world.of_fit, True),
        "TensorBoard": Writer(lambda out: a.fit(beside(out), "--trainer.logger", "TensorBoardLogger",
                                                "--trainer.logger.save_dir", str(out), "--allow_keys", "save_dir"),
                              lambda out: world.of_fit(beside(out)), True),
    }  # fmt: skip


@contextlib.contextmanager
def disk(place: Path, size: int) -> Iterator[tuple[Inside | None, Callable[[], None]]]:
    """A file system of so many bytes at ``place``, and what enlarges it. Who may not mount one gets a limit of the size
    of every file instead, for the command that is given the first of the two."""
    place.mkdir(parents=True)
    page = resource.getpagesize()
    options = f"size={max(size, page) // page * page}"
    with open(os.devnull, "w") as silent:
        mounted = not subprocess.call(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], stderr=silent
        )

    def limited() -> Callable[[], Any]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))
        return lambda: None

    def enlarge() -> None:
        if mounted:
            subprocess.check_call(["mount", "-o", f"remount,size={SPARE}", str(place)])

    try:
        yield None if mounted else limited, enlarge
    finally:
        if mounted:
            subprocess.check_call(["umount", "-l", str(place)])
        shutil.rmtree(place, ignore_errors=True)


def campaign(a: World, what: str, place: Path, share: float, seed: int = 0) -> list[Count]:
    """``disk full``, ``two at once`` or ``deleted`` for every command that writes; in part of a campaign for some."""
    tries = max(1, round(len(SHARES) * share))
    counts = []
    for name, writer in list(writers(a).items())[: None if share == 1 else 3]:
        count, here = Count(name, what), place / name
        here.mkdir(parents=True)
        begin = time.monotonic()
        Command(writer.argv(here / "whole"), cwd=a.folder).wait()
        seconds, reference = time.monotonic() - begin, writer.made(here / "whole")
        size = sum(path.stat().st_size for path in (here / "whole").rglob("*") if path.is_file())
        draw = random.Random(f"{seed} {what} {name}")
        for number in range(tries):
            count.tries += 1
            if what == "disk full":
                _full(
                    a,
                    writer,
                    count,
                    here / f"{number}",
                    int(size * SHARES[-1 - number % len(SHARES)]),
                    reference,
                )
            elif what == "two at once":
                _two(a, writer, count, here / f"{number}" / "out", draw.random() * 0.2, reference)
            else:
                _deleted(
                    a,
                    writer,
                    count,
                    here / f"{number}" / "out",
                    draw.random() * seconds / 4,
                    reference,
                )
        counts.append(count)
        harness.tell(f"{what}: {name}, {len(count.findings)} findings")
    return counts


def _full(a: World, writer: Writer, count: Count, place: Path, size: int, reference: Made) -> None:
    with disk(place, size) as (inside, enlarge):
        _told(
            count,
            Command(writer.argv(place / "out"), cwd=a.folder, inside=inside).wait(),
            f"{size} bytes",
        )
        enlarge()
        _again(a, writer, count, place / "out", reference)


def _two(a: World, writer: Writer, count: Count, out: Path, pause: float, reference: Made) -> None:
    out.parent.mkdir()
    first = Command(writer.argv(out), cwd=a.folder)
    time.sleep(pause)
    both = [Command(writer.argv(out), cwd=a.folder).wait(), first.wait()]
    for ended in both:
        _told(count, ended, f"{pause:.2f} s apart")
    if all(ended.status != 0 for ended in both):
        count.lost += 1
        count.findings.append(f"both failed: {both[0].last} / {both[1].last}")
    elif not writer.goes_on and all(ended.status == 0 for ended in both):
        count.lost += 1
        count.findings.append("both ended well: the second has written over what the first made")
    elif _missing(writer, out, reference):
        count.lost += 1
        count.findings.append("what they made is not what one makes")


def _deleted(
    a: World, writer: Writer, count: Count, out: Path, pause: float, reference: Made
) -> None:
    out.parent.mkdir()
    command = Command(writer.argv(out), cwd=a.folder)
    command.until(lambda: out.exists() or any(out.parent.glob(".tmp-*")))
    end = time.monotonic() + pause
    command.until(lambda: time.monotonic() > end)
    late = not _missing(writer, out, reference)  # all was done: who deletes it then wants it gone
    for path in [out, *out.parent.glob(".tmp-*")]:
        shutil.rmtree(path, ignore_errors=True)
    ended = command.wait()
    _told(count, ended, f"after {pause:.2f} s")
    if not late and ended.status == 0 and (missing := _missing(writer, out, reference)):
        count.lost += 1
        count.findings.append(f"status 0 after it was deleted, without {', '.join(missing)}")
    _again(a, writer, count, out, reference)


def _told(count: Count, ended: Ended, when: str) -> None:
    crashed = TRACEBACK in ended.err or ended.status is None or ended.status < 0
    wordy = ended.status != 0 and len(ended.error_lines) > LINES
    faults = [name for name, is_so in (("traceback", crashed), ("wordy", wordy)) if is_so]
    for name in faults:
        setattr(count, name, getattr(count, name) + 1)
    if faults:
        count.findings.append(
            f"{', '.join(faults)}: {when}: status {ended.status}, {len(ended.lines)} lines: {ended.last}"
        )
    elif ended.status == 0:
        count.ended_well += 1
    else:
        count.refused += 1


def _again(a: World, writer: Writer, count: Count, out: Path, reference: Made) -> None:
    """The same command must end well; one that says that its work is there is believed if it is."""
    ended = Command(writer.argv(out), cwd=a.folder).wait(PATIENCE)
    if _missing(writer, out, reference):
        count.lost += 1
        count.findings.append(
            f"the same command again: status {ended.status}: {ended.last or 'something else made'}"
        )


def _missing(writer: Writer, out: Path, reference: Made) -> list[str]:
    """What is not there as an undisturbed command makes it."""
    try:
        made = dict(writer.made(out))
    except (OSError, ValueError):
        made = {}
    return [name for name, value in reference.items() if made.get(name) != value]


def table(counts: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown."""
    names = ("tries", "ended_well", "refused", "traceback", "wordy", "lost")
    columns = [
        "what",
        "command",
        "tries",
        "ended well",
        "refused",
        "traceback",
        f"over {LINES} lines",
        "lost",
    ]
    rows = [[one["what"], one["command"], *(str(one[name]) for name in names)] for one in counts]
    return harness.table(columns, rows, words=2)
