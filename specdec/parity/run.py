"""The comparison: training's unroll beside cached decoding, and beside the exported directory."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from specdec.drafter import Drafter
from specdec.parity.comparison import Row, compare, merged, rounding
from specdec.parity.differences import Finding
from specdec.parity.exported import engine, opened
from specdec.parity.ours import cached, unrolled
from specdec.parity.passes import Engine
from specdec.parity.reference import Misread, Served
from specdec.parity.said import Said
from specdec.parity.texts import Place, Text, places
from specdec.target import Target

FINE = 1e-3  # a share below which no part of a drafter is lost unseen
DECODED, EXPORTED = "training and cached decoding", "training and export"


class Parity(NamedTuple):
    """What was compared and how it came out."""

    rows: list[Row]
    lacking: str | None
    """Why the export is not among them."""
    allowed: float
    """The share that rounding may make of an export's or an engine's differences."""
    findings: tuple[Finding, ...] = ()
    """What the export has otherwise than this drafter's, by name."""
    engine: Engine | None = None
    """What a real engine accepted; None if none was asked."""
    rounded: str = ""
    """Weights of the target that the drafter has rounded, and an engine has not."""
    failed: str | None = None
    """Why an engine that was asked did not answer."""

    @property
    def blurred(self) -> bool:
        """Whether something differs by name that the numbers' precision may hide."""
        coarse = self.allowed > FINE and all(row.equal for row in self.rows)
        return coarse and any(finding.differs for finding in self.findings)

    @property
    def holds(self) -> bool:
        """Whether training, decoding and the export, and the engine if one was asked, are one and the same."""
        served = self.failed is None and (self.engine is None or self.engine.holds)
        return self.lacking is None and not self.blurred and all(row.equal for row in self.rows) and served


@torch.no_grad()
def parity(
    target: Target,
    drafter: Drafter,
    texts: Sequence[Text],
    depth: int,
    exported: Path | None,
    method: str = "eagle3",
    on_text: Callable[[str], None] = lambda what: None,
) -> Parity:
    """Compare at every place of every text, alone and packed behind another, at depths 0 to ``depth``.

    Args:
        drafter: in the target's dtype, on its device.
        exported: a checkpoint's directory; without one training and decoding alone are compared.
        method: ``eagle`` or ``eagle3``, as the checkpoint is served.
    """
    served, lacking = None, "nothing was exported" if exported is None else None
    if exported is not None:
        try:
            served = opened(exported, method, target)
        except Misread as error:
            lacking = f"{exported}: {error}"
    rows: list[Row] = []
    for number, text in enumerate(texts):
        on_text(f"text {number + 1} of {len(texts)}")
        rows += _of_text(target, drafter, texts[number - 1], text, depth, served)
    found = merged(rows)
    ours, theirs = ([row for row in found if (row.pair == EXPORTED) == other] for other in (False, True))
    allowed = rounding(ours, target.dtype)
    return Parity([*ours, *(row._replace(allowed=allowed) for row in theirs)], lacking, allowed)


def _of_text(
    target: Target, drafter: Drafter, other: Text, text: Text, depth: int, served: Served | None
) -> Iterator[Row]:
    """One text alone; and as the second document of a row, where it must be what it is alone."""
    found = places(text, depth)
    anchors = [anchor for place in found for anchor in place.anchors]
    trained = unrolled(target, drafter, [text.ids], anchors, depth)
    behind = [len(other.ids) + anchor for anchor in anchors]
    packed = unrolled(target, drafter, [other.ids, text.ids], behind, depth)
    others = {DECODED: cached(target, drafter, text, anchors, depth)}
    if served is not None:
        others[EXPORTED] = engine(target, served, text, anchors, depth)
    for pair, theirs in others.items():
        for place, ours, same in _by_place(found, trained, theirs):
            yield from compare(pair, place, ours, same)
        yield from compare(pair, "packed", packed, theirs)


def _by_place(found: list[Place], one: Said, two: Said) -> Iterator[tuple[str, Said, Said]]:
    start = 0
    for place in found:
        rows = slice(start, start + len(place.anchors))
        yield place.name, one.at(rows), two.at(rows)
        start = rows.stop
