"""Recompute an interval of a study's card from its data, with NumPy and SciPy alone.

    python examples/interval.py CARD QUANTITY ARM [BASELINE]

CARD is the card's directory. Of one arm the interval is that of the arm's quantity; of two, of their difference. The
quantity is one ratio of sums, such as the acceptance length, and no curve. A card cuts an interval where its quantity
ends (a share at 0 and 1), which this does not.
"""

import sys

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from scipy.optimize import brentq
from scipy.stats import t

Sums = dict[tuple[int, str], tuple[float, float]]


def sums_of(card: str, quantity: str, arm: str) -> Sums:
    """Return an arm's sum and weight of every seed and prompt; ValueError if it has none, or is of another kind."""
    rows = pq.read_table(f"{card}/data.parquet").to_pylist()
    mine = [row for row in rows if row["quantity"] == quantity and row["arm"] == arm]
    if not mine:
        known = sorted({(row["quantity"], row["arm"]) for row in rows if row["step"] is None})
        raise ValueError(f"no {quantity!r} of {arm!r}; the card has: {known}")
    if any(row["step"] is not None or row["sum_2"] is not None for row in mine):
        raise ValueError(
            f"{quantity!r} is a curve, or made of two ratios: its interval is not recomputed here"
        )
    return {(row["seed"], row["prompt"]): (row["sum"], row["weight"]) for row in mine}


def table(sums: Sums, seeds: list[int], prompts: list[str]) -> npt.NDArray[np.float64]:
    """Return sums and weights, (S, P, 2)."""
    return np.array([[sums[seed, prompt] for prompt in prompts] for seed in seeds])


def main(
    card: str, quantity: str, arm: str, baseline: str | None = None
) -> tuple[float, float, float]:
    """Return the quantity, or the difference of two arms, and the ends of its interval."""
    all_sums = [sums_of(card, quantity, name) for name in (arm, baseline) if name is not None]
    shared = set.intersection(*({*sums} for sums in all_sums))
    seeds = sorted({seed for seed, _ in shared})
    # a prompt that no arm has passes of says nothing
    prompts = sorted(
        {prompt for seed, prompt in shared if any(sums[seed, prompt][1] for sums in all_sums)}
    )
    S = len(seeds)
    P = len(prompts)
    if S < 2 or P < 2:
        raise ValueError(f"{S} seeds and {P} prompts that all have: two of each are needed")
    value = 0.0
    added_SP = np.zeros((S, P))
    for sums, sign in zip(all_sums, (1, -1), strict=False):
        sums_SP, weights_SP = np.moveaxis(table(sums, seeds, prompts), -1, 0)
        ratio = sums_SP.sum() / weights_SP.sum()
        value += sign * ratio
        # what every seed and prompt adds to the ratio, to first order
        added_SP += sign * S * P * (sums_SP - ratio * weights_SP) / weights_SP.sum()
    # mean squares of a two-way table of seeds and prompts
    row_S1 = added_SP.mean(1, keepdims=True)
    column_1P = added_SP.mean(0, keepdims=True)
    of_rest = ((added_SP - row_S1 - column_1P) ** 2).sum() / ((S - 1) * (P - 1))
    of_seeds = P * (row_S1**2).sum() / (S - 1)
    of_prompts = max(0.0, S * (column_1P**2).sum() / (P - 1) - of_rest)
    error = np.sqrt((of_seeds + of_prompts) / (S * P))
    share = of_seeds / (of_seeds + of_prompts)

    def outside(size: float) -> float:
        return 2 * (share * t.sf(size, S - 1) + (1 - share) * t.sf(size, P - 1)) - 0.05

    half = error * brentq(outside, 0, 1000)
    return value, value - half, value + half


if __name__ == "__main__":
    try:
        print("{:.4f} [{:.4f}, {:.4f}]".format(*main(*sys.argv[1:])))
    except (TypeError, ValueError) as error:
        sys.exit(f"{error}\n{__doc__}")
