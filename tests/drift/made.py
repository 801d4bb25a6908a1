"""A text of a target's own, drafters beside it, and what is measured of them."""

import functools

from specdec.drafter import Drafter
from specdec.drift import series
from specdec.drift.measure import Sums, measure
from specdec.drift.settings import Settings
from specdec.drift.texts import OwnText, own_texts
from specdec.target import Target
from tests.perfect import disturb, markov_target, perfect_drafter
from tests.tiny import presets, variants

SPECS = presets() | variants()
PROMPTS = [("one", [3, 4, 5, 6]), ("two", [9]), ("three", [1, 2, 3])]
SMALL = Settings(depths=4, anchors=5)


@functools.cache
def target() -> Target:
    """One that a drafter is right about now and then."""
    return markov_target(context=0.45)


@functools.cache
def texts() -> tuple[OwnText, ...]:
    return tuple(own_texts(target(), PROMPTS, 28))


@functools.cache
def drafter(name: str = "eagle3_1") -> Drafter:
    """Right often enough that deep chains are accepted, and attending to more than itself."""
    return disturb(perfect_drafter(target(), SPECS[name], sharpness=1.0), 0.3)


def means(sums: Sums, of: Drafter, layer: int | None = None) -> dict[str, list[float]]:
    """By name, at every depth; NaN where nothing counts."""
    found = sums.series_FK2[..., 0] / sums.series_FK2[..., 1]
    return {name: row.tolist() for (name, at), row in zip(series.rows(of.config), found, strict=True) if at == layer}


def measured(name: str = "eagle3_1", settings: Settings = SMALL, text: int = 0) -> dict[str, list[float]]:
    return means(measure(target(), drafter(name), texts()[text], settings), drafter(name))
