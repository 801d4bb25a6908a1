"""Published acceptance lengths: every entry names its source, and the page has the table of the file."""

import itertools
import json
from pathlib import Path
from typing import Any

STUDIES = Path(__file__).parents[1] / "docs" / "studies"
ENTRIES: list[dict[str, Any]] = json.loads((STUDIES / "published.json").read_text())
KEYS = {
    "method", "target", "suite", "drafts", "temperature", "acceptance_length", "counts_bonus", "source",
}  # fmt: skip
HEAD = """\
| method | target | drafts | temperature | acceptance length | bonus token | source |
|---|---|---|---|---|---|---|
"""


def setting(entry: dict[str, Any]) -> list[str]:
    """What the entries of one row share."""
    bonus = {True: "counted", False: "not counted", None: "not stated"}[entry["counts_bonus"]]
    temperature = entry["temperature"]
    return [
        entry["method"],
        entry["target"],
        entry["drafts"] or "not stated",
        "not stated" if temperature is None else f"{temperature:g}",
        bonus,
        entry["source"],
    ]


def number(length: float) -> str:
    """At least two decimals, and all that the file has."""
    return max(f"{length:.2f}", f"{length:g}", key=len)


def table(entries: list[dict[str, Any]]) -> str:
    """A row for every setting, with its suites side by side, in the order of the file."""
    rows = []
    for (*design, bonus, source), members in itertools.groupby(entries, setting):
        lengths = ", ".join(f"{one['suite']} {number(one['acceptance_length'])}" for one in members)
        rows.append("| " + " | ".join([*design, lengths, bonus, source]) + " |\n")
    return HEAD + "".join(rows)


def faults(entries: list[dict[str, Any]]) -> list[str]:
    """Entries with a missing key or source, a length that is none, or the place of another."""
    places = [(*setting(entry), entry["suite"]) for entry in entries]
    return [
        f"{entry['method']}, {entry['target']}, {entry['suite']}"
        for entry, place in zip(entries, places, strict=True)
        if entry.keys() != KEYS
        or not entry["source"].strip()
        or not entry["suite"].strip()
        or not 1 < entry["acceptance_length"] < 20
        or places.count(place) > 1
    ]


def test_every_entry_has_a_source_and_a_length() -> None:
    assert len(ENTRIES) > 20 and faults(ENTRIES) == []


def test_the_page_has_the_table_of_the_file() -> None:
    page = (STUDIES / "README.md").read_text()
    assert table(ENTRIES) in page
    assert page.count(HEAD) == 1 and table(ENTRIES) + "\n" in page


def test_a_missing_source_and_another_length_are_found() -> None:
    first, *rest = ENTRIES
    assert faults([first | {"source": " "}, *rest]) and faults([first, *ENTRIES])
    page = (STUDIES / "README.md").read_text()
    assert table([first | {"acceptance_length": 5.15}, *rest]) not in page
