"""How often the intervals of an evaluation and of a study hold the truth, and whether `detectable` promises too much.

``python benchmarks/coverage.py --out benchmarks/results/coverage_<yyyymmdd>.md`` simulates decoding under a known model
and counts the 95 % intervals that hold the truth: over prompts, of one evaluation
(``specdec/report/statistics.py``, beside the BCa bootstrap), and over seeds and prompts, of the contrast of two
arms of a study (``specdec/report/contrasts.py``, beside that of the two arms alone). Then it gives two arms the true
difference that is said to be detectable, and counts how often it is found.

Legend: A arms, S seeds, P prompts, Q target passes.
"""

import argparse
import functools
import math
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import bootstrap

# the folder of `benchmarks`, which is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from specdec.report.contrasts import Estimate, Linear, detectable, estimate, pooled, seed_error
from specdec.report.statistics import interval, ratio

DEPTH, TOKENS = 5, 96  # drafts of a pass; new tokens of an answer
# log-odds of acceptance: of all, and how much prompts differ (standard deviation)
COMMON, PROMPTS = 0.5, 0.6
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
    noisy: float = 1.0
    """How many times as much the trainings of the first half of the arms differ."""


MODELS = (
    Model("copies", 0.0, 0.0, 0.0),
    Model("prompts differ", 0.0, 0.4, 0.2),
    Model("trainings differ a little", 0.05, 0.1, 0.2),
    Model("trainings differ", 0.1, 0.1, 0.2),
    Model("trainings and prompts differ", 0.1, 0.4, 0.2),
    Model("trainings differ much", 0.2, 0.1, 0.2),
)
NOISY = (
    Model("half of the arms 3 times as noisy", 0.1, 0.1, 0.2, 3.0),
    Model("10 times", 0.1, 0.1, 0.2, 10.0),
)


def odds(
    model: Model, arms: int, seeds: int, prompts: int, better: float, draw: np.random.Generator
) -> Array:
    """Chance of acceptance of every draft, (A, S, P); the second arm's log-odds are higher by ``better`` than the
    first's, and the others' lie between."""
    apart_A = np.select([np.arange(arms) == 0, np.arange(arms) == 1], [-0.5, 0.5], 0.0)
    normal, noise_A = (
        draw.standard_normal,
        np.where(np.arange(arms) < arms / 2, model.noisy, 1.0)[:, None, None],
    )
    own = model.trainings * noise_A * normal((arms, seeds, 1)) + model.prompts * normal(
        (arms, 1, prompts)
    )
    # two arms' difference has that spread
    own = (own + model.answers * normal((arms, seeds, prompts))) / math.sqrt(2)
    logit_ASP = COMMON + PROMPTS * normal((1, 1, prompts)) + own + better * apart_A[:, None, None]
    return 1 / (1 + np.exp(-logit_ASP))


def decode(chance_ASP: Array, draw: np.random.Generator) -> tuple[Array, Array]:
    """Committed tokens and passes of chains: pass after pass, until an answer is long enough."""
    u_ASPQ = draw.random((*chance_ASP.shape, TOKENS))
    accepted_ASPQ = np.minimum(np.floor(np.log(u_ASPQ) / np.log(chance_ASP)[..., None]), DEPTH)
    total_ASPQ = np.cumsum(accepted_ASPQ + 1, axis=-1)
    passes_ASP = (total_ASPQ < TOKENS).sum(-1) + 1
    committed_ASP = np.take_along_axis(total_ASPQ, passes_ASP[..., None] - 1, -1)[..., 0]
    return committed_ASP, passes_ASP.astype(np.float64)


def study(
    model: Model, arms: int, seeds: int, prompts: int, better: float, draw: np.random.Generator
) -> tuple[Array, Array]:
    """Committed tokens and passes, (A, S, P) each."""
    return decode(odds(model, arms, seeds, prompts, better, draw), draw)


def figures(committed_ASP: Array, passes_ASP: Array) -> list[Linear]:
    """The acceptance length of every arm."""
    found = [pooled(t_SP, n_SP) for t_SP, n_SP in zip(committed_ASP, passes_ASP, strict=True)]
    return [each for each in found if each is not None]


def difference(arms: list[Linear]) -> Estimate:
    """The second arm less the first, as a study's card has it."""
    return estimate(arms[1].minus(arms[0]), 0.0, seeds=seed_error(arms), squares=2.0)


def alone(arms: list[Linear]) -> Estimate:
    """The same with an error of its own."""
    return estimate(arms[1].minus(arms[0]), 0.0)


@functools.cache
def truth(model: Model, better: float = 0.0) -> tuple[float, float]:
    """An arm's figure, and what the second has more, of endlessly many seeds and prompts, nearly: 100,000 prompts, each
    with a training of its own."""
    draw = np.random.default_rng(0)
    own = model._replace(trainings=0.0, answers=math.hypot(model.trainings, model.answers))
    drawn = [study(own, 2, 1, 10_000, better, draw) for _ in range(10)]
    one, two = figures(*(np.concatenate(each, axis=-1) for each in zip(*drawn, strict=True)))
    return one.value, two.value - one.value if better else 0.0


def holds(found: Estimate, value: float) -> bool:
    """Whether the interval does."""
    return found.low is not None and found.high is not None and found.low <= value <= found.high


def of_prompts(
    kind: str, prompts: int, times: int, resampled: int, draw: np.random.Generator
) -> dict:
    """Shares of evaluations whose interval holds the truth: ours, and BCa in some of them."""

    def drawn(count: int) -> Array:
        chance_P = (
            draw.beta(1.2, 2.5, size=count) * 0.98
            if kind == "long tail"
            else odds(MODELS[0], 1, 1, count, 0, draw)
        )
        return np.stack(decode(chance_P.reshape(1, 1, count), draw), axis=-1)[0, 0]

    sums = np.zeros(2)
    for _ in range(10):
        sums += drawn(20_000).sum(0)
    value, ours, bca = float(ratio(sums)), 0, 0
    for number in range(times):
        sums_P2 = drawn(prompts)
        found = interval(sums_P2)
        ours += found is not None and found.low <= value <= found.high
        if number < resampled:
            made = bootstrap((np.arange(prompts),), lambda at, axis: ratio(sums_P2[at].sum(-2)), vectorized=True,  # noqa: B023
                             n_resamples=1000, method="BCa", rng=draw).confidence_interval  # fmt: skip
            bca += made.low <= value <= made.high
    return {"kind": kind, "prompts": prompts, "ours": ours / times, "bca": bca / resampled}


def of_study(
    model: Model, arms: int, seeds: int, prompts: int, times: int, draw: np.random.Generator
) -> dict:
    """Shares of studies whose intervals hold the truth, and their median widths."""
    length, _ = truth(model) if model.noisy == 1 else (math.nan, 0.0)
    held, wide = dict.fromkeys(METHODS, 0), {name: list[float]() for name in METHODS}
    for _ in range(times):
        each = figures(*study(model, arms, seeds, prompts, 0.0, draw))
        for name, found, value in (
            ("pooled", difference(each), 0.0), ("alone", alone(each), 0.0), ("length", estimate(each[-1]), length)
        ):  # fmt: skip
            held[name] += holds(found, value)
            wide[name].append((found.high or 0) - (found.low or 0))
    shares = {name: count / times for name, count in held.items()}
    widths = {f"{name}_width": float(np.median(each)) for name, each in wide.items()}
    return {"model": model.name, "arms": arms, "seeds": seeds, "prompts": prompts} | shares | widths


def of_power(arms: int, seeds: int, prompts: int, times: int, draw: np.random.Generator) -> dict:
    """A true difference of the size that is detectable with the errors of all studies together is found so often; the
    range of each study holds it so often."""
    model, told = MODELS[3], []
    for _ in range(times):
        told.append(difference(figures(*study(model, arms, seeds, prompts, 0.0, draw))))
    error, df = (
        math.sqrt(np.mean([each.error**2 for each in told if each.error])),
        np.median([each.df for each in told]),
    )
    size = detectable(told[0]._replace(error=error, df=float(df)))
    assert size is not None
    (wanted, *_), sizes, better = size, [detectable(each) or (0.0, 0.0, 0.0) for each in told], 0.4
    for _ in range(3):
        better *= wanted / truth(model, better)[1]
    real = truth(model, better)[1]
    found = [
        difference(figures(*study(model, arms, seeds, prompts, better, draw))) for _ in range(times)
    ]
    return {
        "arms": arms, "seeds": seeds, "prompts": prompts, "detectable": wanted, "difference": real,
        "found": sum((each.p_value or 0) < 0.05 for each in found) / times,
        "ranged": sum(low <= wanted <= high for _, low, high in sizes) / times,
        "held": sum(holds(each, real) for each in found) / times,
    }  # fmt: skip


METHODS = {
    "pooled": "pooled over arms",
    "alone": "of two arms alone",
    "length": "one arm's own length",
}


def main() -> None:
    """Simulate and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, help="a .md file; raw figures go to the .json beside it"
    )
    parser.add_argument("--force", action="store_true", help="overwrite what --out names")
    parser.add_argument("--studies", type=int, default=1000, help="of each kind")
    parser.add_argument("--resampled", type=int, default=300, help="evaluations bootstrapped too")
    args = parser.parse_args()
    harness.check_out(args.out, args.force)
    begin, times = time.monotonic(), args.studies
    prompts, studies, power = [], [], []
    for kind in ("spread of a study", "long tail"):
        for count in (6, 18, 40):
            draw = np.random.default_rng([1, count, len(kind)])
            prompts.append(of_prompts(kind, count, 4 * times, args.resampled, draw))
    for at, model in enumerate((*MODELS, *NOISY)):
        sizes = [(8, 3, 6), (8, 3, 18), (8, 3, 40), (8, 5, 18)]
        sizes += [(2, 3, 6), (2, 3, 18), (2, 3, 40)] if model.noisy == 1 else []
        for arms, seeds, count in sizes:
            draw = np.random.default_rng([2, at, arms, seeds, count])
            studies.append(of_study(model, arms, seeds, count, times, draw))
            print(studies[-1], flush=True)
    for arms, seeds in ((2, 3), (8, 3), (2, 5), (8, 5)):
        power.append(of_power(arms, seeds, 40, times, np.random.default_rng([3, arms, seeds])))
        print(power[-1], flush=True)
    about = harness.machine(1) | {"studies": times, "resampled": args.resampled}
    about["seconds"] = round(time.monotonic() - begin)
    rows = {"prompts": prompts, "studies": studies, "power": power}
    harness.keep(args.out, markdown(about, rows), {"about": about, **rows})


def markdown(about: dict, rows: dict) -> list[str]:
    """The tables."""
    percent, times = "{:.1f}".format, about["studies"]
    margin = 196 * math.sqrt(0.05 * 0.95 / times)
    lines = ["# Coverage of 95 % intervals, and power", "", "Of 100 intervals, so many held the truth.", "",
             f"One evaluation, {4 * times:,} simulated a row (BCa: {about['resampled']:,}):", "",
             *harness.table(["acceptance over prompts", "prompts", "Student's t", "BCa bootstrap"], [
                 [row["kind"], str(row["prompts"]), percent(100 * row["ours"]), percent(100 * row["bca"])]
                 for row in rows["prompts"]])]  # fmt: skip
    lines += ["", f"Two arms of one kind in a study, {times:,} simulated a row (95 stands for 95 within {margin:.1f}); "
              "in brackets the median width:", "",
              *harness.table(["arms", "of", "seeds", "prompts", *METHODS.values()], [
                  [row["model"], str(row["arms"]), str(row["seeds"]), str(row["prompts"]),
                   *("-" if name == "length" and not row[name] else
                     f"{percent(100 * row[name])} ({row[f'{name}_width']:.2f})" for name in METHODS)]
                  for row in rows["studies"]])]  # fmt: skip
    heads = [
        "arms",
        "seeds",
        "prompts",
        "detectable",
        "true difference",
        "found",
        "range holds it",
        "interval held",
    ]
    lines += ["", "Two arms that differ by what is detectable (`trainings differ`, 80 % power asked for):", "",
              *harness.table(
                  heads,
                  [[str(row["arms"]), str(row["seeds"]), str(row["prompts"]), f"{row['detectable']:.2f}",
                    f"{row['difference']:.2f}", *(percent(100 * row[name]) for name in ("found", "ranged", "held"))]
                   for row in rows["power"]])]  # fmt: skip
    lines += ["", f"Standard deviations in log-odds of a draft's acceptance: prompts {PROMPTS}; of the arms' "
              "difference, trainings, arm by prompt, the rest: "
              + "; ".join(f"{m.name} {m.trainings:g}, {m.prompts:g}, {m.answers:g}" for m in MODELS)
              + f". Chains of {DEPTH}, {TOKENS} new tokens. Long tail: chances are 0.98 of Beta(1.2, 2.5). "
              "Of noisy arms two of the noisy half are compared.", "",
              f"`{about['command']}`, {about['date']}, {about['seconds']} s."]  # fmt: skip
    return lines


if __name__ == "__main__":
    main()
