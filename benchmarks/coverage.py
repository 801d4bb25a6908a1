"""How often the intervals of an evaluation and of a study hold the truth, and how often a study's verdicts are false.

``python benchmarks/coverage.py --out benchmarks/results/coverage_<yyyymmdd>.md`` simulates decoding under a known model
and counts the 95 % intervals that hold the truth: over prompts, of one evaluation
(``specdec/report/statistics.py``, beside the BCa bootstrap), and over seeds and prompts, of contrasts of the arms of a
study (``specdec/report/contrasts.py``). Then it gives arms the true difference that is said to be detectable, and
counts how often it is found. Last it simulates studies in which no arm is better than another, and counts those with a
verdict: the family-wise error, which Holm's correction promises to be 5 % at most.

Legend: A arms, S seeds, P prompts, Q target passes.
"""

import argparse
import functools
import math
import sys
import time
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import bootstrap

# the folder of `benchmarks`, which is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from specdec.report.contrasts import (
    Estimate,
    Linear,
    add_verdicts,
    contrast,
    contrasted,
    detectable,
    estimate,
    pooled,
)
from specdec.report.statistics import interval, ratio

DEPTH, TOKENS = 5, 96  # drafts of a pass; new tokens of an answer
# log-odds of acceptance: of all, and how much prompts differ (standard deviation)
COMMON, PROMPTS = 0.5, 0.6
Array = npt.NDArray[np.float64]

# of two levels each; of the eight arms the first four are noisy, or have a seed's luck in common
AXES = ("half", "first", "second")


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
    """How many times as much the trainings of the first arms differ."""
    noisy_arms: int = 0
    """How many arms these are; 0: half of them."""
    bad: float = 0.0
    """By how much one training in seven is worse."""
    alike: float = 0.0
    """Half of the arms by seed: a seed is better for that half."""


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

NULLS = (  # and the axis at whose levels the two others are compared
    ("all arms alike", {}, "half"),
    ("K = 4 is 3 times as noisy as K = 1", {"noisy": 3.0}, "half"),
    ("raw is 3 times as noisy as post-norm", {"noisy": 3.0}, "first"),
    ("one arm is 5 times as noisy", {"noisy": 5.0, "noisy_arms": 1}, "first"),
    ("one training in seven is bad", {"bad": 0.5}, "half"),
    ("a seed's luck is that of all arms of its K", {"alike": 0.1}, "half"),
)


def odds(
    model: Model, arms: int, seeds: int, prompts: int, better: float, draw: np.random.Generator
) -> Array:
    """Chance of acceptance of every draft, (A, S, P); every second arm's log-odds are higher by ``better``."""
    apart_A = np.arange(arms) % 2 - 0.5
    normal = draw.standard_normal
    noisy_arms = model.noisy_arms or arms / 2
    noise_A = np.where(np.arange(arms) < noisy_arms, model.noisy, 1.0)[:, None, None]
    own = model.trainings * noise_A * normal((arms, seeds, 1)) + model.prompts * normal(
        (arms, 1, prompts)
    )
    if model.bad:
        own -= model.bad * (draw.random((arms, seeds, 1)) < 1 / 7)
    if model.alike:
        own += model.alike * np.repeat(normal((2, seeds, 1)), arms // 2, axis=0)
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
    """Every second arm less the one before, averaged, as a study's card has it."""
    return contrasted(arms, np.tile([-2.0, 2.0], len(arms) // 2) / len(arms))


def alone(arms: list[Linear]) -> Estimate:
    """Of the first two."""
    return difference(arms[:2])


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
    """A true difference of the size that studies call detectable, their root mean square, is found so often; the range
    of each study holds it so often."""
    model, better = MODELS[3], 0.4
    told = [
        difference(figures(*study(model, arms, seeds, prompts, 0.0, draw))) for _ in range(times)
    ]
    sizes = [detectable(each) or (0.0, 0.0, 0.0) for each in told]
    wanted = math.sqrt(np.mean([size**2 for size, *_ in sizes]))
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


def grid(at: str) -> list[list[float]]:
    """Weights of eight arms in five contrasts: of two axes at both levels of a third, and of this one, averaged."""
    arms = [frozenset(zip(AXES, levels, strict=True)) for levels in product("01", repeat=3)]
    by_level = [[arm for arm in arms if (at, level) in arm] for level in "01"]
    compared = [(axis, some) for axis in AXES if axis != at for some in by_level]
    found = [contrast(some, [({axis: "1"}, {axis: "0"})]) for axis, some in [*compared, (at, arms)]]
    return [[weights.get(arm, 0.0) for arm in arms] for weights in found]


def of_contrast(arms: list[Linear], weight_A: list[float]) -> Estimate:
    """A contrast of the arms that have a weight, as a study's card has it."""
    pairs = [(arm, weight) for arm, weight in zip(arms, weight_A, strict=True) if weight]
    return contrasted([arm for arm, _ in pairs], [weight for _, weight in pairs])


def of_null(
    weights: list[list[float]], model: Model, seeds: int, quantities: int, times: int, draw: np.random.Generator
) -> dict:  # fmt: skip
    """The share of studies with a verdict where no arm is better, and the median of what the first contrast detects."""
    with_verdict, sizes = 0, list[float]()
    for _ in range(times):
        rows = list[dict]()
        for quantity in range(quantities):
            arms = figures(*study(model, 8, seeds, 40, 0.0, draw))
            estimates = [of_contrast(arms, weight_A) for weight_A in weights]
            rows += [{"quantity": quantity, **row._asdict()} for row in estimates]
        add_verdicts(rows)
        with_verdict += any(row["verdict"] in ("higher", "lower") for row in rows)
        sizes.append((detectable(estimates[0], len(rows)) or (math.nan,))[0])
    return {
        "seeds": seeds,
        "tests": len(rows),
        "error": with_verdict / times,
        "detectable": float(np.median(sizes)),
    }


AGAINST_BASELINE = [[-1.0, *np.eye(7)[at].tolist()] for at in range(7)]


def null_rows() -> list[tuple[str, Model, str, dict, str]]:
    """Design, base model, and one of :data:`NULLS`; with one factor those alone that differ."""
    bases = {"grid": (MODELS[3], MODELS[4]), "one factor": (MODELS[3],)}
    return [
        (design, base, *null)
        for design, models in bases.items()
        for base in models
        for null in NULLS
        if design == "grid" or null[-1] == "half"
    ]


METHODS = {
    "pooled": "half of the arms less the others",
    "alone": "two arms",
    "length": "one arm's own length",
}


def simulate(times: int, resampled: int) -> dict[str, list[dict]]:
    """The rows of every table, from so many studies a row."""
    rows: dict[str, list[dict]] = {"prompts": [], "studies": [], "power": [], "null": []}
    for kind in ("spread of a study", "long tail"):
        for count in (6, 18, 40):
            draw = np.random.default_rng([1, count, len(kind)])
            rows["prompts"].append(of_prompts(kind, count, 4 * times, resampled, draw))
    for at, model in enumerate((*MODELS, *NOISY)):
        sizes = [(8, 3, 6), (8, 3, 18), (8, 3, 40), (8, 5, 18)]
        sizes += [(2, 3, 6), (2, 3, 18), (2, 3, 40)] if model.noisy == 1 else []
        for arms, seeds, count in sizes:
            draw = np.random.default_rng([2, at, arms, seeds, count])
            rows["studies"].append(of_study(model, arms, seeds, count, times, draw))
            print(rows["studies"][-1], flush=True)
    for arms, seeds in ((2, 3), (8, 3), (2, 5), (8, 5)):
        draw = np.random.default_rng([3, arms, seeds])
        rows["power"].append(of_power(arms, seeds, 40, times, draw))
        print(rows["power"][-1], flush=True)
    for at, (design, base, name, changes, axis) in enumerate(null_rows()):
        for seeds in (3, 5):
            weights = grid(axis) if design == "grid" else AGAINST_BASELINE
            draw = np.random.default_rng([4, at, seeds])
            model = base._replace(**changes)
            found = of_null(weights, model, seeds, 2 if design == "grid" else 1, times, draw)
            rows["null"].append({"design": design, "model": base.name, "noise": name} | found)
            print(rows["null"][-1], flush=True)
    return rows


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
    begin = time.monotonic()
    rows = simulate(args.studies, args.resampled)
    about = harness.machine(1) | {"studies": args.studies, "resampled": args.resampled}
    about["seconds"] = round(time.monotonic() - begin)
    harness.keep(args.out, markdown(about, rows), {"about": about, **rows})


def markdown(about: dict, rows: dict) -> list[str]:
    """The tables."""
    percent, times = "{:.1f}".format, about["studies"]

    def within(share: float) -> str:
        return percent(196 * math.sqrt(share * (1 - share) / times))

    studies = [
        [row["model"], str(row["arms"]), str(row["seeds"]), str(row["prompts"]),
         *("-" if name == "length" and not row[name] else
           f"{percent(100 * row[name])} ({row[f'{name}_width']:.2f})" for name in METHODS)]
        for row in rows["studies"]
    ]  # fmt: skip
    power = [
        [str(row["arms"]), str(row["seeds"]), str(row["prompts"]), f"{row['detectable']:.2f}",
         f"{row['difference']:.2f}", *(percent(100 * row[name]) for name in ("found", "ranged", "held"))]
        for row in rows["power"]
    ]  # fmt: skip
    null = [
        [*(str(row[name]) for name in ("design", "model", "noise", "seeds", "tests")),
         percent(100 * row["error"]), f"{row['detectable']:.2f}"]
        for row in rows["null"]
    ]  # fmt: skip
    of_power = "arms seeds prompts detectable true_difference found range_holds_it interval_held"
    of_null = "design arms noise_of_seeds seeds tests verdict_in detectable"
    models = "; ".join(f"{m.name} {m.trainings:g}, {m.prompts:g}, {m.answers:g}" for m in MODELS)
    return [
        "# Coverage of 95 % intervals, power, and false verdicts", "", "Of 100 intervals, so many held the truth.", "",
        f"One evaluation, {4 * times:,} simulated a row (BCa: {about['resampled']:,}):", "",
        *harness.table(["acceptance over prompts", "prompts", "Student's t", "BCa bootstrap"], [
            [row["kind"], str(row["prompts"]), percent(100 * row["ours"]), percent(100 * row["bca"])]
            for row in rows["prompts"]]), "",
        f"Contrasts of arms that are equally good, and one arm's length, in {times:,} studies a row (95 stands for 95 "
        f"within {within(0.05)}); in brackets the median width:", "",
        *harness.table(["arms", "of", "seeds", "prompts", *METHODS.values()], studies), "",
        "Half of the arms are better by what is detectable (`trainings differ`, 80 % power asked for):", "",
        *harness.table(of_power.replace(" ", ", ").replace("_", " ").split(", "), power), "",
        f"Of 100 studies in which no arm is better, so many had a verdict ({times:,} a row; 6 stands for 6 within "
        f"{within(0.06)}). Eight arms, 40 prompts. Grid: two axes at both levels of the third, and this one averaged, "
        "of two quantities. One factor: seven arms less the baseline, one of the noisy ones. Detectable: of the first "
        "contrast, the median.", "",
        *harness.table(of_null.replace(" ", ", ").replace("_", " ").split(", "), null, words=3), "",
        f"Standard deviations in log-odds of a draft's acceptance: prompts {PROMPTS}; of the difference of two arms, "
        f"trainings, arm by prompt, the rest: {models}. A bad training is worse by 0.5, a seed's luck is 0.1, both "
        f"before the division by the root of 2. Chains of {DEPTH}, {TOKENS} new tokens. Long tail: chances are 0.98 of "
        "Beta(1.2, 2.5). Where half of the arms are noisy, the two arms are of that half.", "",
        f"`{about['command']}`, {about['date']}, {about['seconds']} s.",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
