"""``specdec card``: what a study found, as one HTML page, Markdown, a LaTeX table and JSON.

A card's directory is whole or as it was, and is never written over what somebody edited.
"""

import base64
import logging
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jinja2

from specdec import __version__
from specdec.evaluation.style import table
from specdec.studies.figures import Drawn, draw
from specdec.studies.record import read_record
from specdec.studies.reproduce import CARD, VERSION, inputs, manifest
from specdec.studies.results import ACCEPTANCE, DRIFT, FAMILIES, ROBUSTNESS, results
from specdec.studies.statements import cautions, effect_name, interval, number, p_value, statements
from specdec.utils.files import SUMS, check_sums, read_json, staged_directory, write_json, write_sums, write_text

log = logging.getLogger(__name__)

Json = dict[str, Any]
FIGURES, DETECT = "figures", 0.1


def card(directory: Path, *, out: Path | None = None, force: bool = False, detect: float = DETECT) -> None:
    """Write what a study found, for readers and for machines; what is unfinished is shown as such.

    Example: specdec card runs/studies/fusion

    Args:
        directory: the study's directory, finished or not
        out: the card's directory; card/ in the study's if not given
        force: write it again, over an edited one too
        detect: a difference in acceptance length that further studies are to see; prompts for it are worked out

    Raises:
        ValueError: there is no study, a measurement cannot be read, or the card was edited.
    """
    sys.stdout.write(f"{write_card(directory, out, force=force, detect=detect) / 'card.html'}\n")


def write_card(directory: Path, out: Path | None = None, *, force: bool = False, detect: float = DETECT) -> Path:
    """Write the card of the study in ``directory``, and return the card's directory.

    Where nothing that it was made from has changed, it stays as it is.

    Raises:
        ValueError: as :func:`card`.
    """
    out = out or directory / "card"
    study = read_record(directory)
    files = inputs(study)
    made_from = {"specdec": __version__, "version": VERSION, "detect": detect, "inputs": files}
    if out.exists() and not force:
        if not (out / SUMS).is_file():
            raise ValueError(f"{out} exists and is no card: choose another --out, or remove it")
        for folder in (out, out / FIGURES):
            check_sums(folder, "keep a copy elsewhere and give --force, or choose another --out")
        if read_json(out / CARD).get("made_from") == made_from:
            log.info("%s: nothing that it was made from has changed", out)
            return out
    found = {"version": VERSION, "made_from": made_from, **results(study, detect), "manifest": manifest(study, files)}
    with staged_directory(out, replace=True) as folder:
        (folder / FIGURES).mkdir()
        blocks = document(found, draw(found, folder / FIGURES), str(out / CARD))
        write_sums(folder / FIGURES)
        write_json(folder / CARD, found)
        write_text(folder / "card.md", markdown(blocks))
        write_text(folder / "card.html", page(blocks, folder, f"Study {found['study']['name']}"))
        write_text(folder / "card.tex", latex(found))
        write_sums(folder)
    return out


class Block(NamedTuple):
    """A heading, paragraph, list, table, figure or command, whatever it is written as; all text is plain."""

    kind: Literal["heading", "text", "list", "table", "figure", "command"]
    text: str = ""
    """The figure's caption."""
    level: int = 2
    items: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    """The first are the headings."""
    left: int = 1
    """Columns of words."""
    file: str = ""


def document(found: Json, figures: Sequence[Drawn], where: str) -> list[Block]:
    """The whole card.

    Args:
        figures: drawn ones.
        where: the path of ``card.json`` in commands.
    """
    study = found["study"]
    axes = "; ".join(f"{axis}: {', '.join(levels)}" for axis, levels in study["axes"].items())
    lead = (
        f"Axes: {axes}. Design: {study['design'].replace('_', ' ')}. {len(found['arms'])} arms, seeds "
        f"{', '.join(map(str, study['seeds']))}. Baseline: {study['baseline']}."
    )
    out = [Block("heading", f"Study {study['name']}", level=1), Block("text", lead)]
    out += [Block("heading", "What this supports, and what not"),
            Block("list", items=statements(found) or ["No comparison could be made."])]  # fmt: skip
    if points := cautions(found):
        out += [Block("text", "To be kept in mind:"), Block("list", items=points)]
    sections = [(family, family.capitalize(), list(_family(found, family))) for family in FAMILIES]
    sections += [("curves", "By draft position and draft step", list(_curve_tables(found)))]
    sections += [("training", "Training", list(_training(found)))]
    out += _arms(found)
    for about, title, blocks in sections:
        own = [Block("figure", one.caption, file=f"{FIGURES}/{one.file}") for one in figures if one.about == about]
        out += [Block("heading", title), *own, *blocks] if blocks else []
    return [*out, *_origin(found, where)]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Iterator[Block]:
    rows = list(rows)
    if rows:
        yield Block("table", rows=[heads, *rows], left=left)


def _arms(found: Json) -> Iterator[Block]:
    yield Block("heading", "Arms")
    rows = []
    for arm in found["arms"]:
        states = [[state["name"] for state in run["states"].values()] for run in arm["runs"]]
        done = sum(set(each) <= {"done"} for each in states)
        odd = sorted({name for each in states for name in each} - {"done"})
        rows.append([arm["name"], "; ".join(arm["differences"]) or "this is the baseline",
                     _whole(arm["trained_parameters"]), _whole(arm["tokens"]),
                     f"{done} of {len(states)} done" + (f" ({', '.join(odd)})" if odd else "")])  # fmt: skip
    yield from _table(["Arm", "Changes against the baseline", "Trained parameters", "Tokens", "Runs"], rows, left=2)


def _family(found: Json, family: str) -> Iterator[Block]:
    """Of acceptance length, drift or robustness: values, differences from the baseline, effects, power."""
    digits = 3 if family in (DRIFT, ROBUSTNESS) else 2
    rows = [[one["name"], arm, interval(own, digits), ", ".join(number(v, digits) for v in own["by_seed"].values()),
             str(own["prompts"])]
            for one in found["quantities"] if one["family"] == family for arm, own in one["arms"].items()]  # fmt: skip
    yield from _table(["Quantity", "Arm", "Value", "By seed", "Prompts"], rows, left=2)
    compared = [row for row in found["comparisons"] if row["family"] == family]
    tests = ["Difference", "Ratio", "p", "p (Holm)", "p (BH)", "Verdict"]
    yield from _table(["Quantity", "Arm", *tests], (
        [row["quantity"], row["arm"], interval(row, digits, True), interval(row.get("ratio")), *_tested(row)]
        for row in compared
    ), left=2)  # fmt: skip
    yield from _table(["Quantity", "Effect", "Kind", "Difference", *tests[2:]], (
        [row["quantity"], effect_name(row, found), row["kind"], interval(row, digits, True), *_tested(row)]
        for row in found["effects"] if row["family"] == family
    ), left=3)  # fmt: skip
    if plans := [row for row in compared if row.get("prompts_needed")]:
        counts = list(dict.fromkeys(count for row in plans for count in row["prompts_needed"]))
        yield Block("text", (
            "Detectable is the difference that four of five such studies would find (p < 0.05, uncorrected). The last "
            f"columns: prompts with which a true difference of {found['statistics']['detect']:g} would be found as "
            "often, by number of seeds; a dash where no number of prompts makes up for how much trainings vary."
        ))  # fmt: skip
        needed = [[_whole(row["prompts_needed"].get(count)) for count in counts] for row in plans]
        rows = [[row["quantity"], row["arm"], number(row["detectable"]), *own]
                for row, own in zip(plans, needed, strict=True)]  # fmt: skip
        yield from _table(["Quantity", "Arm", "Detectable", *(f"{count} seeds" for count in counts)], rows, left=2)


def _tested(row: Json) -> list[str]:
    return [*(p_value(row[name]) for name in ("p_value", "p_holm", "p_bh")), row["verdict"]]


def _curve_tables(found: Json) -> Iterator[Block]:
    for curve in found["curves"]:
        deepest = max((len(own) for own in curve["arms"].values()), default=0)
        rows = [[name, *(interval(each, 3) for each in own), *[""] * (deepest - len(own))]
                for name, own in curve["arms"].items()]  # fmt: skip
        yield Block("text", f"{curve['title']} ({curve['unit']}), by {curve['axis']}")
        yield from _table(["Arm", *map(str, range(1, deepest + 1))], rows)


def _training(found: Json) -> Iterator[Block]:
    rows = []
    for name, fits in found["training"].items():
        for seed, fit in fits.items():
            memory = fit["peak_memory_bytes"]
            rows.append([name, seed, f"{fit['steps']:,}", number(fit["seconds"], 0),
                         number(fit["step_seconds"], 3), "-" if memory is None else f"{memory / 1e9:.2f}"])  # fmt: skip
    yield from _table(["Arm", "Seed", "Steps", "Seconds", "Seconds a step", "Peak memory (GB)"], rows)


def _whole(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _origin(found: Json, where: str) -> Iterator[Block]:
    """Where the numbers come from, and the command that trains an arm again."""
    made = found["manifest"]["provenance"]
    fits = [run["fit"]["provenance"] or {} for runs in found["manifest"]["runs"].values() for run in runs.values()]
    yield Block("heading", "How the numbers were made")
    yield Block("text", f"{found['statistics']['intervals']}. Corrections: {found['statistics']['corrections']}.")
    yield from _table(["What", "Value"], [
        ["Trained at", _each(map(_commit, fits))],
        ["Versions", _each(", ".join(f"{k} {v}" for k, v in one.get("versions", {}).items() if v) for one in fits)],
        ["Machine", _each(map(_machine, fits))],
        ["Study's command", (found["manifest"]["plan_provenance"] or {}).get("command", "-")],
        ["Card made", f"{made['date']}, {_commit(made)}, {_machine(made)}"],
        ["Inputs", f"{len(found['manifest']['inputs'])} files, their SHA-256 in {CARD}"],
    ], left=2)  # fmt: skip
    for arm, runs in list(found["manifest"]["runs"].items())[:1]:
        yield Block("text", (
            "An arm is trained again, and its losses compared bit by bit, by the command below. It reads the features "
            "and prompts in the study's folder: in another checkout the study's command has to be run first."
        ))  # fmt: skip
        yield Block("command", shlex.join(["specdec", "reproduce", where, "--arm", arm, "--seed", next(iter(runs))]))


def _each(found: Iterable[str]) -> str:
    """All that differ."""
    return "; ".join(sorted({one for one in found if one})) or "-"


def _machine(made: Json) -> str:
    return ", ".join(each for each in (made.get("cpu"), *(made.get("gpus") or ()), made.get("platform")) if each)


def _commit(made: Json) -> str:
    if not made.get("git_commit"):
        return "not from a checkout"
    return f"commit {made['git_commit']}{' with changes' if made.get('git_dirty') else ''}"


def markdown(blocks: Sequence[Block]) -> str:
    """For a reader of the repository."""
    return "\n".join(line for block in blocks for line in (*_markdown(block), ""))


def _markdown(block: Block) -> list[str]:
    match block.kind:
        case "heading":
            return [f"{'#' * block.level} {_plain(block.text)}"]
        case "list":
            return [f"- {_plain(item)}" for item in block.items]
        case "table":
            heads, *rows = [[_plain(each) for each in row] for row in block.rows]
            return table(heads, rows, block.left)
        case "figure":
            return [f"![{_plain(block.text)}]({block.file})", "", f"*{_plain(block.text)}*"]
        case "command":
            return ["```", block.text, "```"]
        case _:
            return [_plain(block.text)]


def _plain(text: str) -> str:
    """Text that Markdown takes for text, in a table too: names hold underscores, stars and angle brackets."""
    for sign, entity in (("&", "&amp;"), ("*", "&#42;"), ("<", "&lt;"), ("`", "&#96;"), ("__", "&#95;&#95;")):
        text = text.replace(sign, entity)
    return " ".join(text.split())


def page(blocks: Sequence[Block], folder: Path, title: str) -> str:
    """One page with its pictures in it, which asks for nothing outside."""
    source = Path(__file__).with_name("card.html.jinja").read_text(encoding="utf-8")
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    pictures = {b.file: base64.b64encode((folder / b.file).read_bytes()).decode() for b in blocks if b.file}
    return template.render(blocks=blocks, pictures=pictures, title=title)


def latex(found: Json) -> str:
    """The table of acceptance lengths and differences, for a paper; it wants the package booktabs."""
    compared = {(row["quantity"], row["arm"]): row for row in found["comparisons"]}
    rows = []
    for one in (each for each in found["quantities"] if each["family"] == ACCEPTANCE):
        for name, own in one["arms"].items():
            row = compared.get((one["name"], name))
            cells = [interval(own), interval(row, sign=True), p_value(row["p_holm"] if row else None)]
            math = ["--" if each == "-" else f"${each}$".replace(" ", "\\ ") for each in cells]
            rows.append(f"{' & '.join([_tex(one['panel']), _tex(name), *math])} \\\\")
    heads = "Draft shape & Arm & Acceptance length & Difference & $p$ (Holm) \\\\"
    head = ["% needs \\usepackage{booktabs}", "\\begin{tabular}{llrrr}", "\\toprule", heads, "\\midrule"]
    return "\n".join([*head, *rows, "\\bottomrule", "\\end{tabular}", ""])


def _tex(text: str) -> str:
    """Text that LaTeX takes for text."""
    signs = {sign: f"\\{sign}" for sign in "{}&%$#_"}
    signs |= {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "<": "\\textless{}",
              ">": "\\textgreater{}", "|": "\\textbar{}"}  # fmt: skip
    return "".join(signs.get(sign, sign) for sign in " ".join(text.split()))
