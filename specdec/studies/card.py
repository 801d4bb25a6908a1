"""The card: what a study found, as one HTML page, Markdown and JSON."""

import base64
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from markdown_it import MarkdownIt

from specdec.report.contrasts import METHOD, distinct
from specdec.report.statistics import ALPHA
from specdec.report.tables import table, with_interval
from specdec.studies.figures import SEPARATOR, draw_figures, label_of, short_names
from specdec.studies.outcomes import ACCEPTANCE, FAMILIES, Json
from specdec.studies.reproduce import CARD, VERSION, manifest
from specdec.studies.results import read_record, results
from specdec.studies.study import FEWEST_SEEDS
from specdec.utils.config import words
from specdec.utils.files import staged_directory, write_json, write_text
from specdec.utils.text import how_many

HOW = (
    f"{METHOD}. They hold for this target, these prompts and this training. Primary contrasts were declared in the "
    "study file; their verdicts go by Holm's p-values over all of them and over nothing else. All else is exploratory: "
    "p-values as they are, for new questions, not for answers. Detectable is the true difference that four of five "
    "such studies find, from the noncentral t, with its range; of a primary contrast at 0.05 over their number, "
    "else at 0.05."
)
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 72rem; margin: 0 auto; padding: 1rem; }
h2 { margin-top: 2.2rem; border-bottom: 1px solid #bbb; }
table { display: block; overflow-x: auto; border-collapse: collapse; font-size: .86rem; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; vertical-align: top; }
img { max-width: 100%; }
pre { background: #f3f3f3; padding: .6rem; overflow-x: auto; }
@media print { body { max-width: none; font-size: 10pt; } table { font-size: 7.5pt; } img { break-inside: avoid; } }
"""


def write_card(directory: Path) -> Path:
    """Write the card of the study in ``directory``, finished or not, and return the card's directory.

    Raises:
        ValueError: there is no study, or a measurement cannot be read.
    """
    study = read_record(directory)
    out = directory / "card"
    found = {"version": VERSION, **results(study), "manifest": manifest(study)}
    with staged_directory(out, replace=True) as folder:
        text = "\n".join(_document(found, draw_figures(found, folder), str(out / CARD)))
        write_json(folder / CARD, found)
        write_text(folder / "card.md", text)
        write_text(folder / "card.html", page(text, folder, f"Study {found['study']['name']}"))
    return out


def page(text: str, folder: Path, title: str) -> str:
    """The Markdown as one page with its pictures in it, which asks for nothing outside."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = re.sub(
        "<h2>(.*?)</h2>", lambda found: f'<h2 id="{_anchor(found[1])}">{found[1]}</h2>', body
    )

    def embedded(found: re.Match[str]) -> str:
        return f'src="data:image/png;base64,{base64.b64encode((folder / found[1]).read_bytes()).decode()}"'

    body = re.sub(r'(?<=<img )src="(\w+\.png)"', embedded, body)
    head = f'<meta charset="utf-8"><title>{_plain(title)}</title><style>{STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}</body></html>\n'


def _anchor(title: str) -> str:
    """As GitHub makes it of a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _document(
    found: Json, figures: Mapping[str, Sequence[tuple[str, str]]], where: str
) -> Iterator[str]:
    """The card in Markdown, by line, from ``figures`` (files and captions by section) and the path of ``card.json``."""
    study = found["study"]
    axes = "; ".join(f"{axis}: {', '.join(levels)}" for axis, levels in study["axes"].items())
    design = f"{study['design'].replace('_', ' ')} of {how_many(len(found['arms']), 'arm')}"
    seeds = ", ".join(map(str, study["seeds"]))
    names = short_names(found["arms"])
    fits = [[names[arm], seed, f"{fit['steps']:,}", f"{fit['seconds']:.0f}" if fit["seconds"] else "in another study"]
            for arm, runs in found["training"].items() for seed, fit in runs.items()]  # fmt: skip
    sections = {
        "Primary contrasts": _primary(found),
        "What limits this": [f"- {_plain(line)}" for line in _cautions(found)],
        "Exploratory differences": _exploratory(found),
        "Not told apart": _nulls(found),
        "Arms": _arms(found),
        **{family.capitalize(): _family(found, family) for family in FAMILIES},
        "By draft position and draft step": [f"The numbers are in {CARD}."]
        if found["curves"]
        else [],
        "Training": _table(["Arm", "Seed", "Steps", "Seconds"], fits),
        "How the numbers were made": [HOW, "", *_origin(found["manifest"], where)],
    }
    told = {title: list(lines) for title, lines in sections.items()}
    yield from (f"# Study {_plain(study['name'])}", "")
    yield _plain(f"Axes: {axes}. Design: {design}, seeds {seeds}. Baseline: {study['baseline']}.")
    yield from ("", f"Arms go by their levels alone: {_plain(SEPARATOR.join(study['axes']))}.", "")
    yield from (f"- [{title}](#{_anchor(title)})" for title, lines in told.items() if lines)
    for title, lines in told.items():
        if lines:
            pictures = (line for file, text in figures.get(title, ())
                        for line in (f"![{_plain(text)}]({file})", "", f"*{_plain(text)}*", ""))  # fmt: skip
            yield from ("", f"## {title}", "", *pictures, *lines)


def _primary(found: Json) -> Iterator[str]:
    """The declared contrasts and what came of them, in a sentence and a table."""
    rows = found["primary"]
    if not rows:
        yield "The study declares no primary contrasts: everything here is exploratory."
        return
    if found["study"]["primary_changed"]:
        yield from (
            "**These contrasts were changed after something had been measured: they are not beforehand.**",
            "",
        )
    finds = sum(row["verdict"] in ("higher", "lower") for row in rows)
    yield f"Declared in the study file: {how_many(len(rows), 'contrast')}; told apart (Holm's p < 0.05): {finds}."
    yield ""
    heads = [
        "Outcome",
        "Contrast",
        "Difference",
        "Detectable",
        "p",
        "p (Holm)",
        "Expected",
        "Found",
    ]
    table_rows = []
    for row in rows:
        tested = [
            _p(row["p_value"]),
            _p(row["p_holm"]),
            row["expect"] or "-",
            row["verdict"] + _expected(row),
        ]
        table_rows.append(
            [row["quantity"], label_of(row, found), _difference(row), _detectable(row), *tested]
        )
    yield from _table(heads, table_rows, left=2)


def _expected(row: Json) -> str:
    if row["expect"] is None or row["verdict"] not in ("higher", "lower"):
        return ""
    return ", as expected" if row["verdict"] == row["expect"] else ", against expectation"


def _tested(found: Json) -> list[Json]:
    """The exploratory tests, an effect under two names once."""
    rows = [row for row in (*found["comparisons"], *found["effects"]) if row["p_value"] is not None]
    return [same[0] for same in distinct(rows)]


def _exploratory(found: Json) -> Iterator[str]:
    """Differences that may be looked into: p below 0.05, not corrected."""
    tested = _tested(found)
    rows = sorted((row for row in tested if row["p_value"] < ALPHA), key=lambda row: row["p_value"])
    if not tested:
        yield from ([] if found["primary"] else ["No comparison could be made."])
        return
    yield (f"Not declared beforehand, and not corrected: {how_many(len(tested), 'test')}, of which {len(rows)} have "
           f"p < 0.05; about {ALPHA * len(tested):.0f} would if nothing differed.")  # fmt: skip
    yield ""
    yield from _table(["Quantity", "Contrast", "Difference", "Ratio", "p"], [
        [row["quantity"], label_of(row, found), _difference(row), _interval(row.get("ratio")), _p(row["p_value"])]
        for row in rows], left=2)  # fmt: skip


def _nulls(found: Json) -> Iterator[str]:
    """All that was tested and not told apart from none, and what could have been."""
    primary = [row for row in found["primary"] if row["verdict"] == "not told apart"]
    rows = [row for row in _tested(found) if row["p_value"] >= ALPHA]
    yield from _table(["Quantity", "Contrast", "Difference", "Detectable", "p", "Kind"], [
        [row["quantity"], label_of(row, found), _difference(row), _detectable(row), _p(row["p_value"]),
         "primary" if row in primary else "exploratory"] for row in (*primary, *rows)], left=2)  # fmt: skip


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Iterator[str]:
    if rows := [[_plain(text) for text in row] for row in rows]:
        yield from (*table(heads, rows, left), "")


def _arms(found: Json) -> Iterator[str]:
    rows = []
    names = short_names(found["arms"])
    for arm in found["arms"]:
        states = [[state["name"] for state in run["states"].values()] for run in arm["runs"]]
        done = sum(set(each) <= {"done"} for each in states)
        odd = sorted({name for each in states for name in each} - {"done"})
        tokens = "-" if arm["tokens"] is None else f"{arm['tokens']:,}"
        rows.append([names[arm["name"]], "; ".join(arm["differences"]) or "this is the baseline",
                     f"{arm['trained_parameters']:,}", tokens,
                     f"{done} of {len(states)} done" + (f" ({', '.join(odd)})" if odd else "")])  # fmt: skip
    yield from _table(
        ["Arm", "Changes against the baseline", "Trained parameters", "Tokens", "Runs"],
        rows,
        left=2,
    )


def _family(found: Json, family: str) -> Iterator[str]:
    """Of acceptance length, drift or robustness: the values of all arms."""
    digits = _digits(family)
    names = short_names(found["arms"])
    rows = [[one["name"], names[arm], _interval(own, digits),
             ", ".join(f"{v:.{digits}f}" for v in own["by_seed"].values()), str(own["prompts"])]
            for one in found["quantities"] if one["family"] == family for arm, own in one["arms"].items()]  # fmt: skip
    yield from _table(["Quantity", "Arm", "Value", "By seed", "Prompts"], rows, left=2)


def _origin(manifest: Json, where: str) -> Iterator[str]:
    """The code and machines of the fits, and the command that trains an arm again."""
    fits = [
        run["fit"]["provenance"] or {}
        for runs in manifest["runs"].values()
        for run in runs.values()
    ]
    rows = []
    for name in ("git_commit", "git_dirty", "versions", "platform", "cpu", "gpus"):
        if known := {words(fit[name]) for fit in fits if fit.get(name)}:
            rows.append([f"Fits: {name.replace('_', ' ')}", "; ".join(sorted(known))])
    yield from _table(
        ["What", "Value"], [*rows, ["Card made", manifest["provenance"]["date"]]], left=2
    )
    for arm, runs in [*manifest["runs"].items()][:1]:
        command = shlex.join(
            ["specdec", "sweep", where, "--reproduce", arm, "--seed", next(iter(runs))]
        )
        yield from ("An arm is trained again, and its losses compared bit by bit, by this command, which reads the "
                    "features and prompts in the study's folder:", "", "```", command, "```", "")  # fmt: skip


def _cautions(found: Json) -> Iterator[str]:
    """What is missing from the study, or limits what its numbers say."""
    rows = [
        row
        for row in (*found["primary"], *found["comparisons"], *found["effects"])
        if row["value"] is not None
    ]
    measured = {arm for one in found["quantities"] for arm in one["arms"]}
    for arm in found["arms"]:
        for run in arm["runs"]:
            for kind, state in run["states"].items():
                if state["name"] != "done":
                    why = f": {state['message']}" if state["message"] else ""
                    yield f"{arm['name']}, seed {run['seed']}: {kind} {state['name']}{why}."
        if arm["name"] not in measured:
            yield f"{arm['name']} is not compared: nothing of it has been measured."
    if uneven := list(dict.fromkeys(row["quantity"] for row in rows if row["spreads_differ"])):
        yield ("Arms differ in how much their trainings vary (Bartlett's p < 0.1): the error of each contrast is its "
               f"own, with fewer degrees of freedom: {'; '.join(uneven)}.")  # fmt: skip
    if rows and min(row["seeds"] for row in rows) < FEWEST_SEEDS:
        yield ("Some comparisons are of one or two seeds: of one, intervals are over prompts alone and say nothing of "
               "another training; of two, a t-interval of one degree of freedom is very wide.")  # fmt: skip
    yield from (f"Unequal by permission: {line}." for line in found["study"]["unequal"])
    yield from (f"{line}." for line in found["looping"])
    sizes = [arm["trained_parameters"] for arm in found["arms"]]
    if max(sizes) > 1.01 * min(sizes):
        yield "The arms train unequal numbers of parameters: size may be what is seen."


def _interval(found: Json | None, digits: int = 2, sign: str = "") -> str:
    """A figure with its interval in brackets."""
    return (
        "-"
        if not found
        else with_interval(
            found["value"], found["low"], found["high"], f"{{:{sign}.{digits}f}}".format
        )
    )


def _digits(family: str) -> int:
    return 2 if family == ACCEPTANCE else 3


def _difference(row: Json) -> str:
    return "not measured" if row["value"] is None else _interval(row, _digits(row["family"]), "+")


def _detectable(row: Json) -> str:
    """The size with its range."""
    size = row.get("detectable")
    if not size:
        return "-"
    value, low, high = size
    return with_interval(value, low, high, f"{{:.{_digits(row['family'])}f}}".format)


def _p(value: float | None) -> str:
    """To two figures."""
    if value is None:
        return "-"
    return "< 0.001" if value < 0.001 else f"{value:.2g}" if value < 0.095 else f"{value:.2f}"


def _plain(text: str) -> str:
    """Text that Markdown takes for text, in a table too: names hold underscores, stars and angle brackets."""
    for sign, entity in (
        ("&", "&amp;"),
        ("*", "&#42;"),
        ("<", "&lt;"),
        ("`", "&#96;"),
        ("__", "&#95;&#95;"),
    ):
        text = text.replace(sign, entity)
    return " ".join(text.split())
