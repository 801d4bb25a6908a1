"""The card: what a study found, as one HTML page, Markdown and JSON.

``card.md.jinja`` is the card's text. A section of it without content is left out.
"""

import base64
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markupsafe import Markup

from specdec.report.contrasts import METHOD, distinct
from specdec.report.statistics import ALPHA
from specdec.report.tables import TEMPLATES, markdown_text, with_interval
from specdec.studies.card_data import DATA, write_data
from specdec.studies.figures import SEPARATOR, draw_figures, label_of, short_names
from specdec.studies.outcomes import ACCEPTANCE, FAMILIES
from specdec.studies.recorded_run import Json
from specdec.studies.reproduce import CARD, VERSION, manifest
from specdec.studies.results import read_record, results
from specdec.studies.study import FEWEST_SEEDS, SEEDS
from specdec.utils.config import to_text
from specdec.utils.files import staged_directory, write_json, write_text
from specdec.utils.text import how_many, printable

DIGITS = dict.fromkeys(FAMILIES, 3) | {ACCEPTANCE: 2}


def write_card(directory: Path) -> Path:
    """Write the card of the study in ``directory``, finished or not, and return the card's directory.

    Raises:
        ValueError: there is no study, or a measurement cannot be read.
    """
    study = read_record(directory)
    out = directory / "card"
    card = {"version": VERSION, **results(study), "manifest": manifest(study)}
    with staged_directory(out, replace=True) as folder:
        text = _document(card, draw_figures(card, folder), out / CARD)
        write_json(folder / CARD, card)
        write_data(study, folder / DATA)
        write_text(folder / "card.md", text)
        write_text(folder / "card.html", _page(text, folder, f"Study {card['study']['name']}"))
    return out


def _page(text: str, folder: Path, title: str) -> str:
    """The Markdown as one page with its pictures in it, which asks for nothing outside."""

    def embedded(match: re.Match[str]) -> str:
        return f'src="data:image/png;base64,{base64.b64encode((folder / match[1]).read_bytes()).decode()}"'

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = re.sub(
        "<h2>(.*?)(?=</h2>)", lambda match: f'<h2 id="{_anchor(match[1])}">{match[1]}', body
    )
    body = re.sub(r'(?<=<img )src="(\w+\.png)"', embedded, body)
    return _TEMPLATES.get_template("studies/card.html.jinja").render(title=title, body=body)


def _anchor(title: str) -> str:
    """Return the anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _document(card: Json, figures: Mapping[str, Sequence[tuple[str, str]]], place: Path) -> str:
    """The card in Markdown, from ``figures`` (files and captions by section) and the path of ``card.json``."""
    comparisons = [
        row for row in (*card["comparisons"], *card["effects"]) if row["p_value"] is not None
    ]
    runs = [run for by_seed in card["manifest"]["runs"].values() for run in by_seed.values()]
    text = _TEMPLATES.get_template("studies/card.md.jinja", globals=_GLOBALS).render(
        **card,
        card=card,
        names=short_names(card["arms"]),
        tested=[same[0] for same in distinct(comparisons)],
        measured={arm for metric in card["quantities"] for arm in metric["arms"]},
        fits=[run["fit"]["provenance"] or {} for run in runs],
        place=str(place),
    )
    lead, *parts = re.sub(r"\n{3,}", "\n\n", text).split("\n## ")
    sections = {
        title: body for title, _, body in (part.partition("\n") for part in parts) if body.strip()
    }
    contents = "".join(f"- [{title}](#{_anchor(title)})\n" for title in sections)
    for title, body in sections.items():
        pictures = "".join(
            f"![{_plain(caption)}]({file})\n\n*{_plain(caption)}*\n\n"
            for file, caption in figures.get(title, ())
        )
        contents += f"\n## {title}\n\n{pictures}{body.strip()}\n"
    return f"{lead}\n{contents}"


def _states(arm: Json) -> str:
    """Say how many runs of an arm are done, and what has become of the others' jobs."""
    states = [{state["name"] for state in run["states"].values()} for run in arm["runs"]]
    others = sorted(set().union(*states) - {"done"})
    done = f"{sum(names <= {'done'} for names in states)} of {len(states)} done"
    return f"{done} ({', '.join(others)})" if others else done


def _figure(numbers: Json | Sequence[float | None] | None, digits: int = 2, sign: str = "") -> str:
    """Return a figure with its interval in brackets, from an estimate or from three numbers; nothing without data."""
    if not numbers:
        return "-"
    if isinstance(numbers, dict):
        numbers = [numbers[name] for name in ("value", "low", "high")]
    value, low, high = numbers
    if value is None:
        return ""
    return with_interval(value, low, high, f"{{:{sign}.{digits}f}}".format)


def _p(p_value: float | None) -> str:
    """Return a p-value to two figures."""
    if p_value is None:
        return "-"
    if p_value < 0.001:
        return "< 0.001"
    return f"{p_value:.2g}" if p_value < 0.095 else f"{p_value:.2f}"


def _plain(value: Any) -> str:
    """Text that Markdown takes for text, in a table too: names hold underscores, stars and angle brackets."""
    # a text of the template's own; a cell that has no figure
    if isinstance(value, Markup) or value == "-":
        return value
    return markdown_text(str(value))


def _quoted(word: str) -> str:
    """Return a word of a command, on one line."""
    return shlex.quote(" ".join(printable(word).splitlines()))


_TEMPLATES = TEMPLATES.overlay(finalize=_plain)
_TEMPLATES.filters |= {"quote": _quoted, "in_words": to_text}
_GLOBALS = {
    "alpha": ALPHA,
    "digits": DIGITS,
    "fewest_seeds": FEWEST_SEEDS,
    "figure": _figure,
    "file": CARD,
    "data": DATA,
    "how_many": how_many,
    "label_of": label_of,
    "method": METHOD,
    "p": _p,
    "separator": SEPARATOR,
    "usual_seeds": SEEDS,
    "states_of": _states,
}
