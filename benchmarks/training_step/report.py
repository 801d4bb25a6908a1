"""The table on the terminal, the dated Markdown file and the JSON beside it."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import report
from benchmarks.training_step import recipe
from benchmarks.training_step.agreement import TOLERANCE, compare
from benchmarks.training_step.results import COLUMNS, Result
from specdec.files import write_json, write_text

NOTES = f"""\
- **Work**: one EAGLE-3 step, seven unroll steps, batch of one row: forward, backward, clipping, optimizer. The target's
  states are given; its head is part of the step. All systems start from one set of weights and one batch, train the
  same number of parameters (the head too, which speculators freezes unless told otherwise; not the embedding), and
  the same rows: each gets the mask that means these by its own rule.
- **Definitions that differ.** *in-vocab rows*: rows whose likeliest target token the draft vocabulary lacks do not
  count, which takes the target's argmax over its whole vocabulary (specforge; specdec's default). *every row*: they
  count, and the target's head is cut to the draft vocabulary (speculators). specdec and specforge minimise cross
  entropy, speculators KL; gradients are the same. Step k weighs 0.8^k in all. Reductions: specdec takes one weighted
  mean over the rows that count of all steps; specforge sums each step's mean over all slots, counting or not;
  speculators sums each step's mean over its rows. In bfloat16 specdec and speculators keep float32 weights under
  autocast; specforge trains bfloat16 weights with float32 copies in its optimizer. Peers count accuracies in every
  step, specdec in those it logs (*a logged step*). Each clips and steps with its own optimizer's class, AdamW.
- **Peers' losses** are those that run without a GPU: speculators' eager one, specforge's compiled reference.
- **Agreement**: the first step's loss of every unroll step, as cross entropy per row after each system's reduction is
  undone, relative to specdec's under the same definition; beyond {TOLERANCE["float32"]:.0e} in float32
  ({TOLERANCE["bfloat16"]:.0e} in bfloat16) no ratio is given.
- **Time**: wall seconds. Every system has a process of its own; all wait on a pipe, and one at a
  time takes one step, in turns, so that a slow minute slows all alike.
- **Growth**: peak resident set during warm-up and measured steps less the resident set before the first step, MB of
  10^6 bytes. torch's compiler is imported before that in every process, whether it compiles or not. *after
  warm-up* leaves out the peaks of the warm-up steps, in which specforge and specdec compile.
- **float32 products**: the library that multiplies. specdec chooses oneDNN where it is faster and as exact; peers get
  what torch does by default, as they ask for nothing else.
- **Floor**: the matrix products of the in-vocab step that no implementation can leave out, of the same dtype and by
  the same library, with nothing between them; see `benchmarks/training_step/floor.py`.
"""


WORDS = 4  # of the columns


def table(result: Result) -> Table:
    """For the terminal."""
    return report.table(COLUMNS, result.lines(), WORDS, result.group.name)


def markdown(about: dict[str, Any], versions: dict[str, str], results: Sequence[Result]) -> str:
    """The dated file."""
    parts = [
        f"# One training step, {about['date'][:10]}\n",
        *report.conditions(about, versions, f"; {about['warm_up']} warm-up and {about['steps']} measured steps"),
        "\n## Result\n",
    ]
    parts += [f"- {result.group.name}: {sentence}." for result in results for sentence in result.headline()]
    parts += ["\n## How to read it\n", NOTES]
    for name in dict.fromkeys(result.group.workload for result in results):
        size = recipe.WORKLOADS[name]
        parts.append(
            f"- **{name}**: hidden {size.hidden}, {size.heads}/{size.kv_heads} heads, "
            f"feed-forward {size.feed_forward}, vocabulary {size.vocab}, draft vocabulary {size.draft_vocab}, "
            f"{size.tokens} tokens, K = {size.unroll}."
        )
    for result in results:
        parts += [f"\n## {result.group.name}\n", *report.rows(COLUMNS, result.lines(), WORDS)]
        parts += ["", "Losses apart: " + ("; ".join(result.agreement()) or "nothing to compare") + "."]
        parts += [f"\n**Warning**: {text}." for text in result.warnings(about["steps"])]
    return "\n".join(parts) + "\n"


def to_json(about: dict[str, Any], results: Sequence[Result]) -> dict[str, Any]:
    """All raw figures; a loss that is no number is null."""
    return _finite(
        {
            "run": about,
            "groups": [
                {
                    "workload": result.group.workload,
                    "dtype": result.group.dtype,
                    "mask": result.group.mask,
                    "objections": result.objections,
                    "headline": result.headline(),
                    "warnings": result.warnings(about["steps"]),
                    "comparisons": [c._asdict() for c in compare(result.measured)],
                    "measurements": [m.to_json() for m in result.measured],
                }
                for result in results
            ],
        }
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(out: Path, about: dict[str, Any], results: Sequence[Result]) -> None:
    """Both files."""
    versions = report.versions((m.about["versions"] for result in results for m in result.measured), "peers'")
    write_json(out.with_suffix(".json"), to_json(about, results))
    write_text(out, markdown(about, versions, results))
