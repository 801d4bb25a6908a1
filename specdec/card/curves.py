"""What ``specdec drift`` and ``specdec robustness`` measured, over seeds and prompts.

Legend: S seeds, P prompts.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from specdec.card.crossed import COSINE, POSITIVE, SHARE, estimate
from specdec.card.linear import pooled
from specdec.card.study import Study, common
from specdec.drift.results import sums_of
from specdec.evaluation.statistics import Array


def drift(study: Study) -> dict[str, Any]:
    """Every series by draft step, as ``{series: {title, unit, arms: {arm: [estimate by depth]}}}``; empty if none."""
    out: dict[str, Any] = {}
    for arm in study.arms:
        found = [run.measured("drift") for run in arm.done("drift")]
        prompts = common([[str(each) for each in one["prompts"]] for one in found])
        for name in common([list(one["series"]) for one in found]):
            series = out.setdefault(
                name, {"title": found[0]["series"][name]["title"], "unit": found[0]["series"][name]["unit"], "arms": {}}
            )
            depths = min(len(one["series"][name]["values"]) for one in found)
            possible = _possible(series["unit"])
            series["arms"][arm.name] = [_mean_of(found, prompts, name, depth, possible) for depth in range(depths)]
    return out


def _possible(unit: str) -> tuple[float, float]:
    """Of a series; what is neither share nor cosine is a size or a divergence."""
    return SHARE if unit.startswith("share") else COSINE if unit == "cosine" else POSITIVE


def _mean_of(
    found: Sequence[dict[str, Any]], prompts: Sequence[str], name: str, depth: int, possible: tuple[float, float]
) -> Any:
    """Over the chains that came to this depth; a prompt without any, with any seed, is left out."""
    sums = np.stack([sums_of(one, name)[depth][places(one, prompts)] for one in found])
    sums = sums[:, (sums[..., 1] > 0).any(0)]
    figure = pooled(sums[..., 0], sums[..., 1])
    return estimate(figure, possible=possible).to_json() if figure else None


def places(one: dict[str, Any], prompts: Sequence[str]) -> list[int]:
    """Where these prompts stand in a measurement."""
    place = {str(prompt): number for number, prompt in enumerate(one["prompts"])}
    return [place[prompt] for prompt in prompts]


def trained_depths(study: Study) -> dict[str, int]:
    """By arm, the unroll steps it was trained with, as ``drift.json`` has them."""
    firsts = {arm.name: arm.done("drift")[:1] for arm in study.arms}
    return {name: int(runs[0].measured("drift")["trained_depth"]) for name, runs in firsts.items() if runs}


def robustness(study: Study) -> dict[str, Any]:
    """Acceptance length under every condition, and what it is of the clean one's, prompt by prompt; empty if none."""
    titles: dict[str, dict[str, Any]] = {}
    arms: dict[str, dict[str, Any]] = {}
    for arm in study.arms:
        if found := [run.measured("robustness") for run in arm.done("robustness")]:
            arms[arm.name] = _conditions(found, titles)
    return {"conditions": titles, "arms": arms} if arms else {}


def _conditions(found: Sequence[dict[str, Any]], titles: dict[str, dict[str, Any]]) -> dict[str, Any]:
    by_name = [{each["name"]: each for each in one["conditions"]} for one in found]
    prompts = common([[str(each) for each in one["prompts"]] for one in found])
    clean = found[0]["clean"]
    out: dict[str, Any] = {}
    for name in common([list(each) for each in by_name]):
        first = by_name[0][name]
        titles.setdefault(name, {"title": first["title"], "group": first["group"], "clean": name == clean})
        reasons = [each[name]["skipped"] for each in by_name if each[name].get("skipped")]
        if reasons:
            out[name] = {"skipped": reasons[0]}
            continue
        pair = [_lengths(found, [each[of] for each in by_name], prompts) for of in (name, clean)]
        counts = np.stack([*pair[0], *pair[1]])  # committed and passes, there and clean
        counts = counts[:, :, (counts > 0).all((0, 1))]  # prompts that came to a pass everywhere
        there, base = pooled(counts[0], counts[1]), pooled(counts[2], counts[3])
        if there is None or base is None:
            out[name] = {"skipped": "no prompt came to a target pass"}
            continue
        kept = estimate(there.over(base), null=1.0)
        out[name] = {"acceptance_length": estimate(there).to_json(), "kept": kept.to_json()}
    return out


def _lengths(found: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], prompts: Sequence[str]) -> list[Array]:
    out = []
    for key in ("committed", "passes"):
        columns = []
        for one, row in zip(found, rows, strict=True):
            columns.append([float(row[key][place] or 0) for place in places(one, prompts)])
        out.append(np.array(columns, dtype=np.float64))
    return out
