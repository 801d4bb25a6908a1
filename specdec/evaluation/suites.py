"""Benchmarks by name: where their rows are, in whose words they are asked, how long answers may be.

``suites.yaml`` lists them. A set is found in a local folder, in a file that is given, or on the Hub at the revision
that is pinned there. Rows are known by what they ask: :data:`PUBLISHED` has the hashes of sets that papers measured on.
Other rows are used too, and the results say that they are others, with their hash.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from specdec.data.layouts import PROMPTS, layouts_named
from specdec.data.rows import HUB, ROW_FILES, has_rows, read_rows
from specdec.evaluation.prompts import Prompt, load_prompts

TEMPERATURES = (0.0, 1.0)
"""What papers draw at, from EAGLE (https://arxiv.org/abs/2401.15077) to those of 2026."""


class Suite(NamedTuple):
    """One set of prompts."""

    title: str  # as papers head its column
    # hub:REPOSITORY@REVISION:CONFIG:SPLIT; None where the Hub has no rows that can be asked
    hub: str | None = None
    files: Sequence[str] = ()  # what its file is called elsewhere, beside its own name
    layouts: Sequence[str] = ()  # of rows that are no turns yet: the papers' words
    where: str = ""  # to get a file from, where the Hub has none
    # DFlash's and DeepSpec's (https://github.com/deepseek-ai/DeepSpec, eval.py)
    max_new_tokens: int = 2048


class Published(NamedTuple):
    """A set of rows that papers measured on."""

    suite: str
    what: str
    max_new_tokens: int  # theirs


_TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
SUITES = {name: Suite(**suite) for name, suite in _TABLES["suites"].items()}
GROUPS: dict[str, list[str]] = _TABLES["groups"]
PUBLISHED = {digest: Published(**rows) for digest, rows in _TABLES["published"].items()}
"""By :func:`rows_sha256`."""


class FoundSuite(NamedTuple):
    """A suite with its rows."""

    name: str
    source: str  # what :func:`specdec.evaluation.prompts.load_prompts` reads
    layouts: list[str]  # that it takes besides
    max_new_tokens: int
    rows_sha256: str
    published: str | None  # whose rows these are; None where they are not known to be anybody's

    @property
    def title(self) -> str:
        """The name by which papers head its column."""
        return SUITES[self.name].title

    def notes(self) -> list[str]:
        """See :func:`suite_notes`."""
        return suite_notes(self.facts())

    def facts(self) -> dict[str, Any]:
        """Return what results say of it, JSON-ready."""
        return {
            "name": self.name, "title": self.title, "source": self.source, "rows_sha256": self.rows_sha256,
            "published": self.published,
        }  # fmt: skip


def find_suites(asked: Sequence[str], directory: Path | None) -> list[FoundSuite]:
    """The suites by their names, those of a group in its place, with their rows read once.

    Args:
        asked: NAME of a suite or a group, or NAME=FILE for a suite whose rows are in that file.
        directory: where the files of all others are; None takes them from the Hub.

    Raises:
        ValueError: a name is unknown or given twice, or rows are not to be had.
    """
    files: dict[str, str] = {}
    for entry in asked:
        name, path, file = entry.partition("=")
        names = GROUPS.get(name, (name,))
        if unknown := [suite for suite in names if suite not in SUITES]:
            raise ValueError(f"suite {unknown[0]!r}: choose of {', '.join([*SUITES, *GROUPS])}")
        if path and (name in GROUPS or not file):
            raise ValueError(f"suite {entry!r}: write NAME=FILE, with the name of one set")
        for suite in names:
            if suite in files:
                raise ValueError(f"suite {suite} is asked for twice")
            files[suite] = file
    # all, before any is read
    places = {name: file or _place(name, directory) for name, file in files.items()}
    return [_found(name, place) for name, place in places.items()]


def _place(name: str, directory: Path | None) -> str:
    """The file of a suite in a folder: NAME.jsonl (.ndjson, .jsonlines), .json or .parquet, or NAME/question.jsonl as
    EAGLE has them; without a folder the rows on the Hub."""
    suite = SUITES[name]
    if directory is None:
        if suite.hub is None:
            raise ValueError(
                f"suite {name}: the Hub has no rows that can be asked; give {name}=FILE ({suite.where})"
            )
        return suite.hub
    if not directory.is_dir():
        raise ValueError(f"suite_dir {directory}: there is no such directory")
    names = (name, *suite.files)
    files = [f"{stem}{ending}" for stem in names for ending in (*ROW_FILES, "/question.jsonl")]
    present = [directory / file for file in files if (directory / file).is_file()]
    if len(present) != 1:
        what = (
            f"there are {' and '.join(map(str, present))}"
            if present
            else f"there is no {files[0]} in {directory}"
        )
        instead = "" if suite.hub is None else ", or leave --suite_dir out for the Hub's rows"
        raise ValueError(f"suite {name}: {what}; give {name}=FILE{instead}")
    return str(present[0])


def _found(name: str, source: str) -> FoundSuite:
    if not has_rows(source):
        raise ValueError(
            f"suite {name}: {source} must be {', '.join(ROW_FILES)} or {HUB}REPOSITORY:CONFIG:SPLIT"
        )
    words = layouts_named(SUITES[name].layouts, PROMPTS)
    first = next(iter(read_rows(source)), None)
    # not of turns
    layouts = [layout.name for layout in words if first is not None and layout.fits(first.values)]
    digest = rows_sha256(load_prompts([source], layouts=layouts))
    known = PUBLISHED.get(digest)
    if known and known.suite != name:
        raise ValueError(f"suite {name}: {source} holds {known.what}, which is suite {known.suite}")
    pinned = SUITES[name].hub if source == SUITES[name].hub else None
    published = known.what if known else pinned
    tokens = known.max_new_tokens if known else SUITES[name].max_new_tokens
    return FoundSuite(name, source, layouts, tokens, digest, published)


def suite_notes(facts: Mapping[str, Any]) -> list[str]:
    """A line about a suite's rows, of its :meth:`FoundSuite.facts`."""
    rows = (
        facts["published"]
        or "rows that are not known as published: others than papers measured on, or edited"
    )
    return [f"{facts['title']}: {rows} (SHA-256 {facts['rows_sha256'][:12]})."]


def rows_sha256(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of the texts and tools that are asked, in their order, whatever the file, its ids and categories are."""
    asked: list[Any] = []
    for prompt in prompts:
        texts = prompt.turns or prompt.messages or prompt.text
        asked.append([texts, prompt.tools] if prompt.tools else texts)
    return hashlib.sha256(json.dumps(asked, ensure_ascii=False).encode()).hexdigest()
