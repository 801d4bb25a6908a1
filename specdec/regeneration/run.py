"""The loop: what is left is asked, answers are kept as they come, and the data set is written when all are there."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from specdec.regeneration.journal import Journal
from specdec.regeneration.outcome import Outcome
from specdec.regeneration.progress import progress
from specdec.regeneration.rows import Row
from specdec.regeneration.talk import Answer, Found, Talk


class Engine(Protocol):
    """Whoever lets the target answer."""

    def answers(self, talks: Sequence[Talk]) -> Iterator[Found]:
        """Ask everything that is left to ask, in any order, and give every answer to its talk."""
        ...


def begin(rows: Sequence[Row], journal: Journal) -> Outcome:
    """Rows with the answers that they have already."""
    talks = [Talk(row) for row in rows if not row.skipped]
    for talk in talks:
        for answer in journal.answers.get(talk.row.id, []):
            talk.add(answer)
    return Outcome(rows, talks)


def go_on(outcome: Outcome, engine: Engine, journal: Journal) -> None:
    """Ask what is left, and keep it."""
    talks = {talk.row.id: talk for talk in outcome.talks}
    left = [talk for talk in outcome.talks if not talk.done]
    with progress(len(talks), len(talks) - len(left)) as tell:
        for found in engine.answers(left):
            journal.write(found)
            tell(talks[found.row].done, found.tokens if isinstance(found, Answer) else 0)
