"""A measurement for people: ``report.md`` and tables on the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from specdec.drift.results import Document
from specdec.evaluation.markdown import bracketed, table
from specdec.evaluation.statistics import METHOD

_MEANING = f"""\
Chains of draft tokens are begun at places of the target's own greedy answers, as decoding begins them, and every draft
is verified by the target. Step k yields the k-th draft token. Intervals: {METHOD}; none where too few prompts have
chains. docs/drift.md defines every quantity.
"""


def report(found: Sequence[tuple[str, Document]], figure: str, differences: Mapping[str, Any]) -> str:
    """The text of ``report.md``.

    Args:
        found: drafters by their labels.
        figure: the picture's path relative to it.
        differences: of every drafter but the first, by label: what :func:`specdec.drift.summary.difference` gives.
    """
    lines = ["# Attention drift", "", _MEANING, f"![Every quantity by draft step]({figure})", ""]
    for label, document in found:
        lines += _of_one(label, document)
    for label, difference in differences.items():
        lines += [f"## {label} less {found[0][0]}, paired by prompt", ""]
        lines += [*table(("figure", "difference"), [[one["title"], told(one)] for one in difference.values()]), ""]
    return "\n".join(lines)


def print_summaries(found: Sequence[tuple[str, Document]], console: Console) -> None:
    """The summary of every drafter side by side."""
    titles = list(dict.fromkeys(one["title"] for _, document in found for one in document["summary"].values()))
    shown = Table("", *(label for label, _ in found), title="Attention drift", title_justify="left")
    by_title = [{one["title"]: told(one) for one in document["summary"].values()} for _, document in found]
    for title in titles:
        shown.add_row(title, *(one.get(title, "-") for one in by_title))
    console.print(shown)
    for label, document in found:
        console.print(f"{label}: {_most(document)}", highlight=False, markup=False)


def _of_one(label: str, document: Document) -> list[str]:
    trained = document["trained_depth"]
    lines = [f"## {label}", "", f"- {len(document['prompts'])} prompts, {sum(document['chains'])} chains of "
             f"{document['depths']} tokens; " + (f"trained to step {trained}" if trained else "trained depth unknown"),
             f"- {_most(document)}", ""]  # fmt: skip
    lines += [*table(("figure", "mean"), [[one["title"], told(one)] for one in document["summary"].values()]), ""]
    rows = [
        [f"{one['title']} ({one['unit']})", *(_number(mean) for mean in one["mean"])]
        for one in document["series"].values()
    ]
    beyond = [f"{k}{'' if trained is None or k <= trained else '*'}" for k in range(1, document["depths"] + 1)]
    lines += [*table(("mean at step", *beyond), rows), ""]
    if trained is not None and trained < document["depths"]:
        lines += ["\\* beyond the trained depth", ""]
    sources = [
        [one["title"], of, told({"mean": mean, "low": low, "high": high})]
        for one in document["sources"].values()
        for of, mean, low, high in zip(one["of"], one["mean"], one["low"], one["high"], strict=True)
    ]
    lines += [*table(("source", "of", "mean"), sources, left=2), ""]
    if document.get("skipped"):
        lines += ["Left out:", "", *(f"- {one['prompt_id']}: {one['reason']}" for one in document["skipped"]), ""]
    return lines


def _most(document: Document) -> str:
    """Where the sink is, if there is one at a fixed place."""
    tops = document["top_positions"]
    positions = [one["position"] for one in tops]
    position = max(set(positions), key=lambda each: (positions.count(each), -each))
    times = f"in {positions.count(position)} of {len(positions)} prompts"
    if 2 * positions.count(position) > len(positions):
        masses = [one["mass"] for one in tops if one["position"] == position]
        mean = sum(masses) / len(masses)
        return f"of all positions {position} takes the most attention {times}, {_number(mean)} of it in the mean"
    return f"no position takes the most attention in more than half of the prompts; {position} does {times}"


def told(one: Mapping[str, Any]) -> str:
    """A mean with its interval."""
    return bracketed(one["mean"], one["low"], one["high"], _number)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:#.3g}".rstrip(".") if abs(value) >= 1 else f"{value:.3f}"
