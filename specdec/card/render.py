"""A card as Markdown, as one HTML page, as LaTeX and as CSV."""

import base64
import csv
import html
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specdec.card.blocks import Block, Bullets, Command, Grid, Heading, Picture, Text
from specdec.card.words import interval, p_value
from specdec.evaluation.markdown import cell, table

Json = dict[str, Any]

_STYLE = """\
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 72rem;
  margin: 0 auto; padding: 1rem; }
h1, h2, h3 { line-height: 1.25; }
h2 { margin-top: 2.2rem; border-bottom: 1px solid #bbb; padding-bottom: .2rem; }
.wide { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top;
  white-space: nowrap; }
th { border-bottom: 2px solid #555; }
.word { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 7rem; }
figure { margin: 1rem 0; }
img { max-width: 100%; height: auto; }
figcaption { font-size: .86rem; color: #444; }
pre { background: #f3f3f3; padding: .6rem; overflow-x: auto; }
@media print { body { max-width: none; font-size: 10pt; } .wide { overflow: visible; } table { font-size: 7.5pt; }
  td, th { white-space: normal; padding: .1rem .3rem; } figure, tr { break-inside: avoid; } }
"""


def markdown(blocks: Sequence[Block]) -> str:
    """For a reader of the repository."""
    return "\n".join(line for block in blocks for line in (*_markdown(block), ""))


def _markdown(block: Block) -> list[str]:
    match block:
        case Heading(level, text):
            return [f"{'#' * level} {_plain(text)}"]
        case Text(text):
            return [_plain(text)]
        case Bullets(items):
            return [f"- {_plain(item)}" for item in items]
        case Grid(headings, rows, left):
            return table(headings, [[_plain(each) for each in row] for row in rows], left)
        case Picture(file, caption):
            return [f"![{_plain(caption)}]({file})", "", f"*{_plain(caption)}*"]
        case Command(line):
            return ["```", line, "```"]


def _plain(text: str) -> str:
    """Text that Markdown takes for text, in a table too: names hold underscores, stars and angle brackets."""
    for sign, entity in (("&", "&amp;"), ("*", "&#42;"), ("<", "&lt;"), ("`", "&#96;"), ("__", "&#95;&#95;")):
        text = text.replace(sign, entity)
    return " ".join(text.split())


def page(blocks: Sequence[Block], folder: Path, title: str) -> str:
    """One page with its pictures in it, which asks for nothing outside."""
    body = "\n".join(_html(block, folder) for block in blocks)
    return (
        "<!DOCTYPE html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        f"<title>{html.escape(title)}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _html(block: Block, folder: Path) -> str:
    match block:
        case Heading(level, text):
            return f"<h{level}>{html.escape(text)}</h{level}>"
        case Text(text):
            return f"<p>{html.escape(text)}</p>"
        case Bullets(items):
            return "<ul>\n" + "\n".join(f"<li>{html.escape(item)}</li>" for item in items) + "\n</ul>"
        case Grid(headings, rows, left):
            lines = [_row("th", headings, left), *(_row("td", row, left) for row in rows)]
            return "<div class='wide'><table>\n" + "\n".join(lines) + "\n</table></div>"
        case Picture(file, caption):
            data, said = base64.b64encode((folder / file).read_bytes()).decode(), html.escape(caption)
            return (
                f"<figure><img alt='{said}' src='data:image/png;base64,{data}'><figcaption>{said}</figcaption></figure>"
            )
        case Command(line):
            return f"<pre>{html.escape(line)}</pre>"


def _row(tag: str, cells: Sequence[str], left: int) -> str:
    each = (f"<{tag}{' class=word' if n < left else ''}>{html.escape(text)}</{tag}>" for n, text in enumerate(cells))
    return f"<tr>{''.join(each)}</tr>"


def latex(card: Json) -> str:
    """The table of acceptance lengths and differences, for a paper; it wants the packages booktabs and longtable."""
    several = len(card["growths"]) > 1
    columns = ["Growth"] * several + ["Arm", "Acceptance length", "Difference", "$p$ (Holm)"]
    rows = []
    compared = {(row["growth"], row["arm"]): row for row in card["comparisons"]}
    for growth, own in card["growths"].items():
        for name, one in own["arms"].items():
            row = compared.get((growth, name))
            cells = [tex(growth)] * several + [tex(name), _math(interval(one["acceptance_length"]))]
            cells += [_math(interval(row, sign=True)), _math(p_value(row["p_holm"]))] if row else ["--", "--"]
            rows.append(f"{' & '.join(cells)} \\\\")
    seeds, study = len(card["study"]["seeds"]), tex(card["study"]["name"])
    prompts = max((own["prompts"] for own in card["growths"].values()), default=0)
    head = f"{' & '.join(columns)} \\\\"
    return "\n".join([
        "% needs \\usepackage{booktabs}",
        "\\begin{table}",
        "\\centering",
        f"\\caption{{Study {study}: tokens committed per target pass, bonus token included, with 95\\,\\% intervals "
        f"over {seeds} seeds and {prompts} prompts; differences from {tex(card['study']['baseline'])} are paired.}}",
        f"\\label{{tab:{''.join(c for c in card['study']['name'] if c.isalnum()) or 'study'}}}",
        f"\\begin{{tabular}}{{{'l' * (1 + several)}rrr}}", "\\toprule", head, "\\midrule", *rows, "\\bottomrule",
        "\\end{tabular}", "\\end{table}", "",
    ])  # fmt: skip


_TEX = {
    "\\": "\\textbackslash{}", "{": "\\{", "}": "\\}", "&": "\\&", "%": "\\%", "$": "\\$", "#": "\\#", "_": "\\_",
    "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "<": "\\textless{}", ">": "\\textgreater{}",
    "|": "\\textbar{}",
}  # fmt: skip


def tex(text: str) -> str:
    """Text that LaTeX takes for text."""
    return "".join(_TEX.get(sign, sign) for sign in " ".join(text.split()))


def _math(text: str) -> str:
    """Numbers with proper signs; a dash for none."""
    return "--" if text == "-" else "$" + text.replace(" ", "\\ ") + "$"


def tidy(card: Json) -> str:
    """One row for each arm, growth and metric: CSV."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    fields = ["value", "low", "high", "p_value", "p_holm", "p_bh", "seeds", "prompts"]
    writer.writerow(["arm", "growth", "metric", "at", *fields])
    for arm, growth, metric, at, found in _figures(card):
        writer.writerow([arm, growth, metric, at, *("" if found.get(key) is None else found[key] for key in fields)])
    return out.getvalue()


def _figures(card: Json) -> Iterator[tuple[str, str, str, str, Json]]:
    for growth, own in card["growths"].items():
        for arm, one in own["arms"].items():
            for metric in ("acceptance_length", "tokens_per_second", "speedup"):
                yield arm, growth, metric, "", one[metric] or {}
            for seed, value in one["by_seed"].items():
                yield arm, growth, "acceptance_length_of_seed", seed, {"value": value, "prompts": own["prompts"]}
            for metric in ("joint", "conditional"):
                for k, found in enumerate(one[metric], start=1):
                    yield arm, growth, f"{metric}_acceptance", str(k), found or {}
            for metric in ("within", "after") if one["beyond"] else ():
                yield (
                    arm,
                    growth,
                    f"conditional_{metric}_trained_depth",
                    str(one["beyond"]["trained_depth"]),
                    one["beyond"][metric],
                )
    for row in card["comparisons"]:
        yield row["arm"], row["growth"], "difference", row["baseline"], row
        yield row["arm"], row["growth"], "ratio", row["baseline"], row["ratio"] or {}
    for row in card["effects"]:
        yield "", row["growth"], row["kind"], row["effect"], row
    for outcome, arms in card["outcomes"].get("arms", {}).items():
        for arm, found in arms.items():
            yield arm, "", outcome, "", found
    for row in card["outcomes"].get("comparisons", []):
        yield row["arm"], "", f"{row['outcome']}_difference", row["baseline"], row
    for row in card["outcomes"].get("effects", []):
        yield "", "", f"{row['outcome']}_{row['kind']}", row["effect"], row
    for name, series in card["drift"].items():
        for arm, found in series["arms"].items():
            for k, each in enumerate(found, start=1):
                yield arm, "", f"drift_{name}", str(k), each or {}
    for arm, conditions in (card["robustness"] or {"arms": {}})["arms"].items():
        for name, got in conditions.items():
            for metric in ("acceptance_length", "kept"):
                yield arm, "", f"robustness_{metric}", name, got.get(metric) or {}
    for arm, fits in card["training"].items():
        for seed, fit in fits.items():
            for metric, value in fit.items():
                if isinstance(value, int | float):
                    yield arm, "", f"training_{metric}", seed, {"value": value}


__all__ = ["cell", "latex", "markdown", "page", "tex", "tidy"]
