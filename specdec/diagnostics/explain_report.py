"""The waterfall of acceptance: levels, the bars between them, and how they are told in words and as a picture.

Legend: P prompts.
"""

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from specdec.diagnostics.report import Measured, ReportTable, measured, save_figure, shown, whiskers
from specdec.evaluation.statistics import Array, ratio
from specdec.evaluation.style import GREY

PERFECT, VOCABULARY, TRUE_FEATURES, OWN_FEATURES = "perfect", "vocabulary", "true_features", "own_features"
OWN_TOKENS, OBSERVED, EXPORTED = "own_tokens", "observed", "exported"
DOWN = (PERFECT, VOCABULARY, TRUE_FEATURES, OWN_FEATURES, OWN_TOKENS)
INVISIBLE = 0.01  # tokens per target pass, which no figure shows

SAYS = {  # title, and what a loss there means
    PERFECT: ("perfect drafts", "every draft is right"),
    VOCABULARY: ("draft vocabulary", "what it lacks cannot be drafted; a larger one wins this back"),
    TRUE_FEATURES: ("true features", "wrong though the drafter reads the target's states; more training or data"),
    OWN_FEATURES: ("own features", "drift: it reads its own states; more ttt_steps, or PostNorm"),
    OWN_TOKENS: ("own tokens", "exposure: own drafts decide where the next pass begins"),
    OBSERVED: ("observed by decoding", "what specdec evaluate measures for this chain"),
    EXPORTED: ("exported checkpoint", "as an engine is documented to read it, beside observed; see specdec parity"),
}

Levels = dict[str, list[list[int]]]
"""By name: the drafts that are accepted in every pass of every prompt."""


def waterfall(levels: Levels, depth: int) -> dict[str, Any]:
    """Levels, the bars between them, and whether they add up to what decoding accepts; JSON-ready.

    Args:
        levels: those of :data:`DOWN`, then ``observed``, then what lies beyond decoding, each beside ``observed``.

    Raises:
        ValueError: a level has no target pass.
    """
    own, decoded = levels[OWN_TOKENS], levels[OBSERVED]
    difference = _less(own, decoded)
    mean, low, high = (difference[key] for key in ("mean", "low", "high"))
    assert mean is not None
    holds = mean == 0 if low is None or high is None else abs(mean) < INVISIBLE or low <= 0 <= high
    alike = [pair for pair in zip(own, decoded, strict=True) if len(pair[0]) == len(pair[1])]

    def bar(upper: str, lower: str) -> dict[str, Any]:
        return {"from": upper, "to": lower, "loss": _less(levels[upper], levels[lower])}

    return {
        "levels": [_level(name, accepted, depth) for name, accepted in levels.items()],
        "bars": [bar(*pair) for pair in itertools.pairwise(DOWN)],
        "beyond": [bar(OBSERVED, name) for name in list(levels)[len(DOWN) + 1 :]],
        "check": {
            "holds": holds,
            "difference": difference,
            "passes": sum(map(len, decoded)),
            "same_passes": sum(a == b for one, two in alike for a, b in zip(one, two, strict=True)),
        },
    }


def _level(name: str, accepted: list[list[int]], depth: int) -> dict[str, Any]:
    every, length = np.array([count for own in accepted for count in own]), measured(_sums(accepted))
    if length["mean"] is None:
        raise ValueError(f"{name}: no target pass to measure: give prompts with longer answers")
    return {
        "name": name,
        "acceptance_length": length,
        "joint": [float((every >= k).mean()) for k in range(1, depth + 1)],
        "committed": [sum(own) + len(own) for own in accepted],
        "passes": [len(own) for own in accepted],
    }


def _sums(accepted: Sequence[Sequence[int]]) -> Array:
    """Tokens committed, and passes, of every prompt, (P, 2)."""
    return np.array([(sum(own) + len(own), len(own)) for own in accepted], dtype=np.float64)


def _less(upper: list[list[int]], lower: list[list[int]]) -> Measured:
    """One level's acceptance length less another's; prompts with a pass on both are drawn for both alike."""
    sums_P4 = np.concatenate([_sums(upper), _sums(lower)], axis=1)
    both_P4 = sums_P4[(sums_P4[:, 1::2] > 0).all(1)]
    found = measured(both_P4, lambda sums: ratio(sums[..., :2]) - ratio(sums[..., 2:]))
    if found["mean"] is None:
        raise ValueError("no target pass to measure on two levels: give prompts with longer answers")
    return found


def report_tables(told: dict[str, Any]) -> list[ReportTable]:
    """Levels with what was lost to each, the share of passes that accept at least k drafts, and prompts left out."""
    losses = {bar["to"]: bar["loss"] for bar in (*told["bars"], *told["beyond"])}
    levels, joint = [], []
    for one in told["levels"]:
        title, meaning = SAYS[one["name"]]
        levels.append([title, _figure(one["acceptance_length"]), _figure(losses.get(one["name"])), meaning])
        joint.append([title, *(f"{share:.3f}" for share in one["joint"])])
    skipped = [[one["prompt_id"], one["reason"]] for one in told["skipped"]]
    depths = [str(k) for k in range(1, told["depth"] + 1)]
    return [
        ReportTable(f"Chains of {told['depth']}", ["Level", "Acceptance length", "Loss", "What it means"], levels),
        ReportTable("Share of passes that accept at least k drafts", ["Level", *depths], joint),
        ReportTable("Prompts left out", ["Prompt", "Reason"], skipped, left=2),
    ]


def _figure(value: Measured | None) -> str:
    return shown(value, lambda each: f"{each:z.2f}")


def verdict(told: dict[str, Any]) -> str:
    """Whether the bars add up to what decoding accepts, with the sum."""
    check, levels = told["check"], {level["name"]: level["acceptance_length"]["mean"] for level in told["levels"]}
    parts = [levels[PERFECT], *(-bar["loss"]["mean"] for bar in told["bars"])]
    total = " + ".join(f"{part:z.3f}" for part in parts).replace("+ -", "- ") + f" = {levels[OWN_TOKENS]:.3f}"
    decoded = f"decoding accepts {levels[OBSERVED]:.3f}, {check['same_passes']} of {check['passes']} passes alike"
    if check["holds"]:
        return f"The bars add up: {total}; {decoded}."
    return f"THE BARS DO NOT ADD UP: {total}, but {decoded}: specdec parity says where the two part."


def plot_waterfall(told: dict[str, Any], path: Path) -> None:
    """Draw a bar for each step, hanging from the level above."""
    lengths = {level["name"]: level["acceptance_length"] for level in told["levels"]}
    steps = [
        (SAYS[bar["to"]][0], lengths[bar["from"]]["mean"], bar["loss"]) for bar in (*told["bars"], *told["beyond"])
    ]
    total = [(SAYS[name][0], 0.0, lengths[name]) for name in (PERFECT, OBSERVED)]
    rows = [total[0], *steps[: len(told["bars"])], total[1], *steps[len(told["bars"]) :]]  # name, where it hangs, what
    figure = Figure(figsize=(10, 1.7 + 0.5 * len(rows)), dpi=120, layout="constrained")
    axes = figure.subplots()
    for y, (_, upper, found) in enumerate(rows):
        end = upper - found["mean"] if upper else found["mean"]  # a loss leads down from the level above
        below, above = whiskers(found)[:: -1 if upper else 1]
        colour, hatch = (GREY, "") if not upper else ("#D55E00", "//") if found["mean"] >= 0 else ("#56B4E9", "..")
        axes.barh(y, end - upper, left=upper, height=0.6, color=colour, hatch=hatch, edgecolor="black")
        axes.errorbar([end], [y], xerr=[[below], [above]], color="black", capsize=4)
        place = (max(end + above, upper), y)
        axes.annotate(_figure(found), place, (8, 0), textcoords="offset points", va="center")
    longest = max(1.2, *(length["mean"] for length in lengths.values()))
    axes.set(
        xlim=(1, longest + 0.44 * (longest - 1)), ylim=(len(rows) - 0.4, -0.6), xticks=range(1, int(longest) + 1),
        xlabel="tokens per target pass, bonus token included (lines: 95 % interval)",
        title=f"Where acceptance is lost: chains of {told['depth']}",
    )  # fmt: skip
    axes.set_yticks(range(len(rows)), ["\n".join(textwrap.wrap(name, 24)) for name, _, _ in rows])
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)
