"""How often ``specdec watch`` is wrong in an hour, and how many requests it takes after a drafter is swapped.

``python benchmarks/watch.py --out benchmarks/results/watch_<yyyymmdd>.md`` simulates servers request by request: a
Poisson stream, in which every request has its own chance that a draft is accepted, and all passes take the same time.
The watch sees what a scraper sees, sums over all passes between two pages. Its reference is an evaluation of 80 further
requests, whose interval is as uncertain as a real one's; or the server's own first passes; or it begins at the true
mean, which is the worst case that the promise of 5 % covers.

Legend: R requests, S scrapes.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# the folder of `benchmarks`, which is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from specdec.engines.scrape import Counters
from specdec.engines.watch import Watcher
from specdec.engines.watch_reference import Reference, reference_of

HOUR = 3600.0
SWAP = 1800.0  # seconds after which another drafter serves
DEPTH = 3  # drafts a pass
PASS = 0.025  # seconds
PROMPTS = 80  # of the evaluation
LEFT = (0.05, 0.5, 0.8)  # of each chance, after the swap
Array = npt.NDArray[np.float64]


class Traffic(NamedTuple):
    """What a server is asked, and how it is watched."""

    name: str
    rate: float = 1.0  # requests a second
    tokens: float = 100.0  # of an answer
    spread: float = 0.5  # standard deviation of the logarithm of its length
    chance: tuple[float, float] = (4.0, 3.0)  # Beta: a draft's of a request
    every: float = 2.0
    reference: str = "evaluation"


TRAFFIC = (
    Traffic("1 request/s"),
    Traffic("1 request/s, a page each 5 s", every=5.0),
    Traffic("0.2 requests/s", rate=0.2),
    Traffic("10 requests/s", rate=10.0),
    Traffic("long answers", tokens=1000.0, spread=0.8),
    Traffic("weak drafter", chance=(2.0, 4.0)),
    Traffic("first 5,000 passes", reference="baseline"),
    Traffic("interval begins at the mean", reference="exact"),
    Traffic("the same, long answers", tokens=1000.0, spread=0.8, reference="exact"),
)


class Requests(NamedTuple):
    """Requests in the order of their arrival."""

    arrival_R: Array
    passes_R: Array
    accepted_R: Array


def draw(random: np.random.Generator, traffic: Traffic, number: int, left: float = 1.0) -> Requests:
    """Draw requests whose chances are ``left`` times those of the traffic."""
    chance_R = left * random.beta(*traffic.chance, size=number)
    logarithm_R = random.normal(-(traffic.spread**2) / 2, traffic.spread, size=number)
    length_R = 1 + sum(chance_R**k for k in range(1, DEPTH + 1))
    passes_R = np.ceil(traffic.tokens * np.exp(logarithm_R) / length_R)
    reached_R = passes_R.astype(int)
    accepted_R = np.zeros(number)
    for _ in range(DEPTH):  # of the passes that accepted so many, those that accept one more
        reached_R = random.binomial(reached_R, chance_R)
        accepted_R += reached_R
    return Requests(np.cumsum(random.exponential(1 / traffic.rate, number)), passes_R, accepted_R)


def pages(requests: Requests, every: float) -> Array:
    """Return passes and accepted drafts between two scrapes in an hour, (S, 2)."""
    sums_S2 = np.zeros((int(HOUR / every), 2))
    end_R = requests.arrival_R + requests.passes_R * PASS
    first_R = (requests.arrival_R / every).astype(int)
    for later in range(int((requests.passes_R.max() * PASS) / every) + 2):
        scrape_R = first_R + later
        begin_R = np.maximum(requests.arrival_R, scrape_R * every)
        inside_R = np.minimum(end_R, (scrape_R + 1) * every) - begin_R
        part_R = np.clip(inside_R, 0, None) / (end_R - requests.arrival_R)
        known_R = scrape_R < len(sums_S2)
        for column, numbers_R in enumerate(requests[1:]):
            np.add.at(sums_S2[:, column], scrape_R[known_R], (part_R * numbers_R)[known_R])
    return sums_S2


def reference(random: np.random.Generator, traffic: Traffic) -> Reference | None:
    """Return what a watch compares with; None for the server's first passes."""
    if traffic.reference == "baseline":
        return None
    number = 100_000 if traffic.reference == "exact" else PROMPTS
    evaluated = draw(random, traffic, number)
    known = reference_of("", np.stack(evaluated[1:], axis=1))
    if traffic.reference == "exact":
        return known._replace(length=known.length._replace(low=known.length.mean))
    return known


def verdict(random: np.random.Generator, traffic: Traffic, left: float = 1.0) -> float | None:
    """Watch for an hour, in which the drafter is swapped at half-time; the seconds until a verdict, None without."""
    number = int(1.2 * HOUR * traffic.rate) + 50
    before = draw(random, traffic, number)
    after = draw(random, traffic, number, left)
    is_after_R = before.arrival_R > SWAP
    mixed = (np.where(is_after_R, new, old) for new, old in zip(after[1:], before[1:], strict=True))
    sums_S2 = pages(Requests(before.arrival_R, *mixed), traffic.every)
    watcher = Watcher(reference(random, traffic), baseline=5000, window=250)
    for index, (passes, accepted) in enumerate(sums_S2.cumsum(0)):
        watcher.look(Counters("", passes, accepted, ()), 0.0)
        if watcher.accepts_less:
            return (index + 1) * traffic.every
    return None


def simulate(traffic: Traffic, hours: int) -> dict:
    """Return false verdicts in so many hours, and the requests that verdicts took in a fifth as many, each swap."""
    random = np.random.default_rng(54)
    row: dict = traffic._asdict() | {"hours": hours}
    row["false"] = sum(verdict(random, traffic) is not None for _ in range(hours))
    row["requests"] = {}
    for left in LEFT if traffic.reference != "exact" else ():
        seconds = [verdict(random, traffic, left) for _ in range(hours // 5)]
        late = [(end or np.inf) - SWAP for end in seconds if end is None or end > SWAP]
        row["requests"][str(left)] = [
            float(wait * traffic.rate) if np.isfinite(wait) else None for wait in sorted(late)
        ]
    return row


def cell(requests: list[float | None] | None) -> str:
    """Return the median and the 95th percentile; a dash where the hour ended before."""
    if not requests:
        return ""
    shown = (requests[int(part * (len(requests) - 1))] for part in (0.5, 0.95))
    return " / ".join("-" if number is None else f"{number:,.0f}" for number in shown)


def main() -> None:
    """Simulate and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, help="a .md file; raw figures go to the .json beside it"
    )
    parser.add_argument("--force", action="store_true", help="overwrite what --out names")
    parser.add_argument("--hours", type=int, default=200, help="of each kind of traffic")
    args = parser.parse_args()
    harness.check_out(args.out, args.force)
    begin = time.monotonic()
    rows = [simulate(traffic, args.hours) for traffic in TRAFFIC]
    about = harness.machine(1) | {"seconds": round(time.monotonic() - begin)}
    headings = ["traffic", "hours", "false verdicts", *(f"chances x {left}" for left in LEFT)]
    table = [
        [row["name"], str(row["hours"]), str(row["false"]), *(cell(row["requests"].get(str(left))) for left in LEFT)]
        for row in rows
    ]  # fmt: skip
    text = [
        "# `specdec watch`: false verdicts in an hour, and requests until a verdict", "",
        "Simulated; after half an hour every draft's chance is multiplied. Requests from there to the verdict: median "
        "/ 95th percentile over a fifth as many hours, a dash where half an hour was not enough. Chains of "
        f"{DEPTH}; answers of 100 tokens, long ones of 1,000; a pass takes {1000 * PASS:g} ms; evaluations of "
        f"{PROMPTS} prompts; windows of 250 passes; a page each 2 s.", "",
        *harness.table(headings, table), "", f"`{about['command']}`, {about['date']}, {about['seconds']} s.",
    ]  # fmt: skip
    harness.keep(args.out, text, {"about": about, "rows": rows})


if __name__ == "__main__":
    main()
