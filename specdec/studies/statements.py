"""What a study's numbers support and what not, in plain sentences made from them alone."""

from typing import Any

from specdec.evaluation.style import FEW_PROMPTS, bracketed
from specdec.studies.results import ACCEPTANCE
from specdec.studies.statistics import distinct

Json = dict[str, Any]
FEW_SEEDS = 3
UNEQUAL = 0.01  # share by which trained parameters may differ unmentioned


def number(value: float | None, digits: int = 2, sign: bool = False) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:{'+' if sign else ''}.{digits}f}"


def interval(found: Json | None, digits: int = 2, sign: bool = False) -> str:
    """A figure with its interval in brackets."""
    if not found:
        return "-"
    return bracketed(found["value"], found["low"], found["high"], lambda value: number(value, digits, sign))


def p_value(value: float | None) -> str:
    """A p-value to two figures."""
    if value is None:
        return "-"
    return "< 0.001" if value < 0.001 else f"{value:.2g}" if value < 0.095 else f"{value:.2f}"


def effect_name(row: Json, found: Json) -> str:
    """An interaction, or a main effect with the level that it is against."""
    if row["kind"] != "main":
        return row["effect"]
    axis = row["effect"].split("=", 1)[0]
    levels = next(arm["levels"] for arm in found["arms"] if arm["is_baseline"])
    return f"{row['effect']} against {axis}={levels[axis]}"


def statements(found: Json) -> list[str]:
    """A sentence for every comparison of acceptance length, and for every other difference that is told apart.

    Of drift and robustness, effects and interactions where the design has them, else comparisons with the baseline.
    """
    lengths = [row for row in found["comparisons"] if row["family"] == ACCEPTANCE]
    effects = [row for row in found["effects"] if row["family"] != ACCEPTANCE]
    known = {row["quantity"] for row in effects}
    others = [row for row in found["comparisons"] if row["family"] != ACCEPTANCE and row["quantity"] not in known]
    rest = [row for row in (*effects, *others) if row["verdict"] != "not tested"]
    told = [row for row in rest if row["verdict"] != "not told apart"]
    out = [_sentence(row, found) for row in (*lengths, *told)]
    if left := len(distinct(rest)) - len(distinct(told)):
        of = f"{left} {'other ' if told else ''}differences of {len(distinct(rest))} tested"
        out.append(f"Drift and robustness: {of} are not told apart from none.")
    return out


def _sentence(row: Json, found: Json) -> str:
    who = row["arm"] if "arm" in row else effect_name(row, found)
    kind = ", interaction" if row.get("kind") == "interaction" else ""
    by, text = interval(row, 2 if row["family"] == ACCEPTANCE else 3, True), p_value(row["p_holm"])
    seen = row.get("detectable") if row["verdict"] == "not told apart" else None
    tail = "" if seen is None else f"; this study would have found a difference of {number(seen)} four times in five"
    p = f"p {text}" if text.startswith("<") else f"p = {text}"
    return f"{who}{kind}: {row['quantity']} is {row['verdict']}, by {by} ({p} after Holm's correction{tail})."


def cautions(found: Json) -> list[str]:
    """What stands in the way of reading more into the numbers."""
    out, base, rows = [], found["study"]["baseline"], [*found["comparisons"], *found["effects"]]
    for arm in found["arms"]:
        for run in arm["runs"]:
            for kind, state in run["states"].items():
                if state["name"] != "done":
                    why = f": {state['message']}" if state["message"] else ""
                    out.append(f"{arm['name']}, seed {run['seed']}: {kind} {state['name']}{why}.")
    compared = {base, *(row["arm"] for row in found["comparisons"] if row["family"] == ACCEPTANCE)}
    out += [f"{arm['name']} is not compared: evaluations of it and the baseline with one draft shape are not there."
            for arm in found["arms"] if arm["name"] not in compared]  # fmt: skip
    if rows and min(row["seeds"] for row in rows) < FEW_SEEDS:
        out.append(
            "Some comparisons are of one or two seeds: of one, intervals are over prompts alone and say nothing of "
            "another training; of two, a t-interval of one degree of freedom is very wide."
        )
    prompts = [own["prompts"] for one in found["quantities"] for own in one["arms"].values()]
    if prompts and min(prompts) < FEW_PROMPTS:
        out.append(f"{min(prompts)} prompts are few: acceptance differs from prompt to prompt with a long tail.")
    if rows:
        out.append("Intervals are of one target, one prompt set and one training setup; they say nothing of others.")
        out.append("Brackets are not corrected for the number of comparisons; verdicts and Holm's p-values are.")
    out += [f"Unequal by permission: {line}." for line in found["study"]["unequal"]]
    sizes = {arm["name"]: arm["trained_parameters"] for arm in found["arms"]}
    for name, size in sizes.items():
        if size and (own := sizes[base]) and abs(size - own) > UNEQUAL * own:
            share = f"{abs(100 * (size / own - 1)):.0f} % {'more' if size > own else 'fewer'}"
            out.append(f"{name} trains {size:,} parameters, {share} than the baseline: size may be what is seen.")
    return out
