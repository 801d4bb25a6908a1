"""Benchmarks by name: where their rows are, in whose words they are asked, how long answers may be.

A set is found in a local folder, in a file that is given, or on the Hub at the revision that is pinned here. Rows are
known by what they ask: :data:`PUBLISHED` has the hashes of sets that papers measured on. Other rows are used too, and
the results say that they are others, with their hash.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
    files: tuple[str, ...] = ()  # what its file is called elsewhere, beside its own name
    layouts: tuple[str, ...] = ()  # of rows that are no turns yet: the papers' words
    where: str = ""  # to get a file from, where the Hub has none
    # DFlash's and DeepSpec's (https://github.com/deepseek-ai/DeepSpec, eval.py)
    max_new_tokens: int = 2048


# Of the Hub's sets at most the first 500 rows; DeepSpec takes 500 too, but draws them, and 256 of MBPP's.
SUITES: dict[str, Suite] = {
    "gsm8k": Suite(
        "GSM8K", "hub:openai/gsm8k@740312add88f781978c0658806c59bc2815b9866:main:test[:500]", layouts=("gsm8k_boxed",)
    ),
    "math500": Suite("MATH-500", "hub:HuggingFaceH4/MATH-500@6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be:default:test"),
    "aime25": Suite("AIME25", "hub:MathArena/aime_2025@c94da77eb22bbd6439e62a323bec18493a421302:default:train"),
    "mbpp": Suite(
        "MBPP", "hub:google-research-datasets/mbpp@4bb6404fdc6cacfda99d4ac4205087b89d32030c:sanitized:test"
    ),
    "humaneval": Suite(
        "HumanEval", "hub:openai/openai_humaneval@7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544:openai_humaneval:test",
        layouts=("humaneval_solution",),
    ),
    "livecodebench": Suite(
        "LiveCodeBench",
        "hub:livecodebench/code_generation_lite@0fe84c3912ea0c4d4a78037083943e8f0c4dd505:test*.jsonl:train[:500]",
    ),
    "mt_bench": Suite(
        "MT-bench", "hub:HuggingFaceH4/mt_bench_prompts@e3a795c5e9a82ee40611c416b8a7786c73198991:default:train",
        files=("mt-bench",),
    ),
    "alpaca": Suite(
        "Alpaca", "hub:tatsu-lab/alpaca@dce01c9b08f87459cf36a430d809084718273017:default:train[:500]",
        layouts=("alpaca_input",),
    ),
    "arena_hard": Suite(
        "Arena-Hard",
        "hub:lmarena-ai/arena-hard-auto@15f3746e21432264ce9b453999bde4f3c946d2e6:data/arena-hard-v2.0/question.jsonl:"
        "train[:500]",
        files=("arena-hard-v2",),
    ),
    "spec_bench": Suite(  # its own evaluation has 1024
        "Spec-Bench", where="https://github.com/hemingkx/Spec-Bench, data/spec_bench/question.jsonl",
        max_new_tokens=1024,
    ),
    "speed_bench": Suite(  # vllm bench has 4096
        "SPEED-Bench", files=("qualitative",), max_new_tokens=4096,
        where="nemo_skills/dataset/speed-bench/prepare.py of https://github.com/NVIDIA-NeMo/Skills, which writes it",
    ),
}  # fmt: skip
GROUPS = {
    # those of DeepSpec (Table 1 of DSpark) in its order
    "nine": (
        "gsm8k",
        "math500",
        "aime25",
        "mbpp",
        "humaneval",
        "livecodebench",
        "mt_bench",
        "alpaca",
        "arena_hard",
    ),
}


class Published(NamedTuple):
    """A set of rows that papers measured on."""

    suite: str
    what: str
    max_new_tokens: int  # theirs


# By :func:`rows_sha256`. EAGLE's files are in https://github.com/SafeAILab/EAGLE, eagle/data; its scripts have 1024.
PUBLISHED: dict[str, Published] = {
    "175cc79296cf42b6dba48d3ce58946f01ad28b3c3c79fb9037c03fb9190148c6":
        Published("mt_bench", "the 80 questions of MT-bench, two turns each", 1024),
    "7b4e88385c88f7d2390ed12887ef7a6271ccfc2f66ccf8d65bc9b2b4b774b74a":
        Published("humaneval", "EAGLE's 80 questions of HumanEval", 1024),
    "09abcdb226ea65f87b09cf9ea95326273f4c9ceabd1a6c3e99dc2195d8d6dbd1":
        Published("gsm8k", "EAGLE's 80 questions of GSM8K", 1024),
    "8497f7e1fc969911391fa55379f02cef68dcc978870a15062e0a09beae6fff36":
        Published("alpaca", "EAGLE's 80 questions of Alpaca", 1024),
    "38c40a6785ed720284a4766ed9e4236d073d32dec160f568bba0a0dddd03aff6":
        Published("gsm8k", "the 1,319 rows of GSM8K's test set, in DFlash's words", 2048),
}  # fmt: skip


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
    """SHA-256 of the texts that are asked, in their order, whatever the file, its ids and its categories are."""
    asked = [prompt.turns or prompt.messages or prompt.text for prompt in prompts]
    return hashlib.sha256(json.dumps(asked, ensure_ascii=False).encode()).hexdigest()
