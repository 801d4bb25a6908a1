"""``specdec table``: evaluations as papers print them, a row for every method, two columns for every set of prompts.

Rows are in blocks of one temperature, as in Table 1 of EAGLE-3 (https://arxiv.org/abs/2503.01840).
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from specdec.data.rows import stem
from specdec.evaluation.compare import MAY_DIFFER, OF_TARGET, evaluations_in
from specdec.evaluation.metrics import LOOPING_SHARE, METRICS
from specdec.evaluation.suites import SUITES, suite_notes
from specdec.report.tables import ReportTable, print_report, table
from specdec.utils.files import write_sums, write_text
from specdec.utils.reading import check_sums, read_json
from specdec.utils.text import how_many

MARKDOWN = "table.md"
LATEX = "table.tex"
TITLE = "Speed-up and acceptance length"
TAU = "τ: tokens committed per target pass, the target's own (bonus) token included."
LOOPING = f"*: {LOOPING_SHARE:.0%} or more of the answers repeat themselves, which flatters acceptance and speed."


class Cell(NamedTuple):
    """What a method reached on a set of prompts."""

    speedup: float | None  # over plain decoding; None where that was not timed
    length: float | None  # acceptance length, bonus token included; None of a baseline
    looping: bool = False


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
    found = [_metrics(place) for place in places]
    blocks = _blocks(found, places)
    headings, rows = _laid_out(blocks)
    notes = [TAU, *_notes(found)]
    notes += [LOOPING] if any("*" in cell for row in rows for cell in row) else []
    if out is not None:
        lines = [
            f"# {TITLE}",
            "",
            *table(headings, rows, left=2),
            "",
            *(f"{one}\n" for one in notes),
        ]
        write_text(out / MARKDOWN, "\n".join(lines))
        write_text(out / LATEX, latex(headings, rows))
        write_sums(out, LATEX)
    print_report([ReportTable(TITLE, headings, rows, left=2)], notes)
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
            f"{place / METRICS}: not of specdec evaluate, for want of {error}"
        ) from error


def _column(settings: dict[str, Any]) -> str:
    suite = settings.get("suite")
    return str(suite["title"]) if suite else ", ".join(stem(one) for one in settings["prompts"])


def _blocks(found: Sequence[dict[str, Any]], places: Sequence[Path]) -> dict[float, Methods]:
    """Of every temperature, the methods; ValueError where a column would hold what cannot be compared."""
    drafters: dict[str, set[str]] = {}
    for metrics in found:
        drafters.setdefault(_short(metrics["drafter"]), set()).add(metrics["drafter"]["directory"])
    verifiers = {metrics["target"]["fingerprint"] for metrics in found}
    if len(verifiers) > 1 and len({metrics["drafter"]["weights_sha256"] for metrics in found}) > 1:
        raise ValueError(
            f"{' and '.join(map(str, places))}: several targets and several drafters: one of either"
        )
    conditions: dict[tuple[float, str], tuple[dict[str, Any], Path]] = {}
    told: dict[tuple[float, str, str], Path] = {}  # by temperature, column and method
    blocks: dict[float, Methods] = {}
    for metrics, place in zip(found, places, strict=True):
        settings = metrics["settings"]
        column = _column(metrics["settings"])
        temperature = settings["sampling"]["temperature"]
        aside = MAY_DIFFER | (OF_TARGET if len(verifiers) > 1 else set())
        own = {name: value for name, value in settings.items() if name not in aside}
        other, where = conditions.setdefault((temperature, column), (own, place))
        if differing := [name for name in {**own, **other} if own.get(name) != other.get(name)]:
            raise ValueError(
                f"{place} and {where} differ in {', '.join(differing)}: a column is of one"
            )
        name = _short(metrics["drafter"])
        name = name if len(drafters[name]) == 1 else metrics["drafter"]["directory"]
        name = name if len(verifiers) == 1 else f"{name} for {verifier(metrics)}"
        cells = {
            f"{name}, {one['shape']}": Cell(
                one["speedup"],
                one["acceptance_length"]["mean"],
                (one["looping_share"] or 0) >= LOOPING_SHARE,
            )
            for one in metrics["results"]
        }
        cells |= {one["baseline"]: Cell(one["speedup"], None) for one in metrics["baselines"]}
        methods = blocks.setdefault(temperature, {})
        for method, cell in cells.items():
            row = methods.setdefault(method, {})
            if column in row and method not in {one["baseline"] for one in metrics["baselines"]}:
                first = told[temperature, column, method]
                raise ValueError(
                    f"{place} and {first}: both are of {method} on {column}; leave one out"
                )
            row.setdefault(column, cell)
            told.setdefault((temperature, column, method), place)
    return dict(sorted(blocks.items()))


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
    """Headings and rows; speed-up has a column where any was timed."""
    present = [column for methods in blocks.values() for row in methods.values() for column in row]
    titles = [suite.title for suite in SUITES.values()]
    order = sorted(
        dict.fromkeys(present), key=lambda one: titles.index(one) if one in titles else len(titles)
    )
    timed = any(
        cell.speedup
        for methods in blocks.values()
        for row in methods.values()
        for cell in row.values()
    )
    headings = ["Temperature", "Method"]
    rows = []
    for column in [*order, "Mean"]:
        headings += [f"{column} speed-up", f"{column} τ"] if timed else [f"{column} τ"]
    for temperature, methods in blocks.items():
        for method, cells in methods.items():
            shown = [f"{temperature:g}", method]
            own = [cells.get(column, Cell(None, None)) for column in order]
            for cell in [*own, _mean(own)]:
                mark = "*" if cell.looping else ""
                both = [_number(cell.speedup, "x" + mark), _number(cell.length, mark)]
                shown += both if timed else both[1:]
            rows.append(shown)
    return headings, rows


def _mean(cells: Sequence[Cell]) -> Cell:
    """The mean over sets of prompts, each of one weight; none where a set is missing."""
    speedups, lengths = ([getattr(cell, name) for cell in cells] for name in ("speedup", "length"))
    speedup, length = (None if None in values else fmean(values) for values in (speedups, lengths))
    return Cell(speedup, length, any(cell.looping for cell in cells))


def _number(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.2f}{unit}"


def _notes(found: Sequence[dict[str, Any]]) -> list[str]:
    """What the columns are of, and where it was timed."""
    columns: dict[str, str] = {}
    for metrics in found:
        settings = metrics["settings"]
        about = (
            suite_notes(settings["suite"]) if settings.get("suite") else [f"{_column(settings)}."]
        )
        prompts = how_many(metrics["results"][0]["prompts"], "prompt")
        columns.setdefault(
            _column(settings),
            f"{about[0]} {prompts}, at most {settings['max_new_tokens']} new tokens.",
        )
    machines = dict.fromkeys(
        f"{' and '.join(one['gpus']) if one['gpus'] else one['cpu']}, torch {one['versions']['torch']}"
        for one in (metrics["provenance"] for metrics in found)
    )
    timed = any(
        one["speedup"] for metrics in found for one in (*metrics["results"], *metrics["baselines"])
    )
    lead = "Speed-up over plain decoding in the same process, on" if timed else "Measured on"
    return [*columns.values(), f"{lead} {'; '.join(machines)}."]


def latex(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in LaTeX, of the packages ``booktabs`` alone; a rule between temperatures."""
    names = [heading.rpartition(" ") for heading in headings[2:]]
    columns = list(dict.fromkeys(name for name, *_ in names))
    width = len(names) // len(columns)
    spans = [f"\\multicolumn{{{width}}}{{c}}{{{_escaped(column)}}}" for column in columns]
    ends = [3 + width * (index + 1) - 1 for index in range(len(columns))]
    under = " ".join(f"\\cmidrule(lr){{{end - width + 1}-{end}}}" for end in ends)
    kinds = ["$\\tau$" if kind == "τ" else "Speed-up" for *_, kind in names]
    lines = [
        f"\\begin{{tabular}}{{ll{'r' * len(names)}}}", "\\toprule", f" & & {' & '.join(spans)} \\\\", under,
        f"$T$ & Method & {' & '.join(kinds)} \\\\",
    ]  # fmt: skip
    before = None
    for temperature, method, *cells in rows:
        lines += ["\\midrule"] if temperature != before else []
        shown = [cell.replace("x", "$\\times$") for cell in cells]
        lines.append(
            f"{temperature if temperature != before else ''} & {_escaped(method)} & {' & '.join(shown)} \\\\"
        )
        before = temperature
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


SPECIAL = {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}"}
SPECIAL |= {sign: f"\\{sign}" for sign in "&%$#_{}"}


def _escaped(text: str) -> str:
    return "".join(SPECIAL.get(sign, sign) for sign in text)
