"""A card's data: every interval of the card, and every point of its curves, follows from them."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from examples.interval import main as recomputed
from specdec.report.statistics import possible
from specdec.studies.card import write_card
from tests.studies.made import make_study

WORTH = {"norm=on": 0.08, "K=4": 0.03}


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_card(make_study(tmp_path_factory.mktemp("study"), worth=WORTH, prompts=10))


def numbers(card: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((card / "card.json").read_text())
    return read


def single_ratios(card: Path) -> list[dict[str, Any]]:
    quantities = numbers(card)["quantities"]
    rows = pq.read_table(card / "data.parquet").to_pylist()
    of_two = {row["quantity"] for row in rows if row["sum_2"] is not None}
    return [quantity for quantity in quantities if quantity["name"] not in of_two]


def test_every_interval_of_an_arm_is_recomputed_from_the_data(card: Path) -> None:
    checked = 0
    for quantity in single_ratios(card):
        for arm, figure in quantity["arms"].items():
            value, low, high = recomputed(str(card), quantity["name"], arm)
            assert value == pytest.approx(figure["value"], rel=1e-12)
            least, most = possible(quantity["unit"])
            assert figure["low"] == pytest.approx(max(low, least), rel=1e-6)
            assert figure["high"] == pytest.approx(min(high, most), rel=1e-6)
            checked += 1
    assert checked >= 8


def test_every_interval_of_two_arms_is_recomputed_from_the_data(card: Path) -> None:
    names = {quantity["name"] for quantity in single_ratios(card)}
    rows = [row for row in numbers(card)["comparisons"] if row["quantity"] in names]
    assert rows
    for row in rows:
        three = recomputed(str(card), row["quantity"], row["arm"], row["baseline"])
        assert three == pytest.approx([row[name] for name in ("value", "low", "high")], rel=1e-6)


def test_what_the_script_does_not_recompute_it_refuses(card: Path) -> None:
    arm = numbers(card)["study"]["baseline"]
    two_ratios = next(
        quantity["name"]
        for quantity in numbers(card)["quantities"]
        if "over step 1" in quantity["name"]
    )
    curve = numbers(card)["curves"][0]["title"]
    for quantity in (two_ratios, curve):
        with pytest.raises(ValueError, match="a curve, or made of two ratios"):
            recomputed(str(card), quantity, arm)
    with pytest.raises(ValueError, match="the card has"):
        recomputed(str(card), "acceptance", arm)


def test_every_point_of_a_curve_follows_from_the_data(card: Path) -> None:
    rows = pq.read_table(card / "data.parquet").to_pylist()
    curves = numbers(card)["curves"]
    assert curves
    for curve in curves:
        for arm, points in curve["arms"].items():
            for step, point in enumerate(points, 1):
                key = (curve["title"], step, arm)
                mine = [row for row in rows if (row["quantity"], row["step"], row["arm"]) == key]
                weight = sum(row["weight"] for row in mine)
                if point is None:
                    assert not weight
                    continue
                total = sum(row["sum"] for row in mine)
                assert point["value"] == pytest.approx(total / weight, rel=1e-9)


def test_a_quantity_of_two_ratios_has_both(card: Path) -> None:
    rows = pq.read_table(card / "data.parquet").to_pylist()
    growth = [row for row in rows if row["quantity"].endswith("step 6 over step 1")]
    assert growth and all(row["sum_2"] is not None for row in growth)
    arm = growth[0]["arm"]
    of_arm = [row for row in growth if row["arm"] == arm]
    sums = {
        name: sum(row[name] for row in of_arm) for name in ("sum", "weight", "sum_2", "weight_2")
    }
    value = sums["sum"] / sums["weight"] / (sums["sum_2"] / sums["weight_2"])
    (quantity,) = [q for q in numbers(card)["quantities"] if q["name"] == of_arm[0]["quantity"]]
    assert value == pytest.approx(quantity["arms"][arm]["value"])
