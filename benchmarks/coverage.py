"""How often the intervals of a study hold the truth, with few seeds and few prompts, and how often its tests err.

``python benchmarks/coverage.py --out benchmarks/results/coverage_<yyyymm>.md`` simulates studies of two arms under a
known model and prints, for each, how many of the 95 % intervals hold the truth: the study card's
(``specdec/studies/statistics.py``), the percentile bootstrap that draws seeds and prompts anew, variance components
with Satterthwaite's degrees of freedom, and the bootstrap over prompts that leaves seeds as they are.

Legend: A 2 arms, S seeds, P prompts, Q target passes.
"""

import argparse
import math
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import t as student

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of `benchmarks`, which is not installed

from benchmarks import harness
from specdec.studies.statistics import Linear, Spread, detectable, estimate, pooled, spread

DEPTH, TOKENS = 5, 96  # drafts of a pass; new tokens of an answer
COMMON, PROMPTS = 0.5, 0.6  # log-odds of acceptance: of all, and how much prompts differ (standard deviation)
Array = npt.NDArray[np.float64]


class Model(NamedTuple):
    """Standard deviations of what makes two arms differ, in log-odds of a draft's acceptance."""

    name: str
    trainings: float
    """Arm by seed: one training turned out better than another."""
    prompts: float
    """Arm by prompt: an arm is better at some prompts."""
    answers: float
    """Arm by seed by prompt."""


MODELS = (
    Model("copies", 0.0, 0.0, 0.0),
    Model("answers differ", 0.0, 0.0, 0.4),
    Model("prompts differ", 0.0, 0.4, 0.2),
    Model("trainings differ a little", 0.05, 0.1, 0.2),
    Model("trainings differ", 0.1, 0.1, 0.2),
    Model("trainings and prompts differ", 0.1, 0.4, 0.2),
    Model("trainings differ much", 0.2, 0.1, 0.2),
)


def odds(model: Model, seeds: int, prompts: int, better: float, draw: np.random.Generator) -> Array:
    """Chance of acceptance of every draft, (A, S, P); the second arm's log-odds are higher by ``better``."""
    normal = draw.standard_normal
    own = model.trainings * normal((2, seeds, 1)) + model.prompts * normal((2, 1, prompts))
    own = (own + model.answers * normal((2, seeds, prompts))) / math.sqrt(2)  # so much is the difference's spread
    logit_ASP = COMMON + PROMPTS * normal((1, 1, prompts)) + own + better * np.array([0.0, 1.0])[:, None, None]
    return 1 / (1 + np.exp(-logit_ASP))


def decode(chance_ASP: Array, draw: np.random.Generator) -> tuple[Array, Array]:
    """Committed tokens and passes of chains: pass after pass, until an answer is long enough."""
    u_ASPQ = draw.random((*chance_ASP.shape, TOKENS))
    accepted_ASPQ = np.minimum(np.floor(np.log(u_ASPQ) / np.log(chance_ASP)[..., None]), DEPTH)
    total_ASPQ = np.cumsum(accepted_ASPQ + 1, axis=-1)
    passes_ASP = (total_ASPQ < TOKENS).sum(-1) + 1
    committed_ASP = np.take_along_axis(total_ASPQ, passes_ASP[..., None] - 1, -1)[..., 0]
    return committed_ASP, passes_ASP.astype(np.float64)


def study(model: Model, seeds: int, prompts: int, better: float, draw: np.random.Generator) -> tuple[Array, Array]:
    """Committed tokens and passes of two arms, (A, S, P) each."""
    return decode(odds(model, seeds, prompts, better, draw), draw)


def figures(committed_ASP: Array, passes_ASP: Array) -> tuple[Linear, Linear]:
    """The first arm's acceptance length, and the second's less it."""
    one, two = (pooled(t_SP, n_SP) for t_SP, n_SP in zip(committed_ASP, passes_ASP, strict=True))
    assert one is not None and two is not None
    return one, two.minus(one)


def truth(model: Model, better: float, draw: np.random.Generator) -> tuple[float, float]:
    """The figures of endlessly many seeds and prompts, nearly: 200,000 prompts, each with a training of its own."""
    alone = model._replace(trainings=0.0, answers=math.hypot(model.trainings, model.answers))
    drawn = [study(alone, 1, 10_000, better, draw) for _ in range(20)]
    committed_ASP, passes_ASP = (np.concatenate(each, axis=-1) for each in zip(*drawn, strict=True))
    one, difference = figures(committed_ASP, passes_ASP)
    return one.value, difference.value if better else 0.0


def bootstrap(committed_ASP: Array, passes_ASP: Array, draw: np.random.Generator, times: int) -> tuple[Array, Array]:
    """Differences of resamples: of seeds and prompts, and of prompts alone."""
    _, S, P = passes_ASP.shape
    seeds_RS = draw.multinomial(S, np.full(S, 1 / S), size=times).astype(np.float64)
    prompts_RP = draw.multinomial(P, np.full(P, 1 / P), size=times).astype(np.float64)
    out = []
    for weights_RS in (seeds_RS, np.ones_like(seeds_RS)):
        sums = [[((weights_RS @ x_SP) * prompts_RP).sum(1) for x_SP in x_ASP] for x_ASP in (committed_ASP, passes_ASP)]
        out.append(sums[0][1] / sums[1][1] - sums[0][0] / sums[1][0])
    return out[0], out[1]


def satterthwaite(found: Spread) -> float:
    """Half of an interval from variance components, none below zero, with Satterthwaite's degrees of freedom."""
    s, p, e = max(found.of_seeds, found.of_rest), max(found.of_prompts, found.of_rest), found.of_rest
    S, P = found.seeds, found.prompts
    variance = s + p - e
    if not variance:
        return 0.0
    df = variance**2 / (s**2 / (S - 1) + p**2 / (P - 1) + e**2 / ((S - 1) * (P - 1)))
    return float(student.ppf(0.975, df)) * math.sqrt(variance / (S * P))


def simulate(
    model: Model, seeds: int, prompts: int, better: float, studies: int, resampled: int, draw: np.random.Generator
) -> dict[str, float]:
    """Shares of studies whose intervals hold the truth, by method, and the card's median width and power."""
    lengths, differences = truth(model, better, draw)
    held: dict[str, list[bool]] = {name: [] for name in METHODS}
    widths, found_it, least = [], [], []
    for number in range(studies):
        counts = study(model, seeds, prompts, better, draw)
        own, paired = figures(*counts)
        one, two = estimate(own), estimate(paired)
        assert one.low is not None and one.high is not None and two.low is not None and two.high is not None
        held["length"].append(one.low <= lengths <= one.high)
        held["card"].append(two.low <= differences <= two.high)
        held["satterthwaite"].append(abs(paired.value - differences) <= satterthwaite(spread(paired.added_SP)))
        widths.append(two.high - two.low)
        found_it.append(not two.low <= 0 <= two.high)
        least.append(detectable(two.spread) or math.nan)
        if number < resampled:
            for name, drawn_R in zip(("both", "alone"), bootstrap(*counts, draw, 400), strict=True):
                low, high = np.quantile(drawn_R, [0.025, 0.975])
                held[name].append(bool(low <= differences <= high))
    shares = {name: sum(each) / len(each) for name, each in held.items()}
    more = {"width": float(np.median(widths)), "found": sum(found_it) / studies, "least": float(np.median(least))}
    return shares | more | {"difference": differences}


METHODS = {
    "card": "difference, the card's", "satterthwaite": "components, Satterthwaite", "both": "bootstrap of both",
    "alone": "bootstrap of prompts", "length": "length, the card's",
}  # fmt: skip


def main() -> None:
    """Simulate and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a .md file; raw figures go to the .json beside it")
    parser.add_argument("--force", action="store_true", help="overwrite what --out names")
    parser.add_argument("--studies", type=int, default=1000, help="of each kind")
    parser.add_argument("--resampled", type=int, default=300, help="of them, bootstrapped too")
    args = parser.parse_args()
    harness.check_out(args.out, args.force)
    begin, rows = time.monotonic(), []
    sizes = [(3, 20), (3, 40), (3, 80), (5, 20), (5, 40)]
    for kind, model in enumerate(MODELS):
        for seeds, prompts in sizes:
            draw = np.random.default_rng([kind, seeds, prompts])
            rows.append({"model": model.name, "seeds": seeds, "prompts": prompts}
                        | simulate(model, seeds, prompts, 0.0, args.studies, args.resampled, draw))  # fmt: skip
            print(rows[-1], flush=True)
    for better in (0.1, 0.2, 0.4):
        draw = np.random.default_rng([99, round(10 * better)])
        found = simulate(MODELS[3], 3, 40, better, args.studies, 1, draw)
        rows.append({"model": f"better by {better} in log-odds", "seeds": 3, "prompts": 40} | found)
    about = harness.machine(1) | {"studies": args.studies, "resampled": args.resampled}
    about["seconds"] = round(time.monotonic() - begin)
    harness.keep(args.out, markdown(about, rows), {"about": about, "rows": rows})


def markdown(about: dict, rows: list[dict]) -> list[str]:
    """The tables."""
    null, better = [row for row in rows if not row["difference"]], [row for row in rows if row["difference"]]
    margin = 196 * math.sqrt(0.05 * 0.95 / about["studies"])
    headings = ["two arms of one kind", "seeds", "prompts", *METHODS.values(), "median width"]
    cells = [
        [row["model"], str(row["seeds"]), str(row["prompts"]), *(f"{100 * row[name]:.1f}" for name in METHODS),
         f"{row['width']:.2f}"] for row in null
    ]  # fmt: skip
    lines = ["# Coverage of a study's 95 % intervals", "",
             f"Of 100 studies, so many intervals held the truth; {about['studies']:,} studies a row (bootstraps: "
             f"{about['resampled']:,} of them), so that 95 stands for 95 within {margin:.1f}.", "",
             *harness.table(headings, cells)]  # fmt: skip
    headings = ["the second arm is", "true difference", "median detectable difference", "found (p < 0.05)", "held"]
    cells = [
        [row["model"], f"{row['difference']:.2f}", f"{row['least']:.2f}", f"{100 * row['found']:.1f} %",
         f"{100 * row['card']:.1f}"] for row in better
    ]  # fmt: skip
    lines += ["", *harness.table(headings, cells)]
    lines += ["", f"Standard deviations in log-odds of a draft's acceptance: prompts {PROMPTS}; of the arms' "
              "difference, trainings, arm by prompt, the rest: "
              + "; ".join(f"{m.name} {m.trainings:g}, {m.prompts:g}, {m.answers:g}" for m in MODELS)
              + f". Chains of {DEPTH}, {TOKENS} new tokens. The second table has the model «{MODELS[3].name}».", "",
              f"`{about['command']}`, {about['date']}, {about['seconds']} s."]  # fmt: skip
    return lines


if __name__ == "__main__":
    main()
