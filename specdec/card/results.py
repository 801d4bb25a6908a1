"""All of a card's numbers, JSON-ready."""

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.card import cost, curves
from specdec.card.counts import Counts, counted
from specdec.card.crossed import ANY, METHOD, SHARE, estimate
from specdec.card.effects import effects_on
from specdec.card.linear import Linear
from specdec.card.multiple import judge
from specdec.card.outcomes import outcomes
from specdec.card.power import detectable, prompts_needed
from specdec.card.study import Arm, Study, common
from specdec.evaluation.compare_command import differing_settings
from specdec.evaluation.comparison import ALPHA

SEEDS_TO_PLAN = (3, 5, 10)

Json = dict[str, Any]


def results(study: Study, detect: float) -> Json:
    """Everything that the study measured.

    Args:
        detect: difference in acceptance length that the plans for further studies are to see.

    Raises:
        ValueError: a measurement cannot be read, or two evaluations have other prompts or another target.
    """
    _check(study)
    counts = {arm.name: counted(arm) for arm in study.arms}
    growths = list(dict.fromkeys(growth for own in counts.values() for growth in own))
    training = {
        arm.name: {str(run.seed): cost.rounded(cost.cost(run)) for run in arm.done("fit")} for arm in study.arms
    }
    depths = {name: depth for name in training if (depth := trained_depth(training[name])) is not None}
    depths |= curves.trained_depths(study)
    compared = [
        _comparison(study, arm, growth, counts, detect)
        for growth in growths
        for arm in study.arms
        if not arm.is_baseline and growth in counts[arm.name] and growth in counts[study.base.name]
    ]
    judge(compared)
    found = [row for growth in growths for row in _effects(study, growth, counts)]
    judge(found)
    return {
        "study": {
            "name": study.name, "design": study.design, "axes": study.axes, "baseline": study.base.name,
            "generators": study.generators, "seeds": study.seeds, "unequal": list(study.plan.get("unequal") or []),
        },
        "statistics": {"intervals": METHOD, "alpha": ALPHA, "detect": detect,
                       "corrections": "Holm (p_holm, which the verdicts go by) and Benjamini-Hochberg (p_bh), over all "
                       "comparisons of acceptance length with the baseline together, and over all effects on it; those "
                       "of drift, and those of robustness, are families of their own"},
        "arms": [_arm(arm, depths.get(arm.name)) for arm in study.arms],
        "growths": {growth: _growth(study, growth, counts, depths) for growth in growths},
        "comparisons": compared,
        "not_compared": _no_growth(study, counts),
        "settings_differ": _settings(study),
        "effects": found,
        "drift": curves.drift(study),
        "robustness": curves.robustness(study),
        "outcomes": outcomes(study),
        "training": training,
        "loss_curves": _losses(study),
    }  # fmt: skip


def trained_depth(fits: Mapping[str, Json]) -> int | None:
    """The unroll steps of an arm's fits."""
    return next((fit["trained_depth"] for fit in fits.values() if fit["trained_depth"] is not None), None)


def _check(study: Study) -> None:
    """See that all evaluations have one target and the same prompts."""
    runs = [run for arm in study.arms for run in arm.done("evaluate")]
    for run in runs[1:]:
        one, two = runs[0].evaluation, run.evaluation
        if one.target != two.target:
            raise ValueError(f"{one.name} and {two.name} differ in their target (its fingerprint): one study has one")
        if one.settings.get("prompts_sha256") != two.settings.get("prompts_sha256"):
            raise ValueError(
                f"{one.name} and {two.name} differ in their prompts: they cannot be compared prompt by prompt"
            )


def _settings(study: Study) -> dict[str, list[str]]:
    """By arm, the settings in which its evaluations are not the baseline's."""
    base = study.base.done("evaluate")
    out = {}
    for arm in study.arms:
        own = arm.done("evaluate")
        if base and own and (odd := differing_settings(base[0].evaluation, own[0].evaluation)):
            out[arm.name] = odd
    return out


def _no_growth(study: Study, counts: Mapping[str, Mapping[str, Counts]]) -> dict[str, str]:
    base = counts[study.base.name]
    out = {}
    for arm in study.arms:
        if arm.is_baseline:
            continue
        if not counts[arm.name]:
            out[arm.name] = "no evaluation of it is done"
        elif not base:
            out[arm.name] = "no evaluation of the baseline is done"
        elif not set(base) & set(counts[arm.name]):
            out[arm.name] = "it shares no growth with the baseline"
    return out


def _arm(arm: Arm, depth: int | None) -> Json:
    runs = [
        {"seed": run.seed, "keys": run.keys, "states": {kind: state._asdict() for kind, state in run.states.items()}}
        for run in arm.runs
    ]
    return {
        "name": arm.name, "levels": arm.levels, "is_baseline": arm.is_baseline, "differences": list(arm.differences),
        "trained_depth": depth, "runs": runs,
    }  # fmt: skip


def _growth(study: Study, growth: str, counts: Mapping[str, Mapping[str, Counts]], depths: Mapping[str, int]) -> Json:
    own = {name: of[growth] for name, of in counts.items() if growth in of}
    prompts = common([each.prompts for each in own.values()])
    arms = {name: _figures(each.of(each.seeds, prompts), depths.get(name)) for name, each in own.items()}
    return {"prompts": len(prompts), "depth": max(each.depth for each in own.values()), "arms": arms}


def _figures(own: Counts, depth: int | None) -> Json:
    by_seed = {str(seed): own.of([seed], own.prompts).length() for seed in own.seeds}
    out: Json = {
        "seeds": own.seeds,
        "passes": int(own.accepted_SPK.sum()),
        "acceptance_length": _shown(own.length()),
        "by_seed": {seed: None if figure is None else figure.value for seed, figure in by_seed.items()},
        "joint": [_shown(own.joint(k), possible=SHARE) for k in range(1, own.depth + 1)],
        "conditional": [_shown(own.conditional(k, k), possible=SHARE) for k in range(1, own.depth + 1)],
        "tokens_per_second": _shown(own.rate()),
        "speedup": _shown(own.speedup()),
        "beyond": None,
    }
    if depth is not None and 0 < depth < own.depth:
        within, after = own.conditional(1, depth), own.conditional(depth + 1, own.depth)
        if within and after:
            out["beyond"] = {
                "trained_depth": depth,
                "within": _shown(within, possible=SHARE), "after": _shown(after, possible=SHARE),
                "difference": _shown(after.minus(within), null=0.0),
            }  # fmt: skip
    return out


def _comparison(study: Study, arm: Arm, growth: str, counts: Mapping[str, Mapping[str, Counts]], detect: float) -> Json:
    """An arm less the baseline, of the same seeds and prompts."""
    two, one = counts[arm.name][growth], counts[study.base.name][growth]
    seeds, prompts = common([one.seeds, two.seeds]), common([one.prompts, two.prompts])
    a, b = (each.of(seeds, prompts).length() if seeds and prompts else None for each in (one, two))
    row: Json = {"growth": growth, "arm": arm.name, "baseline": study.base.name, "common_seeds": seeds}
    if a is None or b is None:
        return row | dict.fromkeys(("a", "b", "value", "low", "high", "p_value", "ratio", "detectable"))
    found = estimate(b.minus(a), null=0.0)
    least = detectable(found.spread)
    plans = {str(n): prompts_needed(found.spread, n, detect) for n in sorted({max(2, len(seeds)), *SEEDS_TO_PLAN})}
    return row | {
        "a": a.value, "b": b.value, **found.to_json(), "ratio": _shown(b.over(a)),
        "detectable": least, "prompts_needed": plans if least is not None and len(seeds) > 1 else None,
    }  # fmt: skip


def _effects(study: Study, growth: str, counts: Mapping[str, Mapping[str, Counts]]) -> list[Json]:
    """Main effects and interactions under one growth."""
    own = {name: of[growth] for name, of in counts.items() if growth in of}
    seeds, prompts = common([one.seeds for one in own.values()]), common([one.prompts for one in own.values()])
    if not seeds or not prompts:
        return []
    lengths = {name: one.of(seeds, prompts).length() for name, one in own.items()}
    figures = {name: length for name, length in lengths.items() if length is not None}
    return [{"growth": growth, **row} for row in effects_on(study, figures)]


def _losses(study: Study) -> dict[str, dict[str, Sequence[tuple[int, float]]]]:
    return {
        arm.name: {str(run.seed): cost.curve(run.place("fit"), "train/loss") for run in arm.done("fit")}
        for arm in study.arms
    }


def _shown(figure: Linear | None, null: float | None = None, possible: tuple[float, float] = ANY) -> Json | None:
    return None if figure is None else estimate(figure, null, possible).to_json()
