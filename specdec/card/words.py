"""What the numbers support and what not, in plain sentences made from them alone."""

from collections.abc import Mapping
from typing import Any

from specdec.card.multiple import distinct
from specdec.evaluation.markdown import FEW_PROMPTS, bracketed

FEW_SEEDS = 3
_UNEQUAL = 0.01  # share by which trained parameters may differ unmentioned

Json = Mapping[str, Any]


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


def statements(card: Json) -> list[str]:
    """One sentence for every comparison with the baseline, as its p-value after correction has it."""
    return [_statement(row) for row in card["comparisons"]]


def outcome_statements(card: Json) -> list[str]:
    """One sentence for every difference in drift or robustness that is told apart, and how many are not.

    Of a design with several axes their effects and interactions, of another the comparisons with the baseline.
    """
    found = card["outcomes"]
    if not found:
        return []
    rows = []
    for outcome in found["titles"]:
        effects = [row for row in found["effects"] if row["outcome"] == outcome]
        rows += effects or [row for row in found["comparisons"] if row["outcome"] == outcome]
    rows = [row for row in rows if row["verdict"] != "not tested"]
    told = [row for row in rows if row["verdict"] in ("higher", "lower")]
    levels = base_levels(card)
    out = [
        f"{_who(row, levels)}: {found['titles'][row['outcome']]['title']} is {row['verdict']}, by "
        f"{interval(row, 3, True)} ({_p(row['p_holm'])} after Holm's correction)."
        for row in told
    ]
    tested, finds = len(distinct(rows)), len(distinct(told))
    if left := tested - finds:
        what = "other differences" if told else "differences"
        out.append(f"Drift and robustness: {left} {what} of {tested} tested are not told apart from none.")
    return out


def _who(row: Json, baseline: Mapping[str, str]) -> str:
    """An arm, or an effect with those it may be taken for."""
    if "effect" not in row:
        return str(row["arm"])
    kind = "" if row["kind"] == "main" else ", interaction"
    others = ", ".join(row["aliases"])
    return f"{effect(row, baseline)}{kind}{f' (or {others})' if others else ''}"


def effect(row: Json, baseline: Mapping[str, str]) -> str:
    """An interaction, or a main effect with the level that it is against."""
    if row["kind"] != "main":
        return str(row["effect"])
    axis = row["effect"].split("=", 1)[0]
    return f"{row['effect']} against {axis}={baseline[axis]}"


def base_levels(card: Json) -> Mapping[str, str]:
    """The baseline's level of every axis."""
    return next(arm["levels"] for arm in card["arms"] if arm["is_baseline"])


def _p(value: float | None) -> str:
    text = p_value(value)
    return f"p {text}" if text.startswith("<") else f"p = {text}"


def _statement(row: Json) -> str:
    head = f"{row['arm']}, {row['growth']}: "
    if row["value"] is None:
        return head + "not compared, for want of a seed and prompts that both have."
    found, p = interval(row, sign=True), _p(row["p_holm"])
    if row["p_holm"] is None:
        return head + f"difference {found}; one seed and one prompt say nothing of chance."
    told = {
        "higher": f"higher than the baseline, by {found} tokens per target pass",
        "lower": f"lower than the baseline, by {found} tokens per target pass",
        "not told apart": f"not told apart from the baseline: {found} tokens per target pass",
    }[row["verdict"]]
    tail = "" if row["verdict"] != "not told apart" or row["detectable"] is None else (
        f"; this study would have found a difference of {number(row['detectable'])} four times in five"
    )  # fmt: skip
    return head + f"{told} ({p} after Holm's correction{tail})."


def cautions(card: Json) -> list[str]:
    """What stands in the way of reading more into the numbers."""
    return [*_unfinished(card), *_size(card), *_unlike(card), *_speed(card)]


def _unfinished(card: Json) -> list[str]:
    """Of each run, failures one by one and what waits together."""
    out = []
    for arm in card["arms"]:
        for run in arm["runs"]:
            head, states = f"{arm['name']}, seed {run['seed']}: ", run["states"]
            for kind, state in states.items():
                if state["name"] == "failed":
                    out.append(f"{head}{kind} failed{': ' + state['message'] if state['message'] else ''}.")
            for name in dict.fromkeys(state["name"] for state in states.values()):
                kinds = ", ".join(kind for kind, state in states.items() if state["name"] == name)
                if name not in ("done", "failed"):
                    out.append(f"{head}{kinds} {name}.")
    out += [f"{name} is not compared: {why}." for name, why in card["not_compared"].items()]
    silent = set(card["growths"]) - {row["growth"] for row in card["effects"]}
    if card["study"]["design"] == "fractional" and silent:
        growths = ", ".join(sorted(silent))
        out.append(f"{growths}: arms of the fraction are missing, without which no effect can be told.")
    return out


def _size(card: Json) -> list[str]:
    out = []
    rows = [*card["comparisons"], *card["effects"]]
    rows += [row for key in ("comparisons", "effects") for row in card["outcomes"].get(key, ())]
    seeds = {row["seeds"] for row in rows if row["value"] is not None}
    if 1 in seeds:
        out.append(
            "Comparisons of one seed have intervals over prompts alone: they say nothing of another training with "
            "another seed."
        )
    if seeds and 1 < min(seeds) < FEW_SEEDS:
        out.append(f"Some comparisons have {min(seeds)} seeds: a t-interval of one degree of freedom is very wide.")
    counts = [own["prompts"] for own in card["growths"].values()]
    counts += [row["prompts"] for row in rows if row["value"] is not None]
    fewest = min(counts, default=FEW_PROMPTS)
    if fewest < FEW_PROMPTS:
        out.append(f"{fewest} prompts are few: acceptance differs from prompt to prompt with a long tail.")
    if card["growths"]:
        out.append(
            "Intervals are of one target, one prompt set and one training recipe each; they say nothing of others."
        )
    if len(card["comparisons"]) > 1:
        out.append("Brackets are not corrected for the number of comparisons; verdicts and Holm's p-values are.")
    return out


def _unlike(card: Json) -> list[str]:
    base, out = card["study"]["baseline"], [f"Unequal by permission: {line}." for line in card["study"]["unequal"]]
    sizes = {name: _first(fits, "trained_parameters") for name, fits in card["training"].items()}
    for name, size in sizes.items():
        own = sizes.get(base)
        if size and own and abs(size - own) > _UNEQUAL * own:
            more = 100 * (size / own - 1)
            share = f"{abs(more):.0f} % {'more' if more > 0 else 'fewer'}"
            out.append(f"{name} trains {size:,} parameters, {share} than the baseline: size may be what is seen.")
    tokens = {name: _first(fits, "tokens") for name, fits in card["training"].items()}
    out += [
        f"{name} was trained on {count:,} tokens, the baseline on {tokens[base]:,}."
        for name, count in tokens.items()
        if count and tokens.get(base) and count != tokens[base]
    ]
    out += [f"{name} was evaluated with other settings than the baseline: {'; '.join(odd)}."
            for name, odd in card["settings_differ"].items()]  # fmt: skip
    return out


def _first(fits: Json, key: str) -> Any:
    return next((fit[key] for fit in fits.values() if fit[key] is not None), None)


def _speed(card: Json) -> list[str]:
    if any(one["speedup"] for own in card["growths"].values() for one in own["arms"].values()):
        return ["Speed was measured while the study ran; other jobs may have shared the machine. Tokens/s of two arms "
                "were not measured at the same time; a speed-up has both of its sides from one process."]  # fmt: skip
    return []
