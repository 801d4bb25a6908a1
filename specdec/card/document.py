"""A card's numbers as headings, tables and sentences."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from specdec.card.blocks import Block, Bullets, Grid, Heading, Picture, Text
from specdec.card.figures.draw import Drawn
from specdec.card.origin import origin
from specdec.card.words import (
    base_levels,
    cautions,
    effect,
    interval,
    number,
    outcome_statements,
    p_value,
    statements,
)

Json = dict[str, Any]


def document(card: Json, figures: Sequence[Drawn], where: str) -> list[Block]:
    """The whole card.

    Args:
        figures: drawn ones.
        where: the path of ``card.json`` in commands.
    """
    study = card["study"]
    pictures = {about: [Picture(f"figures/{one.file}", one.caption) for one in figures if one.about == about]
                for about in {one.about for one in figures}}  # fmt: skip
    out: list[Block] = [Heading(1, f"Study {study['name']}"), Text(_lead(card))]
    out += [
        Heading(2, "What this supports, and what not"),
        Bullets([*statements(card), *outcome_statements(card)] or ["No comparison could be made."]),
    ]
    if points := cautions(card):
        out += [Text("To be kept in mind:"), Bullets(points)]
    out += _arms(card)
    for about, section in (("lengths", _lengths), ("comparisons", _comparisons), ("effects", _effects),
                           ("positions", _positions), ("outcomes", _outcomes), ("drift", _drift),
                           ("robustness", _robustness), ("speed", _speed), ("training", _training)):  # fmt: skip
        if found := list(section(card)):
            out += [found[0], *pictures.get(about, []), *found[1:]]
    return [*out, *origin(card, where)]


def _lead(card: Json) -> str:
    study = card["study"]
    axes = "; ".join(f"{axis}: {', '.join(levels)}" for axis, levels in study["axes"].items())
    prompts = sorted({own["prompts"] for own in card["growths"].values()})
    return (
        f"Axes: {axes}. Design: {study['design'].replace('_', ' ')}. {len(card['arms'])} arms, seeds "
        f"{', '.join(map(str, study['seeds']))}, {' or '.join(map(str, prompts)) or 'no'} held-out prompts. "
        f"Baseline: {study['baseline']}."
    )


def _arms(card: Json) -> Iterator[Block]:
    yield Heading(2, "Arms")
    rows = []
    for arm in card["arms"]:
        what = "the baseline" if arm["is_baseline"] else "; ".join(map(_difference, arm["differences"]))
        states = [state for run in arm["runs"] for state in run["states"].values()]
        done = sum(all(state["name"] == "done" for state in run["states"].values()) for run in arm["runs"])
        odd = sorted({state["name"] for state in states if state["name"] != "done"})
        rows.append([arm["name"], what or "nothing that specdec diff knows of",
                     f"{done} of {len(arm['runs'])} done" + (f" ({', '.join(odd)})" if odd else "")])  # fmt: skip
    yield Grid(["Arm", "Differs from the baseline in", "Runs"], rows, left=3)
    if generators := card["study"]["generators"]:
        yield Text(f"Generators of the fraction: {', '.join(map(str, generators))}.")


def _difference(line: str) -> str:
    """A line of ``specdec diff``: what, the baseline's and the arm's, in columns."""
    columns = re.split(r"\s{2,}", line.strip())
    return f"{columns[0]}: {columns[1]} to {columns[2]}" if len(columns) == 3 else " ".join(columns)


def _lengths(card: Json) -> Iterator[Block]:
    if not card["growths"]:
        return
    yield Heading(2, "Acceptance length")
    rows = []
    for growth, own in card["growths"].items():
        for name, one in own["arms"].items():
            seeds = ", ".join(number(value) for value in one["by_seed"].values())
            rows.append([growth, name, interval(one["acceptance_length"]), seeds, str(len(one["seeds"])),
                         str(own["prompts"]), f"{one['passes']:,}"])  # fmt: skip
    yield Grid(["Growth", "Arm", "Acceptance length", "By seed", "Seeds", "Prompts", "Passes"], rows, left=2)
    yield Text("Tokens committed per target pass, the target's own (bonus) token included, pooled over passes.")


def _comparisons(card: Json) -> Iterator[Block]:
    if not card["comparisons"]:
        return
    yield Heading(2, "Differences from the baseline")
    rows = [[row["growth"], row["arm"], interval(row, sign=True), interval(row["ratio"]), p_value(row["p_value"]),
             p_value(row["p_holm"]), p_value(row["p_bh"]), row["verdict"]] for row in card["comparisons"]]  # fmt: skip
    yield Grid(["Growth", "Arm", "Difference", "Ratio", "p", "p (Holm)", "p (BH)", "Verdict"], rows, left=2)
    detect = card["statistics"]["detect"]
    plans = [(row, row["prompts_needed"]) for row in card["comparisons"] if row.get("prompts_needed")]
    if plans:
        counts = list(dict.fromkeys(count for _, plan in plans for count in plan))
        yield Text(
            "Detectable is the difference that four of five such studies would find (p < 0.05, uncorrected). The last "
            f"columns: prompts with which a true difference of {detect:g} would be found as often, by number of seeds; "
            "a dash where no number of prompts makes up for how much trainings vary."
        )
        yield Grid(
            ["Growth", "Arm", "Detectable", *(f"{count} seeds" for count in counts)],
            [[row["growth"], row["arm"], number(row["detectable"]),
              *(f"{plan[count]:,}" if plan.get(count) else "-" for count in counts)] for row, plan in plans],
            left=2,
        )  # fmt: skip


def _effects(card: Json) -> Iterator[Block]:
    if not card["effects"]:
        return
    yield Heading(2, "Effects and interactions")
    rows, levels = [], base_levels(card)
    for row in card["effects"]:
        kind = "main effect" if row["kind"] == "main" else "interaction"
        p_values = [p_value(row[name]) for name in ("p_value", "p_holm", "p_bh")]
        aliases = ", ".join(row["aliases"]) or "-"
        rows.append([row["growth"], effect(row, levels), kind, aliases, interval(row, sign=True), *p_values,
                     row["verdict"], *_counts(row)])  # fmt: skip
    heads = ["Growth", "Effect", "Kind", "Not told apart from", "Tokens per pass", "p", "p (Holm)", "p (BH)", "Verdict",
             "Seeds", "Prompts"]  # fmt: skip
    yield Grid(heads, rows, left=4)
    yield Text(
        "A main effect is a level less the baseline's of its axis, averaged over the other axes; an interaction is the "
        "difference of two such differences: what two levels together do beyond the sum of what each does. In a "
        "fraction of a grid an effect stands for the sum of itself and those that it is not told apart from."
    )


def _positions(card: Json) -> Iterator[Block]:
    if not card["growths"]:
        return
    yield Heading(2, "Acceptance by position")
    for growth, own in card["growths"].items():
        places = range(1, own["depth"] + 1)
        rows = [[name, *(interval(one["conditional"][k - 1]) if k <= len(one["conditional"]) else "" for k in places)]
                for name, one in own["arms"].items()]  # fmt: skip
        yield Text(f"{growth}: share of passes that accepted position k, of those that accepted all before it.")
        yield Grid(["Arm", *(str(k) for k in places)], rows)
    rows = [[growth, name, str(beyond["trained_depth"]), interval(beyond["within"]), interval(beyond["after"]),
             interval(beyond["difference"], sign=True)]
            for growth, own in card["growths"].items()
            for name, one in own["arms"].items() if (beyond := one["beyond"])]  # fmt: skip
    if rows:
        yield Heading(3, "Beyond the trained depth")
        yield Text(
            "Conditional acceptance pooled over the positions that training unrolled, and over those after them."
        )
        yield Grid(["Growth", "Arm", "Trained depth", "Within", "Beyond", "Beyond less within"], rows, left=2)


def _outcomes(card: Json) -> Iterator[Block]:
    found = card["outcomes"]
    if not found:
        return
    yield Heading(2, "Drift and robustness, arm beside arm")
    less = {(row["outcome"], row["arm"]): row for row in found["comparisons"]}
    rows = []
    for name, own in found["titles"].items():
        for arm, one in found["arms"][name].items():
            row = less.get((name, arm), {})
            tests = [p_value(row[key]) for key in ("p_value", "p_holm")] if row else ["", ""]
            rows.append([own["title"], arm, interval(one, 3), interval(row, 3, True) if row else "", *tests,
                         row.get("verdict", ""), *_counts(row or one)])  # fmt: skip
    heads = ["Outcome", "Arm", "Value", "Less the baseline's", "p", "p (Holm)", "Verdict", "Seeds", "Prompts"]
    yield Grid(heads, rows, left=2)
    if not found["effects"]:
        return
    yield Heading(3, "Effects on them")
    levels = base_levels(card)
    rows = [[found["titles"][row["outcome"]]["title"], effect(row, levels), row["kind"],
             ", ".join(row["aliases"]) or "-", interval(row, 3, True), p_value(row["p_value"]), p_value(row["p_holm"]),
             row["verdict"], *_counts(row)] for row in found["effects"]]  # fmt: skip
    heads = ["Outcome", "Effect", "Kind", "Not told apart from", "Difference", "p", "p (Holm)", "Verdict", "Seeds",
             "Prompts"]  # fmt: skip
    yield Grid(heads, rows, left=4)


def _counts(row: Json) -> list[str]:
    """What a figure is of."""
    return [str(row["seeds"]), str(row["prompts"])]


def _drift(card: Json) -> Iterator[Block]:
    if not card["drift"]:
        return
    yield Heading(2, "Drift by draft step")
    for series in card["drift"].values():
        deepest = max(len(found) for found in series["arms"].values())
        yield Text(f"{series['title']} ({series['unit']})")
        rows = [[name, *(interval(each, 3) for each in found)] for name, found in series["arms"].items()]
        full = [[*row, *[""] * (deepest + 1 - len(row))] for row in rows]
        yield Grid(["Arm", *(str(k) for k in range(1, deepest + 1))], full)


def _robustness(card: Json) -> Iterator[Block]:
    if not card["robustness"]:
        return
    yield Heading(2, "Robustness")
    yield Text("Acceptance length under a condition, and what it is of the clean prompts', prompt by prompt.")
    rows = []
    for name, one in card["robustness"]["conditions"].items():
        for arm, found in card["robustness"]["arms"].items():
            got = found.get(name)
            if got is None or got.get("skipped"):
                rows.append([one["title"], arm, "-", "not measured" + (f": {got['skipped']}" if got else "")])
            else:
                kept = "-" if one["clean"] else interval(got["kept"])
                rows.append([one["title"], arm, interval(got["acceptance_length"]), kept])
    yield Grid(["Condition", "Arm", "Acceptance length", "Of the clean one's"], rows, left=2)


def _speed(card: Json) -> Iterator[Block]:
    if not card["growths"]:
        return
    yield Heading(2, "Speed")
    rows = [[growth, name, interval(one["tokens_per_second"], 1), interval(one["speedup"])]
            for growth, own in card["growths"].items() for name, one in own["arms"].items()]  # fmt: skip
    yield Grid(["Growth", "Arm", "Tokens/s", "Speed-up over plain decoding"], rows, left=2)


def _training(card: Json) -> Iterator[Block]:
    if not any(card["training"].values()):
        return
    yield Heading(2, "Training")
    rows = []
    for name, fits in card["training"].items():
        for seed, fit in fits.items():
            memory = fit["peak_memory_bytes"]
            rows.append([name, seed, f"{fit['steps']:,}", _whole(fit["tokens"]), number(fit["seconds"], 0),
                         number(fit["step_seconds"], 3), "-" if memory is None else f"{memory / 1e9:.2f}",
                         _whole(fit["trained_parameters"]), _whole(fit["parameters"])])  # fmt: skip
    yield Grid(["Arm", "Seed", "Steps", "Tokens", "Seconds", "Seconds a step", "Peak memory (GB)", "Trained parameters",
                "Parameters"], rows)  # fmt: skip


def _whole(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
