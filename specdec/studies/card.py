"""The card: what a study found, as one HTML page, Markdown and JSON."""

import base64
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from markdown_it import MarkdownIt

from specdec.evaluation.style import bracketed, table
from specdec.studies.figures import draw
from specdec.studies.reproduce import CARD, VERSION, manifest
from specdec.studies.results import ACCEPTANCE, FAMILIES, Json, read_record, results
from specdec.studies.statistics import METHOD, distinct
from specdec.studies.study import FEWEST_SEEDS
from specdec.utils.config import words
from specdec.utils.files import staged_directory, write_json, write_text
from specdec.utils.text import how_many

HOW = (
    f"{METHOD}. They hold for this target, these prompts and this training, and are not corrected for the number of "
    "comparisons; verdicts go by Holm's p-values: comparisons of acceptance length, of drift and of robustness are a "
    "family each, and so are the effects on each. Detectable is the difference that four of five such studies would "
    "find (p < 0.05, uncorrected)."
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
    study, out = read_record(directory), directory / "card"
    found = {"version": VERSION, **results(study), "manifest": manifest(study)}
    with staged_directory(out, replace=True) as folder:
        text = "\n".join(_document(found, draw(found, folder), str(out / CARD)))
        write_json(folder / CARD, found)
        write_text(folder / "card.md", text)
        write_text(folder / "card.html", page(text, folder, f"Study {found['study']['name']}"))
    return out


def page(text: str, folder: Path, title: str) -> str:
    """The Markdown as one page with its pictures in it, which asks for nothing outside."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)

    def embedded(found: re.Match[str]) -> str:
        return f'src="data:image/png;base64,{base64.b64encode((folder / found[1]).read_bytes()).decode()}"'

    body = re.sub(r'(?<=<img )src="(\w+\.png)"', embedded, body)
    head = f'<meta charset="utf-8"><title>{_plain(title)}</title><style>{STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}</body></html>\n'


def _document(found: Json, figures: Mapping[str, Sequence[tuple[str, str]]], where: str) -> Iterator[str]:
    """The card in Markdown, by line, from ``figures`` (files and captions by section) and the path of ``card.json``."""
    study = found["study"]
    axes = "; ".join(f"{axis}: {', '.join(levels)}" for axis, levels in study["axes"].items())
    design = f"{study['design'].replace('_', ' ')} of {how_many(len(found['arms']), 'arm')}"
    seeds = ", ".join(map(str, study["seeds"]))
    yield from (f"# Study {_plain(study['name'])}", "")
    yield _plain(f"Axes: {axes}. Design: {design}, seeds {seeds}. Baseline: {study['baseline']}.")
    yield from ("", "## What this supports, and what not", "")
    yield from (f"- {_plain(line)}" for line in statements(found) or ["No comparison could be made."])
    if cautions := list(_cautions(found)):
        yield from ("", "Cautions:", "", *(f"- {_plain(line)}" for line in cautions))
    yield from ("", "## Arms", "", *_arms(found))
    sections = [(family, family.capitalize(), list(_family(found, family))) for family in FAMILIES]
    curves = [f"The numbers are in {CARD}.", ""] if found["curves"] else []
    sections.append(("curves", "By draft position and draft step", curves))
    for section, title, lines in sections:
        if lines:
            pictures = (line for file, text in figures.get(section, ())
                        for line in (f"![{_plain(text)}]({file})", "", f"*{_plain(text)}*", ""))  # fmt: skip
            yield from (f"## {title}", "", *pictures, *lines)
    fits = [[arm, seed, f"{fit['steps']:,}", f"{fit['seconds']:.0f}"]
            for arm, runs in found["training"].items() for seed, fit in runs.items()]  # fmt: skip
    yield from ("## Training", "", *_table(["Arm", "Seed", "Steps", "Seconds"], fits))
    yield from ("## How the numbers were made", "", HOW, "", *_origin(found["manifest"], where))


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Iterator[str]:
    if rows := [[_plain(text) for text in row] for row in rows]:
        yield from (*table(heads, rows, left), "")


def _arms(found: Json) -> Iterator[str]:
    rows = []
    for arm in found["arms"]:
        states = [[state["name"] for state in run["states"].values()] for run in arm["runs"]]
        done = sum(set(each) <= {"done"} for each in states)
        odd = sorted({name for each in states for name in each} - {"done"})
        tokens = "-" if arm["tokens"] is None else f"{arm['tokens']:,}"
        rows.append([arm["name"], "; ".join(arm["differences"]) or "this is the baseline",
                     f"{arm['trained_parameters']:,}", tokens,
                     f"{done} of {len(states)} done" + (f" ({', '.join(odd)})" if odd else "")])  # fmt: skip
    yield from _table(["Arm", "Changes against the baseline", "Trained parameters", "Tokens", "Runs"], rows, left=2)


def _family(found: Json, family: str) -> Iterator[str]:
    """Of acceptance length, drift or robustness: values, differences from the baseline, effects."""
    digits = 2 if family == ACCEPTANCE else 3
    rows = [[one["name"], arm, _interval(own, digits), ", ".join(f"{v:.{digits}f}" for v in own["by_seed"].values()),
             str(own["prompts"])]
            for one in found["quantities"] if one["family"] == family for arm, own in one["arms"].items()]  # fmt: skip
    yield from _table(["Quantity", "Arm", "Value", "By seed", "Prompts"], rows, left=2)
    tests = ["p", "p (Holm)", "Verdict"]
    rows = [[row["quantity"], row["arm"], _interval(row, digits, "+"), _interval(row.get("ratio")),
             f"{row['detectable']:.2f}" if row.get("detectable") else "-", *_tested(row)]
            for row in found["comparisons"] if row["family"] == family]  # fmt: skip
    yield from _table(["Quantity", "Arm", "Difference", "Ratio", "Detectable", *tests], rows, left=2)
    rows = [[row["quantity"], _effect(row, found), _interval(row, digits, "+"), *_tested(row)]
            for row in found["effects"] if row["family"] == family]  # fmt: skip
    yield from _table(["Quantity", "Effect", "Difference", *tests], rows, left=2)


def _origin(manifest: Json, where: str) -> Iterator[str]:
    """The code and machines of the fits, and the command that trains an arm again."""
    fits = [run["fit"]["provenance"] or {} for runs in manifest["runs"].values() for run in runs.values()]
    rows = []
    for name in ("git_commit", "git_dirty", "versions", "platform", "cpu", "gpus"):
        if known := {words(fit[name]) for fit in fits if fit.get(name)}:
            rows.append([f"Fits: {name.replace('_', ' ')}", "; ".join(sorted(known))])
    yield from _table(["What", "Value"], [*rows, ["Card made", manifest["provenance"]["date"]]], left=2)
    for arm, runs in [*manifest["runs"].items()][:1]:
        command = shlex.join(["specdec", "sweep", where, "--reproduce", arm, "--seed", next(iter(runs))])
        yield from ("An arm is trained again, and its losses compared bit by bit, by this command, which reads the "
                    "features and prompts in the study's folder:", "", "```", command, "```", "")  # fmt: skip


def statements(found: Json) -> list[str]:
    """A sentence for every comparison of acceptance length, and for every difference in drift or robustness that is
    told apart: effects and interactions where the design has them, else comparisons with the baseline.
    """
    lengths = [row for row in found["comparisons"] if row["family"] == ACCEPTANCE]
    effects = [row for row in found["effects"] if row["family"] != ACCEPTANCE]
    known = {row["quantity"] for row in effects}
    others = [row for row in found["comparisons"] if row["family"] != ACCEPTANCE and row["quantity"] not in known]
    tested = [row for row in (*effects, *others) if row["verdict"] != "not tested"]
    different = [row for row in tested if row["verdict"] != "not told apart"]
    out = []
    for row in (*lengths, *different):
        who = row["arm"] if "arm" in row else _effect(row, found)
        by = _interval(row, 2 if row["family"] == ACCEPTANCE else 3, "+")
        out.append(f"{who}: {row['quantity']} is {row['verdict']}, by {by} (Holm's p: {_tested(row)[1]}).")
    if left := len(distinct(tested)) - len(distinct(different)):
        of = f"{left} {'other ' if different else ''}differences of {len(distinct(tested))} tested"
        out.append(f"Drift and robustness: {of} are not told apart from none.")
    return out


def _cautions(found: Json) -> Iterator[str]:
    """What is missing from the study, or limits what its numbers say."""
    base, rows = found["study"]["baseline"], [*found["comparisons"], *found["effects"]]
    compared = {base, *(row["arm"] for row in found["comparisons"] if row["family"] == ACCEPTANCE)}
    for arm in found["arms"]:
        for run in arm["runs"]:
            for kind, state in run["states"].items():
                if state["name"] != "done":
                    why = f": {state['message']}" if state["message"] else ""
                    yield f"{arm['name']}, seed {run['seed']}: {kind} {state['name']}{why}."
        if arm["name"] not in compared:
            yield f"{arm['name']} is not compared: it and the baseline have no evaluations with one draft shape."
    if rows and min(row["seeds"] for row in rows) < FEWEST_SEEDS:
        yield ("Some comparisons are of one or two seeds: of one, intervals are over prompts alone and say nothing of "
               "another training; of two, a t-interval of one degree of freedom is very wide.")  # fmt: skip
    yield from (f"Unequal by permission: {line}." for line in found["study"]["unequal"])
    sizes = [arm["trained_parameters"] for arm in found["arms"]]
    if max(sizes) > 1.01 * min(sizes):
        yield "The arms train unequal numbers of parameters: size may be what is seen."


def _interval(found: Json | None, digits: int = 2, sign: str = "") -> str:
    """A figure with its interval in brackets."""
    return "-" if not found else bracketed(found["value"], found["low"], found["high"], f"{{:{sign}.{digits}f}}".format)


def _tested(row: Json) -> list[str]:
    """Both p-values to two figures, and the verdict."""

    def p(value: float | None) -> str:
        if value is None:
            return "-"
        return "< 0.001" if value < 0.001 else f"{value:.2g}" if value < 0.095 else f"{value:.2f}"

    return [p(row["p_value"]), p(row["p_holm"]), row["verdict"]]


def _effect(row: Json, found: Json) -> str:
    """An interaction, or a main effect with the level that it is against."""
    if " x " in row["effect"]:
        return f"{row['effect']}, interaction"
    axis = row["effect"].split("=", 1)[0]
    levels = next(arm["levels"] for arm in found["arms"] if arm["is_baseline"])
    return f"{row['effect']} against {axis}={levels[axis]}"


def _plain(text: str) -> str:
    """Text that Markdown takes for text, in a table too: names hold underscores, stars and angle brackets."""
    for sign, entity in (("&", "&amp;"), ("*", "&#42;"), ("<", "&lt;"), ("`", "&#96;"), ("__", "&#95;&#95;")):
        text = text.replace(sign, entity)
    return " ".join(text.split())
