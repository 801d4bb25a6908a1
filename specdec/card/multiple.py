"""p-values of many comparisons, corrected, and what they say."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import false_discovery_control

from specdec.evaluation.comparison import ALPHA


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down p-values: below 0.05, the chance of a single false find in the family is at most 5 %.

    Holm, Scandinavian Journal of Statistics 6, 1979.
    """
    order_N = np.argsort(p_values, kind="stable")
    stepped_N = np.array(p_values, dtype=np.float64)[order_N] * np.arange(len(p_values), 0, -1)
    out_N = np.empty(len(p_values))
    out_N[order_N] = np.minimum(1.0, np.maximum.accumulate(stepped_N))
    return [float(each) for each in out_N]


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Benjamini and Hochberg's: below 0.05, at most 5 % of what was found is false on average.

    Journal of the Royal Statistical Society B 57, 1995.
    """
    return [float(each) for each in false_discovery_control(p_values)] if len(p_values) else []


def distinct(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Rows together that agree in what was measured and in every digit: one training under two names is one test."""
    same: dict[Any, list[Any]] = {}
    for row in rows:
        known = tuple(row.get(key) for key in ("growth", "outcome", "value", "low", "high", "p_value"))
        same.setdefault(known, []).append(row)
    return list(same.values())


def correct(rows: Sequence[dict[str, Any]]) -> None:
    """Give each row ``p_holm`` and ``p_bh``, of all :func:`distinct` rows together that have a ``p_value``."""
    for row in rows:
        row["p_holm"] = row["p_bh"] = None
    tested = distinct([row for row in rows if row["p_value"] is not None])
    found = [same[0]["p_value"] for same in tested]
    for same, strict, lenient in zip(tested, holm(found), benjamini_hochberg(found), strict=True):
        for row in same:
            row["p_holm"], row["p_bh"] = strict, lenient


def judge(rows: Sequence[dict[str, Any]]) -> None:
    """Correct them all together, and give each a ``verdict``."""
    correct(rows)
    for row in rows:
        row["verdict"] = verdict(row)


def verdict(row: Mapping[str, Any]) -> str:
    """``higher``, ``lower`` or ``not told apart``, by Holm's p-value; ``not tested`` where that was impossible."""
    if row["p_holm"] is None:
        return "not tested"
    return ("higher" if row["value"] > 0 else "lower") if row["p_holm"] < ALPHA else "not told apart"
