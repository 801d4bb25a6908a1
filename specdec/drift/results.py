"""What ``drift.json`` holds: every quantity of every prompt, with means and intervals.

Legend: P prompts, K depths, F quantities, G quantities of sources.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specdec.drafter import DrafterConfig
from specdec.drift import series
from specdec.drift.measure import Sums
from specdec.evaluation.statistics import Statistic, interval, ratio

VERSION = 1

Array = npt.NDArray[np.float64]
Document = dict[str, Any]
Told = Callable[[Array], Mapping[str, float | None]]


def measured(sums_PC: Array, of: Statistic = ratio) -> dict[str, float | None]:
    """``mean``, ``low`` and ``high`` of a statistic over prompts: None where it is not defined.

    Args:
        sums_PC: sums and weights in turn. Prompts that weigh nothing in any pair say nothing; where leaving out one
            prompt leaves nothing of some pair, there is no interval.
    """
    sums_PC = sums_PC[(sums_PC[:, 1::2] > 0).any(1)]
    weights = sums_PC[:, 1::2].sum(0)
    if not len(sums_PC) or not weights.all():
        return {"mean": None, "low": None, "high": None}
    spread = bool((weights - sums_PC[:, 1::2] > 0).all())
    with np.errstate(divide="ignore", invalid="ignore"):  # resamples of a quantity that few prompts have
        found = interval(sums_PC if spread else sums_PC.sum(0, keepdims=True), of)
    assert found is not None
    return {
        key: None if value is None or not np.isfinite(value) else float(value) for key, value in found._asdict().items()
    }


def nothing(sums_PC: Array) -> dict[str, float | None]:
    """In place of :func:`measured`, where the prompts' own values are all that is asked for."""
    return {}


def document(
    config: DrafterConfig,
    prompts: Sequence[str],
    sums: Sequence[Sums],
    trained_depth: int | None,
    depths: int,
    told: Told = measured,
) -> Document:
    """The measured part of ``drift.json``; prompts without a chain are left out.

    Args:
        told: what is told of all prompts beside their values.

    Raises:
        ValueError: none has any.
    """
    kept = [(name, one) for name, one in zip(prompts, sums, strict=True) if one.chains]
    if not kept:
        raise ValueError(
            f"no answer of the target is long enough for a chain of {depths} tokens: ask for fewer depths or more new "
            "tokens, or give other prompts"
        )
    series_FKP2 = torch.stack([one.series_FK2 for _, one in kept], 2).numpy()
    sources_GP2 = torch.stack([one.sources_G2 for _, one in kept], 1).numpy()
    found = dict(zip(series.rows(config), series_FKP2, strict=True))
    sources: dict[str, Document] = {}
    for (name, of), sums_P2 in zip(series.source_rows(config), sources_GP2, strict=True):
        one = sources.setdefault(name, {**series.SOURCES[name]._asdict(), "of": [], "values": []})
        one["of"].append(of)
        one["values"].append(_values(sums_P2))
        _append(one, told(sums_P2))
    layers = [] if config.num_layers == 1 else [
        {name: _told(series.ATTENTION[name], found[name, layer], nothing) for name in series.ATTENTION}
        for layer in range(config.num_layers)
    ]  # fmt: skip
    return {
        "version": VERSION,
        "trained_depth": trained_depth,
        "depths": depths,
        "prompts": [name for name, _ in kept],
        "chains": [one.chains for _, one in kept],
        "series": {name: _told(kind, found[name, None], told) for name, kind in series.SERIES.items()},
        "sources": sources,
        "layers": layers,
        "top_positions": [
            {"position": int(one.top_2[0]), "mass": float(one.top_2[1])} for _, one in kept
        ],
    }  # fmt: skip


def _told(kind: series.Kind, sums_KP2: Array, told: Told) -> Document:
    out: Document = {**kind._asdict(), "values": [_values(sums_P2) for sums_P2 in sums_KP2]}
    out["weights"] = [[int(weight) for weight in sums_P2[:, 1]] for sums_P2 in sums_KP2]
    for sums_P2 in sums_KP2:
        _append(out, told(sums_P2))
    return out


def _values(sums_P2: Array) -> list[float | None]:
    return [float(total / weight) if weight else None for total, weight in sums_P2]


def _append(out: Document, one: Mapping[str, float | None]) -> None:
    for key, value in one.items():
        out.setdefault(key, []).append(value)


def sums_of(found: Document, name: str) -> Array:
    """The sums over chains of a document's series, and over how many, (K, P, 2)."""
    one = found["series"][name]
    weights_KP = np.array(one["weights"], dtype=np.float64)
    values_KP = np.array([[0.0 if value is None else value for value in row] for row in one["values"]])
    return np.stack([values_KP * weights_KP, weights_KP], axis=-1)
