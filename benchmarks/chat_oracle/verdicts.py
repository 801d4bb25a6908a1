"""What specdec supervises in each cell of the table, beside what the oracle expects."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from benchmarks.chat_oracle.conversations import KINDS, Row
from benchmarks.chat_oracle.expected import Choice, Expected, expect
from benchmarks.chat_oracle.tokenizers import stops_of, tokenizer_of, twin_of
from specdec.data.chat import Report, conversation, encode
from specdec.data.rows import DataRow

LENGTH = 100_000  # tokens, more than any row has

TWIN = "twin"
ENDS = "prompt and ends"
REFUSED = "refused"
DIFFERENT = "DIFFERENT"
WRONGLY = "REFUSED WRONGLY"
SILENT = "SILENT"
UNEXPLAINED = "UNEXPLAINED"
FAILURES = (DIFFERENT, WRONGLY, SILENT, UNEXPLAINED)

CLASSES = {  # why what counts is not what the twin marks
    "n": "TRL has no twin of this template: what counts is what the template writes behind its generation prompt, up "
    "to the token at which the model stops.",
    "p": "The twin also marks a beginning that the generation prompt already holds: the header of the turn, or an "
    "empty thought.",
    "e": "The twin leaves out the token at which the model stops, or marks an end-of-text token behind it that the "
    "model never gets to write.",
    "h": "The twin writes an earlier turn as history, where it ends with another token than the one that the model "
    "wrote.",
    "t": "The twin leaves out the thought, or the words before a call, of an earlier turn or of every turn; the model "
    "wrote them.",
    "r": "The template begins the turn behind a tool's result with a header that its own generation prompt lacks, and "
    "the twin does not mark that header.",
    "j": "The twin marks two turns as one, or one turn as two.",
    "d": "The twin refuses the row as a whole.",
}


class Supervised(NamedTuple):
    """What specdec made of a row: of each supervised run the ids up to its end and its own ids; and what it refused."""

    runs: list[tuple[list[int], list[int]]]
    reasons: list[str]  # one for each turn that is refused
    row_refused: bool = False  # as a whole: every turn, for the one reason


class Verdict(NamedTuple):
    """Of one assistant turn."""

    mark: str
    classes: str = ""
    expected: str = ""
    actual: str = ""
    reason: str = ""


class Cell(NamedTuple):
    """A template and a kind of conversation."""

    name: str
    kind: str
    verdicts: list[
        tuple[int, int, Verdict]
    ]  # the row's number, the message's, and what became of it

    @property
    def failures(self) -> list[str]:
        """What is wrong, a line each."""
        return [
            f"{self.name}, {self.kind}, row {row}, message {message}: {verdict.mark}: expected {verdict.expected!r}, "
            f"got {verdict.actual!r} {verdict.reason}".rstrip()
            for row, message, verdict in self.verdicts
            if verdict.mark in FAILURES
        ]


def supervise(row: Row, tokenizer: Any) -> Supervised:
    """What specdec makes of a row."""
    left_out: list[str] = []
    report = Report()
    try:
        chat = conversation(DataRow("row 1", "row-1", row))
        documents = list(encode([chat], tokenizer, LENGTH, left_out=left_out, report=report))
    except ValueError as error:
        return Supervised([], left_out or [str(error)], row_refused=True)
    runs = []
    for document in documents:
        ids = document.ids_T.tolist()
        mask = [False, *document.loss_mask_T.tolist(), False]
        edges = [k for k, (left, right) in enumerate(itertools.pairwise(mask)) if left != right]
        runs += [
            (ids[:end], ids[start:end]) for start, end in zip(edges[::2], edges[1::2], strict=True)
        ]
    return Supervised(
        runs, [reason for reason, count in report.reasons.items() for _ in range(count)]
    )


def ids_of(text: str, start: int, name: str) -> tuple[list[int], list[int]]:
    """A text's ids, and those of the tokens that begin at or behind a character."""
    encoded = tokenizer_of(name)(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = list(encoded["input_ids"])
    behind = [
        token
        for token, (first, _) in zip(ids, encoded["offset_mapping"], strict=True)
        if first >= start
    ]
    return ids, behind


@lru_cache(2048)
def expectation(name: str, kind: str, number: int) -> tuple[Expected, ...]:
    """What the oracle expects of a row; the same for whatever specdec is given."""
    return tuple(expect(name, KINDS[kind][number]))


def cell(
    name: str, kind: str, make: Callable[[Row, Any], Supervised] = supervise, tokenizer: Any = None
) -> Cell:
    """The verdicts of one cell.

    Args:
        make: what makes documents of a row.
        tokenizer: with a broken template; None is the genuine one.
    """
    verdicts = []
    for number, row in enumerate(KINDS[kind]):
        expected = expectation(name, kind, number)
        made = make(row, tokenizer or tokenizer_of(name))
        for turn, verdict in zip(expected, judge(name, expected, made), strict=True):
            verdicts.append((number, turn.index, verdict))
    return Cell(name, kind, verdicts)


def cells(names: Iterable[str]) -> list[Cell]:
    """All cells of some templates."""
    return [cell(name, kind) for name in names for kind in KINDS]


def judge(name: str, expected: Sequence[Expected], made: Supervised) -> list[Verdict]:
    """A verdict for each turn of a row; a run that no turn accounts for makes one of them different."""
    runs = list(made.runs)
    matches: list[Choice | None] = []
    for turn in expected:
        match = next((choice for choice in turn.choices if _take(name, choice, runs)), None)
        matches.append(match)
    verdicts = []
    silent = 0 if made.row_refused else matches.count(None) - len(runs) - len(made.reasons)
    decode = tokenizer_of(name).decode
    for turn, match in zip(expected, matches, strict=True):
        if match is not None:
            verdicts.append(_agrees(name, turn, match))
            continue
        wanted = turn.choices[0] if turn.choices else None
        text = f"...{wanted.prompt[-60:]} >>> {wanted.turn}" if wanted else ""
        if run_of := _other_run(name, turn, matches, expected, runs):
            runs.remove(run_of)
            whole, run = run_of
            actual = f"...{decode(whole[: -len(run)])[-60:]} >>> {decode(run)}"
            if wanted and run == _ids(name, wanted)[1]:
                actual = (
                    f"the same behind {decode(whole[: -len(run)])!r} instead of {wanted.prompt!r}"
                )
            verdicts.append(Verdict(DIFFERENT, "", text, actual, turn.reason))
        elif silent > 0:
            silent -= 1
            verdicts.append(Verdict(SILENT, "", text, "", turn.reason))
        elif wanted and not turn.may_refuse:
            verdicts.append(Verdict(WRONGLY, "", text, "", "; ".join(made.reasons)))
        else:
            verdicts.append(Verdict(REFUSED, "", "", "", turn.reason or turn.may_refuse))
    if runs:
        rest = "; ".join(decode(run) for _, run in runs)
        verdicts[-1] = Verdict(DIFFERENT, "", "nothing more", rest)
    return verdicts


def _other_run(
    name: str, turn: Expected, matches: Sequence[Choice | None], expected: Sequence[Expected],
    runs: Sequence[tuple[list[int], list[int]]],
) -> tuple[list[int], list[int]] | None:  # fmt: skip
    """What was supervised instead of a turn: the same ids in another context, else a run that is no other turn's."""
    ids = {id(one): [_ids(name, choice)[1] for choice in one.choices] for one in expected}
    same = next((run for run in runs if run[1] in ids[id(turn)]), None)
    if same is not None:
        return same
    missing = [
        one
        for one, match in zip(expected, matches, strict=True)
        if match is None and one is not turn
    ]
    return next((run for run in runs if not any(run[1] in ids[id(one)] for one in missing)), None)


def _take(name: str, choice: Choice, runs: list[tuple[list[int], list[int]]]) -> bool:
    """Whether a run is the turn in its context; it is taken out then."""
    wanted = _ids(name, choice)
    if wanted not in runs:
        return False
    runs.remove(wanted)
    return True


@lru_cache(8192)
def _ids_of(name: str, prompt: str, turn: str) -> tuple[list[int], list[int]]:
    return ids_of(prompt + turn, len(prompt), name)


def _ids(name: str, choice: Choice) -> tuple[list[int], list[int]]:
    return _ids_of(name, choice.prompt, choice.turn)


def _agrees(name: str, turn: Expected, choice: Choice) -> Verdict:
    """Of a turn as the oracle expects it: whether it is the twin's too, and if not, why."""
    if twin_of(name) is not None and choice.twin is not None:
        text = choice.twin.text[: choice.twin.end]
        if ids_of(text, choice.twin.start, name)[1] == _ids(name, choice)[1]:
            return Verdict(TWIN)
    classes = explain(name, turn, choice)
    if not classes:
        marked = choice.twin.words if choice.twin else ""
        return Verdict(UNEXPLAINED, "", choice.turn, marked, "the twin marks something else")
    return Verdict(ENDS, classes)


def explain(name: str, turn: Expected, choice: Choice) -> str:
    """The classes of differences between what counts and what the twin marks; none where they do not explain it."""
    if twin_of(name) is None:
        return "n"
    if choice.twin is None:
        return "d" if choice.twin_refuses else "j"
    marked = choice.twin.words
    classes = ""
    held = _overlap(choice.prompt, marked)
    if held:
        classes += "p"
        marked = marked[held:]
    counts = choice.turn
    stop = next(stop for stop in stops_of(name) if choice.turn.endswith(stop))
    counts = choice.turn
    if counts == marked:
        return classes
    if marked + stop == counts or (
        marked.startswith(counts) and marked[len(counts) :].strip() in stops_of(name)
    ):
        return classes + "e"
    if not marked.endswith(stop):
        classes += "h"
    body = (
        marked.removesuffix(stop) if marked.endswith(stop) else marked[: max(marked.rfind("<"), 0)]
    )
    same = _common_end(counts.removesuffix(stop), body)
    if same == counts.removesuffix(stop) == body:
        return classes
    parts = [turn.said.thought, turn.said.text, *(call[1] for call in turn.said.calls)]
    gone = [part for part in parts if part in counts and part not in marked]
    if same == body and not gone:
        return classes + "r"
    return (
        classes + "t"
        if gone and all(part in gone or part in same for part in parts if part)
        else ""
    )


def _common_end(left: str, right: str) -> str:
    """What both texts end with."""
    size = 0
    while size < min(len(left), len(right)) and left[-size - 1] == right[-size - 1]:
        size += 1
    return left[len(left) - size :]


def _overlap(prompt: str, marked: str) -> int:
    """How much of the beginning of a marked text the prompt ends with."""
    return max(
        (size for size in range(1, len(marked) + 1) if prompt.endswith(marked[:size])), default=0
    )
