"""What became of all rows: the data set that is written, and the record beside it."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from specdec.files import sha256, staged, write_json
from specdec.regeneration.rows import Row
from specdec.regeneration.talk import Talk

FORMAT = "specdec.regeneration.v1"
Truncated = Literal["drop", "keep"]


class Outcome(NamedTuple):
    """All rows of the input, in its order, and the talks of those that are asked."""

    rows: Sequence[Row]
    talks: Sequence[Talk]

    def kept(self, truncated: Truncated) -> Iterator[Talk]:
        """Those that become data."""
        return (talk for talk in self.talks if not talk.failed and (truncated == "keep" or not talk.truncated))

    def failed_share(self) -> float:
        """Of the rows that were asked."""
        return sum(talk.failed is not None for talk in self.talks) / max(1, len(self.talks))

    @property
    def tokens(self) -> int:
        """Generated, of all answers that are there."""
        return sum(answer.tokens for talk in self.talks for answer in talk.answers)

    def counts(self, truncated: Truncated) -> dict[str, int]:
        """Rows by what became of them; done, truncated, failed and skipped are all."""
        failed = sum(talk.failed is not None for talk in self.talks)
        cut_off = sum(not talk.failed and talk.truncated for talk in self.talks)
        return {
            "rows": len(self.rows),
            "done": len(self.talks) - failed - cut_off,
            "truncated": cut_off,
            "failed": failed,
            "skipped": len(self.rows) - len(self.talks),
            "written": sum(1 for _ in self.kept(truncated)),
            "cut_before_a_tool_call": sum(talk.row.cut for talk in self.talks),
        }

    def record(self, truncated: Truncated) -> dict[str, Any]:
        """Counts, reasons and tokens, JSON-ready."""
        answers = [answer for talk in self.talks for answer in talk.answers]
        known = [answer.read_back for answer in answers if answer.read_back is not None]
        return {
            "counts": self.counts(truncated),
            "failed": {talk.row.id: f"{talk.row.place}: {talk.failed.reason}" for talk in self.talks if talk.failed},
            "skipped": dict(Counter(row.skipped for row in self.rows if row.skipped)),
            "answers": {
                "number": len(answers),
                "empty": sum(not answer.text for answer in answers),
                "tokens": self.tokens,
                "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
                "read_back_as_other_tokens": len(known) - sum(known) if known else None,
            },
            "truncated": truncated,
        }


def record_of(out: Path) -> Path:
    """Where the record of a data set lies."""
    return out.with_suffix(".json")


def write(outcome: Outcome, out: Path, truncated: Truncated, more: dict[str, Any]) -> dict[str, Any]:
    """Write the data set, in the input's order, and then its record, which is returned.

    Raises:
        ValueError: the disk is full, or a file may not be written.
    """
    with staged(out) as temporary, temporary.open("w", encoding="utf-8") as stream:
        for talk in outcome.kept(truncated):
            stream.write(json.dumps(talk.result(), ensure_ascii=False) + "\n")
    record = {"format": FORMAT, "file": out.name, "sha256": sha256(out), **outcome.record(truncated), **more}
    write_json(record_of(out), record)
    return record
