"""What was found, as a table, as JSON, and the overfitted sample's curve."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.markup import escape
from rich.table import Table

from specdec.doctor.finding import Finding, Verdict

MARKS = {Verdict.SOUND: "sound", Verdict.FAULTY: "[bold]FAULTY[/bold]", Verdict.UNCHECKED: "unchecked"}


def table(findings: Sequence[Finding]) -> Table:
    """A line for each thing that was checked."""
    out = Table("check", "what", "figure", "wanted", "verdict")
    for one in findings:
        figure = "" if one.figure is None else f"{one.figure:.4g}"
        remark = f"; {one.said}" if one.said and one.verdict is Verdict.SOUND else ""
        out.add_row(one.check, escape(one.what + remark), figure, one.wanted, MARKS[one.verdict])
    return out


def told(findings: Sequence[Finding]) -> list[str]:
    """A sentence for each fault and for each thing that could not be checked, and the end of it."""
    lines = [f"{one.check}: FAULTY: {one.what}: {one.said}" for one in findings if one.verdict is Verdict.FAULTY]
    lines += [
        f"{one.check}: not checked: {one.what}: {one.said}" for one in findings if one.verdict is Verdict.UNCHECKED
    ]
    count = {verdict: sum(one.verdict is verdict for one in findings) for verdict in Verdict}
    end = f"{count[Verdict.FAULTY]} faults" if count[Verdict.FAULTY] else "no fault was found"
    lines.append(f"{end}: {count[Verdict.SOUND]} sound, {count[Verdict.UNCHECKED]} could not be checked")
    return lines


def as_json(findings: Sequence[Finding], **about: Any) -> dict[str, Any]:
    """Everything, for ``doctor.json``; a figure that is no finite number is null."""
    rows = [one._asdict() | {"figure": _plain(one.figure), "bound": _plain(one.bound)} for one in findings]
    return {**about, "sound": sound(findings), "findings": rows}


def sound(findings: Sequence[Finding]) -> bool:
    """Whether no fault was found."""
    return not any(one.verdict is Verdict.FAULTY for one in findings)


def _plain(value: float | None) -> float | None:
    return None if value is None or value != value or abs(value) == float("inf") else value


def curve(looks: Sequence[dict[str, Any]], path: Path) -> None:
    """Loss and right drafts of the overfitted sample, over the steps of one optimizer and the other."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    begun = 0
    for name, style in zip(dict.fromkeys(look["optimizer"] for look in looks), ("o-", "s--"), strict=False):
        mine = [look for look in looks if look["optimizer"] == name]
        steps = [begun + look["step"] for look in mine]
        begun = steps[-1]
        for axes, key in ((above, "loss"), (below, "right")):
            axes.plot(steps, [look[key] for look in mine], style, color="black", markersize=4, label=name)
    above.set(ylabel="loss", title="one sample, trained on alone")
    above.legend(frameon=False)
    below.set(xlabel="training steps", ylabel="drafts right in training", ylim=(0, 1.05))
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
