"""``specdec table``: evaluations as papers print them, a row for every method, two columns for every set of prompts.

Rows are in blocks of one temperature, as in Table 1 of EAGLE-3 (https://arxiv.org/abs/2503.01840).
"""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from specdec.data.rows import stem
from specdec.evaluation.compare import (
    MAY_DIFFER,
    OF_TARGET,
    different_settings,
    evaluations_in,
)
from specdec.evaluation.metrics import METRICS
from specdec.evaluation.overrides import override_notes
from specdec.evaluation.suites import SUITES, suite_notes
from specdec.report.tables import (
    LOOPING_SHARE,
    TEMPLATES,
    ReportTable,
    markdown_table,
    markdown_text,
    print_report,
)
from specdec.target.identity import distinct_targets
from specdec.utils.files import write_sums, write_text
from specdec.utils.reading import check_sums, read_json
from specdec.utils.text import how_many

MARKDOWN = "table.md"
LATEX = "table.tex"
TITLE = "Speed-up and acceptance length"
TAU = "τ: tokens committed per target pass, the target's own (bonus) token included."
LOOPING = f"*: {LOOPING_SHARE:.0%} or more of the answers repeat themselves, which flatters acceptance and speed."


class Cell(NamedTuple):
    """Speed-up and acceptance length of a method on a set of prompts."""

    speedup: float | None = None  # over plain decoding; None where that was not timed
    length: float | None = None  # acceptance length, bonus token included; None of a baseline
    looping: bool = False
    place: Path | None = None  # of the evaluation


Methods = dict[str, dict[str, Cell]]
"""Of every method its cell for each column."""


def suite_table(*, runs: list[Path], out: Path | None = None) -> None:
    """One table of the evaluations of several drafters, as papers print them: speed-up and acceptance length of every
    method on every set of prompts, with their mean.

    Example: specdec table --runs runs/eagle3 runs/eagle3_1 --out runs/table

    Args:
        runs: directories of evaluations, or of those of suites.
        out: directory for table.md and table.tex; shown alone if not given.

    Raises:
        ValueError: an evaluation cannot be read, or two are not of the same prompts or lengths, or share neither target
            nor drafter.
    """
    if out is not None and (out / MARKDOWN).exists():
        raise ValueError(f"{out}: there is a {MARKDOWN} already; give another --out")
    places = [place for run in runs for place in evaluations_in(run).values()]
    write_table(out, places)


def write_table(out: Path | None, places: Sequence[Path]) -> None:
    """Show the table of evaluations and, in ``out``, write it as Markdown and LaTeX."""
    evaluations = [_metrics(place) for place in places]
    blocks = _blocks(evaluations, places)
    headings, rows = _laid_out(blocks)
    table = ReportTable(TITLE, headings, rows, left=2)
    notes = [TAU, *_notes(evaluations)]
    notes += [LOOPING] if any("*" in cell for row in rows for cell in row) else []
    if out is not None:
        paragraphs = [f"{markdown_text(note)}\n" for note in notes]
        lines = [f"# {TITLE}", "", markdown_table(table), "", *paragraphs]
        write_text(out / MARKDOWN, "\n".join(lines))
        write_text(out / LATEX, latex(headings, rows))
        write_sums(out, LATEX)
    print_report([table], notes)
    if out is not None:
        sys.stdout.write(f"{out / MARKDOWN} and {LATEX}\n")


def _metrics(place: Path) -> dict[str, Any]:
    check_sums(place, "evaluate again", partial=True)
    metrics = read_json(place / METRICS)
    try:
        _ = (
            metrics["drafter"]["label"],
            metrics["settings"]["sampling"],
            metrics["results"][0]["looping_share"],
        )
        return dict(metrics)
    except (TypeError, KeyError, IndexError) as error:
        raise ValueError(
            f"{place / METRICS}: not written by specdec evaluate, without {error}"
        ) from error


def _column(settings: dict[str, Any]) -> str:
    suite = settings.get("suite")
    return str(suite["title"]) if suite else ", ".join(stem(path) for path in settings["prompts"])


def _blocks(evaluations: Sequence[dict[str, Any]], places: Sequence[Path]) -> dict[float, Methods]:
    """Return the methods of every temperature; ValueError where a column would hold what cannot be compared."""
    verifiers = distinct_targets(metrics["target"] for metrics in evaluations)
    weights = {metrics["drafter"]["weights_sha256"] for metrics in evaluations}
    if len(verifiers) > 1 and len(weights) > 1:
        raise ValueError(
            f"{' and '.join(map(str, places))}: several targets and several drafters: one of either"
        )
    may_differ = MAY_DIFFER | (OF_TARGET if len(verifiers) > 1 else set())
    first_of: dict[tuple[float, str], tuple[dict[str, Any], Path]] = {}
    blocks: dict[float, Methods] = {}
    for metrics, place, name in zip(evaluations, places, _drafter_names(evaluations), strict=True):
        settings = metrics["settings"]
        column = _column(settings)
        temperature = settings["sampling"]["temperature"]
        other, where = first_of.setdefault((temperature, column), (settings, place))
        if differing := different_settings(settings, other, may_differ):
            raise ValueError(
                f"{place} and {where} differ in {', '.join(differing)}: a column is of one"
            )
        methods = blocks.setdefault(temperature, {})
        for result in metrics["results"]:
            method = f"{name}, {result['shape']}"
            row = methods.setdefault(method, {})
            if column in row:
                raise ValueError(
                    f"{place} and {row[column].place}: both are of {method} on {column}; leave one out"
                )
            looping = (result["looping_share"] or 0) >= LOOPING_SHARE
            length = result["acceptance_length"]["mean"]
            row[column] = Cell(result["speedup"], length, looping, place)
        for baseline in metrics["baselines"]:
            row = methods.setdefault(baseline["baseline"], {})
            row.setdefault(column, Cell(baseline["speedup"]))
    return dict(sorted(blocks.items()))


def _drafter_names(evaluations: Sequence[dict[str, Any]]) -> list[str]:
    """Return each drafter's name: short where that is clear, with its target where there are several."""
    drafters = {metrics["drafter"]["directory"]: metrics["drafter"] for metrics in evaluations}
    drafters_of = Counter(map(_short, drafters.values()))
    several_targets = len(distinct_targets(metrics["target"] for metrics in evaluations)) > 1
    names = []
    for metrics in evaluations:
        name = _short(metrics["drafter"])
        if drafters_of[name] > 1:
            name = metrics["drafter"]["directory"]
        names.append(f"{name} for {verifier(metrics)}" if several_targets else name)
    return names


def verifier(metrics: dict[str, Any]) -> str:
    """A target's name where one drafter has several."""
    adapter = metrics["target"].get("adapter")
    with_adapter = f" with {Path(adapter).name}" if adapter else ""
    return (
        f"{Path(metrics['target']['source']).name}{with_adapter} in {metrics['settings']['dtype']}"
    )


def _short(drafter: dict[str, Any]) -> str:
    """A drafter's name: a run's folder where it lies in one, as ``drafter`` or ``drafter_best``."""
    directory = Path(drafter["directory"])
    run = directory.parent.name
    which = {"drafter": "", "drafter_best": " (best)"}.get(directory.name)
    return f"{run}{which}" if run and which is not None else str(drafter["label"])


def _laid_out(blocks: dict[float, Methods]) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows; speed-up has a column where any was timed."""
    all_rows = [row for methods in blocks.values() for row in methods.values()]
    known = [suite.title for suite in SUITES.values()]
    columns = sorted(
        dict.fromkeys(column for row in all_rows for column in row),
        key=lambda column: known.index(column) if column in known else len(known),
    )
    timed = any(cell.speedup for row in all_rows for cell in row.values())
    headings = ["Temperature", "Method"]
    for column in [*columns, "Mean"]:
        headings += [f"{column} speed-up", f"{column} τ"] if timed else [f"{column} τ"]
    rows = []
    for temperature, methods in blocks.items():
        for method, by_column in methods.items():
            cells = [by_column.get(column, Cell()) for column in columns]
            texts = [f"{temperature:g}", method]
            for cell in [*cells, _mean(cells)]:
                mark = "*" if cell.looping else ""
                if timed:
                    texts.append(_number(cell.speedup, "x" + mark))
                texts.append(_number(cell.length, mark))
            rows.append(texts)
    return headings, rows


def _mean(cells: Sequence[Cell]) -> Cell:
    """The mean over sets of prompts, each of one weight; none where a set is missing."""
    means = []
    for values in zip(*((cell.speedup, cell.length) for cell in cells), strict=True):
        known = [value for value in values if value is not None]
        means.append(fmean(known) if len(known) == len(cells) else None)
    speedup, length = means
    return Cell(speedup, length, any(cell.looping for cell in cells))


def _number(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.2f}{unit}"


def _notes(evaluations: Sequence[dict[str, Any]]) -> list[str]:
    """Say what the columns are of, and where it was timed."""
    columns: dict[str, str] = {}
    machines: dict[str, None] = {}  # in the order of the evaluations
    timed = False
    for metrics in evaluations:
        settings = metrics["settings"]
        column = _column(settings)
        about = suite_notes(settings["suite"])[0] if settings.get("suite") else f"{column}."
        prompts = how_many(metrics["results"][0]["prompts"], "prompt")
        note = f"{about} {prompts}, at most {settings['max_new_tokens']} new tokens."
        columns.setdefault(column, note)
        facts = metrics["provenance"]
        processor = " and ".join(facts["gpus"]) if facts["gpus"] else facts["cpu"]
        machines[f"{processor}, torch {facts['versions']['torch']}"] = None
        timed |= any(row["speedup"] for row in (*metrics["results"], *metrics["baselines"]))
    lead = "Speed-up over plain decoding in the same process, on" if timed else "Measured on"
    overrides = override_notes([metrics["drafter"] for metrics in evaluations])
    return [*columns.values(), *overrides, f"{lead} {'; '.join(machines)}."]


SPECIAL = {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}"}
SPECIAL |= {sign: f"\\{sign}" for sign in "&%$#_{}"}


LATEX_TEMPLATES = TEMPLATES.overlay("<%", "%>", "<<", ">>")
LATEX_TEMPLATES.filters["tex"] = lambda text: "".join(SPECIAL.get(sign, sign) for sign in text)


def latex(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in LaTeX, of the packages ``booktabs`` alone; a rule between temperatures."""
    names = [heading.rpartition(" ") for heading in headings[2:]]
    columns = list(dict.fromkeys(name for name, *_ in names))
    width = len(names) // len(columns)
    kinds = [kind for *_, kind in names]
    template = LATEX_TEMPLATES.get_template("evaluation/table.tex.jinja")
    return template.render(columns=columns, kinds=kinds, width=width, rows=rows)
