"""A card's directory: whole or as it was, and never over what somebody edited."""

import logging
from pathlib import Path

from specdec import __version__
from specdec.card import render
from specdec.card.document import document
from specdec.card.figures import draw
from specdec.card.manifest import inputs, manifest
from specdec.card.results import results
from specdec.card.study import read
from specdec.files import read_json, staged_directory, write_json, write_text
from specdec.sums import SUMS, check_sums, write_sums

log = logging.getLogger(__name__)

VERSION = 1
CARD, FIGURES = "card.json", "figures"
DETECT = 0.1


def write(
    directory: Path,
    out: Path | None = None,
    *,
    force: bool = False,
    detect: float = DETECT,
    command: list[str] | None = None,
) -> Path:
    """Write the card of the study in ``directory``, finished or not; what is unfinished is shown as such.

    Args:
        out: the card's directory; ``directory / "card"`` if not given.
        force: write it again whatever lies there.
        detect: a difference in acceptance length that further studies are to see; prompts for it are worked out.
        command: for the record.

    Returns:
        The card's directory. Where nothing that it was made from has changed, it stays as it is.

    Raises:
        ValueError: there is no study, a measurement cannot be read, or the card was edited.
    """
    out = directory / "card" if out is None else out
    study = read(directory)
    files = inputs(study)
    made_from = {"specdec": __version__, "version": VERSION, "detect": detect, "inputs": files}
    if out.exists() and not force:
        _check(out)
        if read_json(out / CARD).get("made_from") == made_from:
            log.info("%s: nothing that it was made from has changed", out)
            return out
    card = {"version": VERSION, "made_from": made_from, **results(study, detect)}
    card["manifest"] = manifest(study, files, command or ["specdec", "card", str(directory)])
    with staged_directory(out, replace=True) as folder:
        figures = folder / FIGURES
        figures.mkdir()
        drawn = draw(card, figures)
        write_sums(figures)
        blocks = document(card, drawn, str(out / CARD))
        write_json(folder / CARD, card)
        write_text(folder / "card.md", render.markdown(blocks))
        write_text(folder / "card.html", render.page(blocks, folder, f"Study {study.name}"))
        write_text(folder / "card.tex", render.latex(card))
        write_text(folder / "card.csv", render.tidy(card))
        write_sums(folder)
    return out


def _check(out: Path) -> None:
    """Raise ValueError unless the card is as it was written."""
    if not (out / SUMS).is_file():
        raise ValueError(f"{out} exists and is no card: choose another --out, or remove it")
    remedy = "keep a copy elsewhere and give --force, or choose another --out"
    check_sums(out, remedy)
    check_sums(out / FIGURES, remedy)
