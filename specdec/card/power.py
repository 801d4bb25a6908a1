"""The smallest difference that a study can see, and how large it has to be to see a given one.

Legend: S seeds, P prompts.
"""

import math

from scipy.stats import t as student

from specdec.card.crossed import Spread
from specdec.evaluation.comparison import ALPHA, POWER

MOST = 100_000  # prompts


def detectable(found: Spread) -> float | None:
    """The difference that 80 of 100 such studies tell apart from none (p < 0.05, before any correction).

    ``half width of the interval + t(power, df) * standard error``, df being the seeds less one, of one seed the
    prompts less one.
    """
    half = found.half_width(ALPHA)
    if half is None:
        return None
    df = found.seeds - 1 or found.prompts - 1
    error = math.sqrt((max(found.of_seeds, found.of_rest) + found.beyond) / (found.seeds * found.prompts))
    return half + float(student.ppf(POWER, df)) * error


def planned(found: Spread, seeds: int, prompts: int) -> Spread:
    """The mean squares to be expected of another number of seeds and prompts that vary as these do."""
    own = max(0.0, found.of_seeds - found.of_rest) / found.prompts  # variance of trainings
    of_prompts = found.beyond / found.seeds
    rest = found.of_rest if found.seeds > 1 else 0.0
    return Spread(seeds, prompts, rest + prompts * own, rest + seeds * of_prompts, rest)


def prompts_needed(found: Spread, seeds: int, detect: float) -> int | None:
    """Prompts with which so many seeds see a true difference of ``detect``; None where no number of prompts does.

    Raises:
        ValueError: ``detect`` is not above zero.
    """
    if not 0 < detect < math.inf:
        raise ValueError(f"detect is {detect}: it must be a difference above 0, in tokens per target pass")

    def seen(prompts: int) -> bool:
        least = detectable(planned(found, seeds, prompts))
        return least is not None and least <= detect

    if not seen(MOST):
        return None
    low, high = 1, MOST  # low does not see it
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if seen(middle) else (middle, high)
    return high
