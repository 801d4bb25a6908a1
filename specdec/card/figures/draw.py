"""Which figures a card has."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from specdec.card.figures.columns import columns, drift_columns
from specdec.card.figures.page import Panel, Row, dots
from specdec.card.figures.positions import positions
from specdec.card.figures.series import drift, kept, losses

Json = dict[str, Any]


class Drawn(NamedTuple):
    """A figure that lies in the folder."""

    file: str
    about: str
    """Which section it belongs to."""
    caption: str


def draw(card: Json, folder: Path) -> list[Drawn]:
    """Draw all that the card has numbers for."""
    names = [arm["name"] for arm in card["arms"]]
    depths = {arm["name"]: arm["trained_depth"] for arm in card["arms"]}
    base, growths = card["study"]["baseline"], card["growths"]
    out: list[Drawn] = []

    def add(file: str, about: str, caption: str, make: Callable[[Path], None]) -> None:
        make(folder / file)
        out.append(Drawn(file, about, caption))

    if growths:
        axis = "acceptance length\n(tokens per target pass)"
        lengths = [Panel(growth, [_length(own, name) for name in names], axis) for growth, own in growths.items()]
        add("acceptance_length.png", "lengths", "Acceptance length with 95 % intervals over seeds and prompts; the "
            "small strokes are the seeds' own.",
            lambda path: dots(lengths, path))  # fmt: skip
    if compared := [row for row in card["comparisons"] if row["value"] is not None]:
        others = [name for name in names if name != base]
        axis = "difference from the baseline\n(tokens per target pass)"
        rows = [Panel(growth, [_difference(compared, growth, name, names.index(name)) for name in others], axis, at=0.0)
                for growth in growths if any(row["growth"] == growth for row in compared)]  # fmt: skip
        add("differences.png", "comparisons", "Acceptance length less the baseline's, of the same seeds and prompts, "
            "with 95 % intervals. Filled: told apart from no difference after Holm's correction.",
            lambda path: dots(rows, path))  # fmt: skip
    for number, (growth, own) in enumerate(growths.items(), start=1):
        if own["depth"]:
            add(f"positions_{number}.png", "positions", f"{growth}: acceptance at each draft position among the passes "
                "that accepted all before it.",
                lambda path, own=own: positions(own, depths, base, path))  # type: ignore[misc]  # fmt: skip
    if any(one["speedup"] for own in growths.values() for one in own["arms"].values()):
        axis = "speed-up over plain decoding (times)"
        speeds = [Panel(growth, [_speedup(own, name) for name in names], axis, 1.0) for growth, own in growths.items()]
        add("speedup.png", "speed", "Speed beside plain decoding in the same process, with 95 % intervals over "
            "seeds and prompts.",
            lambda path: dots(speeds, path))  # fmt: skip
    if card["outcomes"]:
        panels = _outcomes(card["outcomes"], names)
        add("outcomes.png", "outcomes", "Drift and robustness of each arm, with 95 % intervals over seeds and prompts; "
            "dashed: no drift, or nothing lost.", lambda path: dots(panels, path))  # fmt: skip
    by_axis = columns(card) if card["drift"] else {}
    if by_axis:
        add("drift.png", "drift", "By draft step, mean over chains of all prompts and seeds, with 95 % intervals: what "
            "tells of drift; the tables have the rest.",
            lambda path: drift_columns(card["drift"], depths, by_axis, path))  # fmt: skip
    elif card["drift"]:
        add("drift.png", "drift", "By draft step, mean over chains of all prompts and seeds.",
            lambda path: drift(card["drift"], depths, names, path))  # fmt: skip
    if card["robustness"]:
        add("robustness.png", "robustness", "Acceptance length under each condition over that on clean prompts.",
            lambda path: kept(card["robustness"], names, path))  # fmt: skip
    if any(points for runs in card["loss_curves"].values() for points in runs.values()):
        add("losses.png", "training", "Training loss. Arms with another loss or depth are not comparable by it.",
            lambda path: losses(card["loss_curves"], base, path))  # fmt: skip
    return out


def _length(own: Json, name: str) -> Row:
    one = own["arms"].get(name)
    found = one and one["acceptance_length"]
    if not found:
        return Row(name, None, None, None)
    single = tuple(value for value in one["by_seed"].values() if value is not None)
    return Row(name, found["value"], found["low"], found["high"], single=single if len(single) > 1 else ())


def _outcomes(found: Json, names: list[str]) -> list[Panel]:
    """One panel for those that differ in their steps alone: here every arm stands for itself."""
    together: dict[str, list[str]] = {}
    for key, one in found["titles"].items():
        together.setdefault(one["panel"], []).append(key)
    out = []
    for panel, keys in together.items():
        arms = {arm: row for key in keys for arm, row in found["arms"][key].items()}
        own = found["titles"][keys[0]]
        out.append(Panel(panel, [_row(name, arms.get(name)) for name in names], own["unit"], own["null"]))
    return out


def _difference(compared: list[Json], growth: str, name: str, look: int) -> Row:
    row = next((row for row in compared if row["growth"] == growth and row["arm"] == name), None)
    if row is None:
        return Row(name, None, None, None, note="not compared")
    return Row(name, row["value"], row["low"], row["high"], filled=row["verdict"] in ("higher", "lower"), look=look)


def _speedup(own: Json, name: str) -> Row:
    return _row(name, own["arms"].get(name, {}).get("speedup"))


def _row(name: str, found: Json | None) -> Row:
    return Row(name, found["value"], found["low"], found["high"]) if found else Row(name, None, None, None)
