"""Every chat template of TRL by sixteen kinds of conversation: what specdec supervises, beside what the model writes.

``python -m benchmarks.chat_templates --write docs/chat_templates.md`` writes the page; without ``--write`` the page is
printed. The exit status is 1 if a cell is a failure. The oracle is ``benchmarks/chat_oracle``.
"""

import argparse
import datetime
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.chat_oracle.conversations import KINDS
from benchmarks.chat_oracle.tokenizers import templates, twin_of, versions
from benchmarks.chat_oracle.verdicts import CLASSES, ENDS, FAILURES, REFUSED, TWIN, Cell, cells
from specdec.utils.files import write_text

COMMAND = "python -m benchmarks.chat_templates --write docs/chat_templates.md"

COLUMNS = {  # of the table, in three groups: the kind, its heading and what it is
    "plain": ("plain", "a question and an answer"),
    "system": ("system", "a system message before them"),
    "turns": (
        "turns",
        "two questions and two answers, with a thought in none, one or both of the answers",
    ),
    "trailing user": ("user last", "a question at the end without an answer"),
    "consecutive": ("twice", "two assistant messages in a row"),
    "parts": ("parts", "content as a list of text parts"),
    "null": (
        "null",
        "`null` under the keys that a message does not use, and content `null` together with a call",
    ),
    "end": (
        "end",
        "a plain answer, a call and an answer to a tool's result in one row, then a user: how each turn ends",
    ),
    "thought": (
        "thought",
        "under `reasoning_content`, `reasoning` or `thinking`, or inline in `<think>` tags",
    ),
    "empty thought": ("empty", "an empty thought, under a key or in tags"),
    "call with content": (
        "words + call",
        "a tool call together with words, without and with a thought",
    ),
    "call without content": (
        "call",
        "a tool call alone: content empty or absent, without and with a thought",
    ),
    "string arguments": ("string", "the arguments of a call as a string of JSON"),
    "object arguments": ("object", "the arguments of a call as an object"),
    "two calls": ("two calls", "two calls in one message"),
    "result and answer": ("result", "calls, their results and an answer, in four rows"),
}

INTRO = """# Chat templates

This page shows which tokens specdec supervises for each chat template in TRL's package, in sixteen kinds of
conversation. One command writes the page, and a test fails if a cell is wrong. [Conversations](conversations.md)
explains what specdec does with a row.

The judge is an oracle that shares no code with specdec's handling of templates. TRL ships the models' own
templates. For most of them it also ships a training version, here called the *twin*, whose `{% generation %}` tags
mark the tokens that the model writes. The oracle computes for each assistant turn which tokens are right, in two
ways:

- **The twin**: the tokens that the twin's tags mark.
- **Prompt and ends**: the prompt is the template's rendering of the messages before the turn, with the generation
  prompt and the matching state of the thinking switch. The model writes what follows the prompt, up to and
  including the first token at which it stops. White space after that token is not supervised.

If the two differ, prompt and ends count, because that is how the model is run. Each difference belongs to one of
the classes [below](#where-the-twin-does-not-count). The ids that specdec supervises must equal the oracle's, and so
must all ids before them in the row.

specdec refuses a turn if the template cannot write all that the row says. The oracle checks each refusal: it tries
the thought under each key and in tags, arguments as object and as string, content empty, `null` and absent, and
content as a string and as parts. A refusal that the oracle cannot confirm is a failure, and so is a turn that
disappears without a reason.

## Thoughts and templates without a place for them

Several templates have no place for a thought, such as Llama 3.1, Gemma 3 and Phi-3. If a row for such a template
has a thought under a key, specdec refuses the turn and does not move the thought into the text. A model with such a
template never writes `<think>` tags, so a drafter would learn tokens that its target does not produce. If your own
fine-tune does write the tags, put the thought into the text yourself, as in `<think>\\n...\\n</think>\\n\\n4`. All of
it is then supervised as text.
"""


def page(results: Sequence[Cell], date: datetime.date) -> str:
    """The Markdown page."""
    by_place = {(result.name, result.kind): result for result in results}
    names = list(dict.fromkeys(result.name for result in results))
    version = ", ".join(f"{name} {number}" for name, number in versions().items())
    lines = [
        INTRO,
        f"Date: {date:%Y-%m-%d}. Versions: {version}. Command: `{COMMAND}`.",
        "",
        *_summary(results),
        "",
    ]
    lines += ["## The table", "", *_legend(), ""]
    headings = [heading for heading, _ in COLUMNS.values()]
    lines += [f"| template | {' | '.join(headings)} |", "|---|" + ":-:|" * len(headings)]
    for name in names:
        marks = [mark(by_place[name, kind]) for kind in COLUMNS]
        lines.append(f"| {name.replace('_', chr(92) + '_')} | {' | '.join(marks)} |")
    lines += [
        "",
        "The columns:",
        "",
        *(f"- **{heading}**: {what}." for heading, what in COLUMNS.values()),
        "",
    ]
    lines += [
        "## Where the twin does not count",
        "",
        *(f"- **{letter}**: {why}" for letter, why in CLASSES.items()),
        "",
    ]
    lines += ["## What is refused, and why", "", *_refusals(results), ""]
    failures = [failure for result in results for failure in result.failures]
    if failures:
        lines += ["## Failures", "", *(f"- {failure}" for failure in failures), ""]
    return "\n".join(lines)


def mark(result: Cell) -> str:
    """The short form of a cell."""
    marks = {verdict.mark for _, _, verdict in result.verdicts}
    letters = sorted({letter for _, _, verdict in result.verdicts for letter in verdict.classes})
    signs = ["**!**"] if marks & set(FAILURES) else []
    signs += ["="] if TWIN in marks else []
    signs += ["".join(letters)] if ENDS in marks else []
    signs += ["–"] if REFUSED in marks else []  # noqa: RUF001  a dash is a sign here
    return " ".join(signs)


def _legend() -> list[str]:
    return [
        "A cell covers one to five rows and every assistant turn in them, so it may have several signs:",
        "",
        "- **=**: equal to what the twin marks;",
        "- **a letter**: equal to prompt and ends, where the twin marks something else; the letter is the class;",
        "- **–**: refused, with the reason;",  # noqa: RUF001
        "- **!**: a failure.",
    ]


def _summary(results: Iterable[Cell]) -> list[str]:
    counts = Counter(verdict.mark for result in results for _, _, verdict in result.verdicts)
    total = sum(counts.values())
    failed = sum(counts[name] for name in FAILURES)
    names = templates()
    twins = sum(twin_of(name) is not None for name in names)
    return [
        f"Of {total:,} assistant turns in {len(names) * len(KINDS)} cells, {counts[TWIN]:,} are equal to the twin, "
        f"{counts[ENDS]:,} to prompt and ends, {counts[REFUSED]:,} are refused with the reason, and {failed} fail. "
        f"{twins} of the {len(names)} templates have a twin or their own tags."
    ]


def _refusals(results: Iterable[Cell]) -> list[str]:
    """Reasons, with the templates and columns that have them."""
    places: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        for _, _, verdict in result.verdicts:
            if (
                verdict.mark == REFUSED
                and COLUMNS[result.kind][0] not in places[verdict.reason][result.name]
            ):
                places[verdict.reason][result.name].append(COLUMNS[result.kind][0])
    lines = []
    for reason, by_name in sorted(places.items()):
        lines.append(f"- {reason[0].upper()}{reason[1:]}:")
        columns: dict[str, list[str]] = defaultdict(list)
        for name, kinds in by_name.items():
            columns[", ".join(kinds)].append(f"`{name}`")
        lines += [f"    - {', '.join(names)}: {kinds}" for kinds, names in columns.items()]
    return lines or ["Nothing."]


def main() -> None:
    """Write or print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="the file of the page; else it is printed")
    parser.add_argument("--only", nargs="*", help="names of templates; all by default")
    options = parser.parse_args()
    results = cells(options.only or templates())
    text = page(results, datetime.datetime.now(datetime.UTC).date())
    if options.write:
        write_text(options.write, text)
    else:
        print(text)
    failures = sum(len(result.failures) for result in results)
    raise SystemExit(f"{failures} turns fail" if failures else 0)


if __name__ == "__main__":
    main()
