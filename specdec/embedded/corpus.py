"""The text of the embedded target: the Python standard library's own sources, found on this machine."""

import hashlib
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

HELD_OUT_PERCENT = 5
LEAST_CHARACTERS = 500
MOST_CHARACTERS = 500_000
LEAST_PROSE = 0.7  # share of letters and white space: tables of numbers and of escapes lie below

_SKIPPED_FOLDERS = frozenset(
    {"dist-packages", "encodings", "idle_test", "lib2to3", "pydoc_data", "site-packages", "test", "tests"}
)
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")  # written by the build of this interpreter


class Source(NamedTuple):
    """One file: its path below the standard library, with forward slashes, and its text."""

    path: str
    text: str


class Corpus(NamedTuple):
    """Files to train on and files never trained on, each sorted by path."""

    train: list[Source]
    held_out: list[Source]

    def record(self) -> list[dict[str, Any]]:
        """What was used: split, path, SHA-256 and length of every file."""
        return [
            {
                "path": source.path,
                "split": split,
                "sha256": hashlib.sha256(source.text.encode()).hexdigest(),
                "characters": len(source.text),
            }
            for split, sources in (("train", self.train), ("held_out", self.held_out))
            for source in sources
        ]


def corpus(seed: int) -> Corpus:
    """Read the standard library and split it by file.

    A file is held out by a hash of ``seed`` and its path, so the split does not move when other files come or go.
    Tests, generated tables, tiny files and files that are not UTF-8 are left out.

    Raises:
        ValueError: this Python comes without the sources of its standard library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    sources = [source for path in sorted(root.rglob("*.py")) if (source := _read(root, path)) is not None]
    sources.sort()
    train = [source for source in sources if not _held_out(seed, source.path)]
    held_out = [source for source in sources if _held_out(seed, source.path)]
    if not train or not held_out:
        raise ValueError(
            f"{root}: found {len(sources)} usable *.py files of the standard library, too few for a corpus; "
            "this Python keeps it zipped or stripped: use one installed with its sources"
        )
    return Corpus(train, held_out)


def _read(root: Path, path: Path) -> Source | None:
    relative = path.relative_to(root)
    if not _SKIPPED_FOLDERS.isdisjoint(relative.parts):
        return None
    if any(part.startswith(_SKIPPED_PREFIXES) for part in relative.parts):
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):  # a file in another encoding, or a dangling link
        return None
    if not LEAST_CHARACTERS <= len(text) <= MOST_CHARACTERS:
        return None
    prose = sum(character.isalpha() or character.isspace() for character in text)
    return Source(relative.as_posix(), text) if prose >= LEAST_PROSE * len(text) else None


def _held_out(seed: int, path: str) -> bool:
    digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < HELD_OUT_PERCENT
