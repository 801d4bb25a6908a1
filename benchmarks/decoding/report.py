"""The tables on the terminal, the dated Markdown file and the JSON beside it."""

from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import report
from benchmarks.decoding.results import ROUNDS, SPEEDS, STARTS, Results
from specdec.files import write_json, write_text

NOTES = """\
- **Work**: one text at a time, greedy, no end token, exactly so many new tokens. Weights are rounded to the dtype once;
  all systems read these files. vLLM reads the same drafter as `specdec export` writes it.
- **Time**: wall seconds of a whole call, the prompt included; starting and compiling are not in it and have a
  table of their own. Every system has a process of its own with as many threads; all wait on a pipe, and one at
  a time gets one prompt. Every prompt goes to all systems before the next does, and the first one moves on.
- **tokens/s** is pooled over prompts. *after the first*: without the time of a call that ends at the first token.
- **Ratios** are of pooled time, above 1 is faster; intervals are 95 % bootstraps over prompts, paired.
- **vLLM** runs with `enforce_eager=True` and with its own compilation, and the faster one counts; one that was left out
  is named above. Engine in process, one sequence, no prefix cache.
- **transformers** is `generate` with its defaults; `transformers-lookup` and `transformers-assisted` propose so many
  tokens as the table says, or as its default heuristic does.
- **Acceptance length**: tokens per pass of the target, the bonus token included; specdec's and vLLM's without the
  prompt's pass, transformers' with it.
- **Equal texts**: the same tokens as the first system, all of them; and how many are equal before the first difference.
  In bfloat16 near ties fall differently in different kernels, and texts part there.
- **Rounds** (specdec alone): *draft* and *verify* are timed in every round of every text; *verify* is the target's
  pass, acceptance and commit, one graph but for the moving of a tree's keys. *accept* is what of it is not the model
  (the tree's mask, judging, path, moving keys): the round's own code as graphs of its own, replayed on the logits of
  the warm-up text in the same process after every text, less the call of a graph that is handed the same tensors and
  does next to nothing. *host* is the rest: the whole call less the prompt's pass, draft and verify. *overhead* =
  (accept + host) / round: what is outside the models' graphs and their calls. *with calls* adds such a call for
  drafting, if there is any, and one for verification, whose own have more tensors.
- **Repetition** of a set: the share of the new tokens that end a 4-gram which stands earlier in the text, prompt
  included; mean over the texts of plain decoding.
"""


def tables(results: Results) -> list[Table]:
    """All of them."""
    out = [report.table(STARTS, results.starts(), 1, f"{results.dtype}: starts")]
    for each in results.sets:
        title = f"{results.dtype}, {each.name} prompts (repetition {results.repetition(each.name):.0%})"
        out.append(report.table(SPEEDS, results.speeds(each.name), 2, title))
        if rounds := results.rounds(each.name):
            out.append(report.table(ROUNDS, rounds, 1, f"{results.dtype}, {each.name} prompts: rounds, ms"))
    return out


def sentences(results: Results, name: str) -> list[str]:
    """Verdicts and warnings of a set."""
    return [
        *(f"{v.claim}: {v.found}, {'holds' if v.holds else 'does not hold'}" for v in results.verdicts(name)),
        *(f"Warning: {text}" for text in results.warnings(name)),
    ]


def markdown(about: dict[str, Any], versions: dict[str, str], results: Results) -> str:
    """The dated file."""
    count, tokens = len(results.sets[0].prompts), about["tokens"]
    parts = [
        f"# Batch-1 decoding in {results.dtype}, {about['date'][:10]}\n",
        *report.conditions(about, versions),
        f"- Target `{about['target']}`, drafter `{about['drafter']}`, assistant `{about['assistant']}`; {tokens} new "
        f"tokens, {about['repeats']} times each, after {about['warm_up']} texts of warm-up.",
    ]
    parts += [f"- Left out: {name} ({reason})." for name, reason in results.left_out.items()]
    parts.append("\n## Result\n")
    for each in results.sets:
        parts.append(f"{each.name} prompts:\n")
        parts += [f"- {text}." for text in sentences(results, each.name)]
        parts.append("")
    parts += ["## Prompts\n"]
    parts += [
        f"- **{each.name}**, {len(each.prompts)}: {each.what}. Repetition {results.repetition(each.name):.0%}."
        for each in results.sets
    ]
    parts += ["\n## How to read it\n", NOTES, "## Starts\n", *report.rows(STARTS, results.starts(), 1)]
    for each in results.sets:
        parts += [f"\n## {each.name}, {count} prompts\n", *report.rows(SPEEDS, results.speeds(each.name), 2)]
        if rounds := results.rounds(each.name):
            parts += ["", *report.rows(ROUNDS, rounds, 1)]
    return "\n".join(parts) + "\n"


def to_json(about: dict[str, Any], results: Results) -> dict[str, Any]:
    """All raw figures."""
    return {
        "run": about | {"dtype": results.dtype, "left_out": results.left_out},
        "sets": [
            {
                "name": each.name,
                "what": each.what,
                "prompts": each.names,
                "repetition": results.repetition(each.name),
                "verdicts": [verdict._asdict() for verdict in results.verdicts(each.name)],
                "warnings": results.warnings(each.name),
            }
            for each in results.sets
        ],
        "systems": [m.to_json(results.reference) for m in results.measured],
    }


def write(out: Path, about: dict[str, Any], results: Results) -> None:
    """Both files."""
    versions = report.versions((m.about["versions"] for m in results.measured), "vLLM's")
    write_json(out.with_suffix(".json"), to_json(about, results))
    write_text(out, markdown(about, versions, results))
