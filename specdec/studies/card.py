"""The card: what a study found, as one HTML page, Markdown and JSON."""

import base64
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from markdown_it import MarkdownIt

from specdec.report.contrasts import METHOD, distinct
from specdec.report.statistics import ALPHA
from specdec.report.tables import markdown_table, with_interval
from specdec.studies.figures import SEPARATOR, draw_figures, label_of, short_names
from specdec.studies.outcomes import ACCEPTANCE, FAMILIES, Json
from specdec.studies.reproduce import CARD, VERSION, manifest
from specdec.studies.results import read_record, results
from specdec.studies.study import FEWEST_SEEDS
from specdec.utils.config import to_text
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
    card = {"version": VERSION, **results(study), "manifest": manifest(study)}
    with staged_directory(out, replace=True) as folder:
        text = "\n".join(_document(card, draw_figures(card, folder), str(out / CARD)))
        write_json(folder / CARD, card)
        write_text(folder / "card.md", text)
        write_text(folder / "card.html", page(text, folder, f"Study {card['study']['name']}"))
    return out


def page(text: str, folder: Path, title: str) -> str:
    """The Markdown as one page with its pictures in it, which asks for nothing outside."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = re.sub(
        "<h2>(.*?)</h2>", lambda match: f'<h2 id="{_anchor(match[1])}">{match[1]}</h2>', body
    )

    def embedded(match: re.Match[str]) -> str:
        return f'src="data:image/png;base64,{base64.b64encode((folder / match[1]).read_bytes()).decode()}"'

    body = re.sub(r'(?<=<img )src="(\w+\.png)"', embedded, body)
    head = f'<meta charset="utf-8"><title>{_plain(title)}</title><style>{STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}</body></html>\n'


def _anchor(title: str) -> str:
    """Return the anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _document(
    card: Json, figures: Mapping[str, Sequence[tuple[str, str]]], where: str
) -> Iterator[str]:
    """The card in Markdown, by line, from ``figures`` (files and captions by section) and the path of ``card.json``."""
    study = card["study"]
    axes = "; ".join(f"{axis}: {', '.join(levels)}" for axis, levels in study["axes"].items())
    design = f"{study['design'].replace('_', ' ')} of {how_many(len(card['arms']), 'arm')}"
    seeds = ", ".join(map(str, study["seeds"]))
    names = short_names(card["arms"])
    fits = []
    for arm, runs in card["training"].items():
        for seed, fit in runs.items():
            seconds = f"{fit['seconds']:.0f}" if fit["seconds"] else "in another study"
            fits.append([names[arm], seed, f"{fit['steps']:,}", seconds])
    sections = {
        "Primary contrasts": _primary(card),
        "What limits this": [f"- {_plain(line)}" for line in _cautions(card)],
        "Exploratory differences": _exploratory(card),
        "Not told apart": _nulls(card),
        "Arms": _arms(card),
        **{family.capitalize(): _family(card, family) for family in FAMILIES},
        "By draft position and draft step": [f"The numbers are in {CARD}."]
        if card["curves"]
        else [],
        "Training": _table(["Arm", "Seed", "Steps", "Seconds"], fits),
        "How the numbers were made": [HOW, "", *_origin(card["manifest"], where)],
    }
    lines_of = {title: list(lines) for title, lines in sections.items()}
    yield from (f"# Study {_plain(study['name'])}", "")
    yield _plain(f"Axes: {axes}. Design: {design}, seeds {seeds}. Baseline: {study['baseline']}.")
    yield from ("", f"Arms go by their levels alone: {_plain(SEPARATOR.join(study['axes']))}.", "")
    yield from (f"- [{title}](#{_anchor(title)})" for title, lines in lines_of.items() if lines)
    for title, lines in lines_of.items():
        if not lines:
            continue
        yield from ("", f"## {title}", "")
        for file, caption in figures.get(title, ()):
            text = _plain(caption)
            yield from (f"![{text}]({file})", "", f"*{text}*", "")
        yield from lines


def _primary(card: Json) -> Iterator[str]:
    """The declared contrasts and what came of them, in a sentence and a table."""
    rows = card["primary"]
    if not rows:
        yield "The study declares no primary contrasts: everything here is exploratory."
        return
    if card["study"]["primary_changed"]:
        yield from (
            "**These contrasts were changed after something had been measured: they are not beforehand.**",
            "",
        )
    told_apart = sum(row["verdict"] in ("higher", "lower") for row in rows)
    yield f"Declared in the study file: {how_many(len(rows), 'contrast')}; told apart (Holm's p < 0.05): {told_apart}."
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
    table_rows = [
        [
            row["quantity"],
            label_of(row, card),
            _difference(row),
            _detectable(row),
            _p(row["p_value"]),
            _p(row["p_holm"]),
            row["expect"] or "-",
            row["verdict"] + _expected(row),
        ]
        for row in rows
    ]
    yield from _table(heads, table_rows, left=2)


def _expected(row: Json) -> str:
    if row["expect"] is None or row["verdict"] not in ("higher", "lower"):
        return ""
    return ", as expected" if row["verdict"] == row["expect"] else ", against expectation"


def _tested(card: Json) -> list[Json]:
    """The exploratory tests, an effect under two names once."""
    rows = [row for row in (*card["comparisons"], *card["effects"]) if row["p_value"] is not None]
    return [same[0] for same in distinct(rows)]


def _exploratory(card: Json) -> Iterator[str]:
    """Differences that may be looked into: p below 0.05, not corrected."""
    tested = _tested(card)
    rows = sorted((row for row in tested if row["p_value"] < ALPHA), key=lambda row: row["p_value"])
    if not tested:
        yield from ([] if card["primary"] else ["No comparison could be made."])
        return
    yield (f"Not declared beforehand, and not corrected: {how_many(len(tested), 'test')}, of which {len(rows)} have "
           f"p < 0.05; about {ALPHA * len(tested):.0f} would if nothing differed.")  # fmt: skip
    yield ""
    heads = ["Quantity", "Contrast", "Difference", "Ratio", "p"]
    cells = [
        [
            row["quantity"],
            label_of(row, card),
            _difference(row),
            _interval(row.get("ratio")),
            _p(row["p_value"]),
        ]
        for row in rows
    ]
    yield from _table(heads, cells, left=2)


def _nulls(card: Json) -> Iterator[str]:
    """All that was tested and not told apart from none, and what could have been."""
    primary = [row for row in card["primary"] if row["verdict"] == "not told apart"]
    exploratory = [row for row in _tested(card) if row["p_value"] >= ALPHA]
    kinds = ["primary"] * len(primary) + ["exploratory"] * len(exploratory)
    heads = ["Quantity", "Contrast", "Difference", "Detectable", "p", "Kind"]
    cells = []
    for row, kind in zip([*primary, *exploratory], kinds, strict=True):
        texts = [_difference(row), _detectable(row), _p(row["p_value"])]
        cells.append([row["quantity"], label_of(row, card), *texts, kind])
    yield from _table(heads, cells, left=2)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Iterator[str]:
    if rows := [[_plain(text) for text in row] for row in rows]:
        yield from (*markdown_table(heads, rows, left), "")


def _arms(card: Json) -> Iterator[str]:
    rows = []
    names = short_names(card["arms"])
    for arm in card["arms"]:
        states = [{state["name"] for state in run["states"].values()} for run in arm["runs"]]
        done = sum(names_of_run <= {"done"} for names_of_run in states)
        others = sorted(set().union(*states) - {"done"})
        counts = f"{done} of {len(states)} done" + (f" ({', '.join(others)})" if others else "")
        changes = "; ".join(arm["differences"]) or "this is the baseline"
        parameters = f"{arm['trained_parameters']:,}"
        tokens = "-" if arm["tokens"] is None else f"{arm['tokens']:,}"
        rows.append([names[arm["name"]], changes, parameters, tokens, counts])
    yield from _table(
        ["Arm", "Changes against the baseline", "Trained parameters", "Tokens", "Runs"],
        rows,
        left=2,
    )


def _family(card: Json, family: str) -> Iterator[str]:
    """Yield the table of all arms' values in acceptance length, drift or robustness."""
    digits = _digits(family)
    names = short_names(card["arms"])
    rows = []
    for metric in card["quantities"]:
        if metric["family"] != family:
            continue
        for arm, value in metric["arms"].items():
            by_seed = ", ".join(f"{number:.{digits}f}" for number in value["by_seed"].values())
            prompts = str(value["prompts"])
            rows.append([metric["name"], names[arm], _interval(value, digits), by_seed, prompts])
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
        if known := {to_text(fit[name]) for fit in fits if fit.get(name)}:
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


def _cautions(card: Json) -> Iterator[str]:
    """Yield what is missing from the study, or limits what its numbers say."""
    rows = [
        row
        for row in (*card["primary"], *card["comparisons"], *card["effects"])
        if row["value"] is not None
    ]
    measured = {arm for metric in card["quantities"] for arm in metric["arms"]}
    for arm in card["arms"]:
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
    yield from (f"Unequal by permission: {line}." for line in card["study"]["unequal"])
    yield from (f"{line}." for line in card["looping"])
    sizes = [arm["trained_parameters"] for arm in card["arms"]]
    if max(sizes) > 1.01 * min(sizes):
        yield "The arms train unequal numbers of parameters: size may be what is seen."


def _interval(estimate: Json | None, digits: int = 2, sign: str = "") -> str:
    """Return a figure with its interval in brackets."""
    if not estimate:
        return "-"
    number = f"{{:{sign}.{digits}f}}".format
    return with_interval(estimate["value"], estimate["low"], estimate["high"], number)


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


def _p(p_value: float | None) -> str:
    """Return a p-value to two figures."""
    if p_value is None:
        return "-"
    if p_value < 0.001:
        return "< 0.001"
    return f"{p_value:.2g}" if p_value < 0.095 else f"{p_value:.2f}"


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
