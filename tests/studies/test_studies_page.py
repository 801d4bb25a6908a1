"""The tables of docs/studies/README.md say what the cards say: declared outcomes, and curves by draft step."""

import itertools
import json
import math
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from scipy.stats import t as student

from examples.interval import main as recomputed

STUDIES = Path(__file__).parents[2] / "docs" / "studies"
PAGE = (STUDIES / "README.md").read_text()
CARDS: dict[str, dict[str, Any]] = {
    name: json.loads((STUDIES / name / "card.json").read_text())
    for name in ("drift_real", "robust_real", "neighbours")
}
ARMS = [f"fc_norm={fc} norm_output={out} K=4" for out in ("off", "on") for fc in ("off", "on")]


def cells(page: str, head: str) -> list[list[str]]:
    """The rows of the page's table that begins with this head."""
    lines = page.partition(f"\n{head}")[2].splitlines()[2:]
    end = next(i for i, line in enumerate(lines) if not line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:end]]


def holm(p_values: list[float]) -> list[float]:
    """Holm's step-down correction."""
    corrected, least = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, (len(p_values) - rank) * p_values[i])
        corrected[i] = min(1.0, least)
    return corrected


def shown(p_value: float) -> str:
    if p_value < 0.001:
        return "< 0.001"
    return f"{p_value:.3f}" if p_value < 0.1 else f"{p_value:.2g}"


def two_sided(distance: float, error: float) -> float:
    return float(2 * student.sf(abs(distance / error), 2))


def by_seed(card: dict[str, Any], row: dict[str, Any]) -> list[float]:
    """The contrast of one seed's arms after another."""
    values = next(one["arms"] for one in card["quantities"] if one["name"] == row["quantity"])

    def side(levels: dict[str, str]) -> list[str]:
        return [
            arm["name"]
            for arm in card["arms"]
            if levels.items() <= arm["levels"].items()
            and all(arm["levels"][axis] in at for axis, at in row["at"].items())
        ]

    more, less = side(row["effect"]), side(row["against"])
    return [
        mean(values[arm]["by_seed"][seed] for arm in more)
        - mean(values[arm]["by_seed"][seed] for arm in less)
        for seed in values[more[0]]["by_seed"]
    ]


def declared(name: str) -> list[list[str]]:
    """Of every primary contrast: its place, difference, expectation and three p-values."""
    card = CARDS[name]
    rows = card["primary"]
    apart = [by_seed(card, row) for row in rows]
    seeds = holm([two_sided(mean(one), stdev(one) / math.sqrt(len(one))) for one in apart])
    prompts = holm([two_sided(row["value"], row["error"]) for row in rows])
    lines = []
    for number, (row, *tests) in enumerate(zip(rows, seeds, prompts, strict=True), start=1):
        digits = 3 if row["outcome"].startswith(("kept", "drift.sink")) else 2
        value, low, high = (f"{row[key]:+.{digits}f}" for key in ("value", "low", "high"))
        p_values = [shown(p_value) for p_value in (row["p_holm"], *tests)]
        lines.append(
            [f"{name} {number}", f"{value} [{low}, {high}]", row["expect"] or "none", *p_values]
        )
    return lines


def curves(title: str) -> list[list[float]]:
    """The means over seeds of a curve of drift_real by draft step, of the four arms of K = 4."""
    arms = next(one["arms"] for one in CARDS["drift_real"]["curves"] if one["title"] == title)
    return [[step["value"] for step in arms[arm]] for arm in ARMS]


def updates() -> list[list[float]]:
    """|y_k - y_(k-1)| / |y_k| at steps 2 to 8, of sizes and cosines."""
    states = curves("RMS of the state fed back")
    cosines = curves("Cosine of the states of steps k and k - 1")
    return [
        [
            math.sqrt(1 + (before / now) ** 2 - 2 * before / now * cosine)
            for before, now, cosine in zip(state, state[1:], arm[1:], strict=False)
        ]
        for state, arm in zip(states, cosines, strict=True)
    ]


def by_step() -> list[list[str]]:
    """The figures of the page's table by draft step, in its order."""
    sizes, changes = curves("RMS of the layer's output, before the norm"), updates()
    steps = [[after - before for before, after in itertools.pairwise(size)] for size in sizes]
    raw, normed = steps[:2], [step[1:] for step in steps[2:]]
    growth = [f"{min(one):.1f} to {max(one):.1f}" for one in (*raw, *normed)]

    def two(lines: list[list[float]], digits: int, first: int) -> list[str]:
        return [f"{line[first]:.{digits}f}, {line[-1]:.{digits}f}" for line in lines]

    return [
        [f"{size[0]:.0f}" for size in sizes],
        [*growth[:2], *(f"from step 3: {one}" for one in growth[2:])],
        [f"{size[7] / size[0]:.2f}" for size in sizes],
        [f"{size[7] / size[1]:.2f}" for size in sizes],
        [f"{change[0]:.2f}" for change in changes],
        two(changes, 2, 1),
        two(curves("Cosine of the states of steps k and k - 1"), 3, 1),
        two(curves("Attention on the sink"), 3, 0),
        two(curves("Attention on the chain's own rows"), 3, 0),
        two(curves("KL(target || drafter) along the text"), 2, 0),
    ]


def on_page(page: str) -> list[list[str]]:
    return [[row[0], *row[3:]] for row in cells(page, "| primary |")]


def test_declared_outcomes_are_those_of_the_cards() -> None:
    assert on_page(PAGE) == [row for name in CARDS for row in declared(name)]


DRIFT = "| primary | outcome | contrast | difference | expected | p | p, Holm |"


CURVES = {  # row of a table by arm: the card's curve, its digits, the first step that is shown
    "RMS of the state fed back, steps 1 and 8": ("RMS of the state fed back", 2, 0),
    "relative update, steps 2 and 8": (
        "Change of the state from step k - 1 to k, over its size", 2, 1,
    ),
    "attention on the sink, steps 1 and 8": ("Attention on the sink", 3, 0),
    "attention on the strongest row, steps 1 and 8": (
        "Attention on the strongest committed row", 3, 0,
    ),
    "attention on own rows, steps 1 and 8": ("Attention on the chain's own rows", 3, 0),
    "KL, steps 1 and 8": ("KL(target || drafter) along the text", 2, 0),
}  # fmt: skip
EAGLES = ("design=EAGLE-3.1", "design=EAGLE-3")
LEVELS = ("raw", "first_size", "unit_size", "leaky", "norm_output")
NORMS = [f"fc_norm={fc} norm_output={out}" for fc in ("off", "on") for out in ("off", "on")]
TABLES = {
    "recurrence": ("| by recurrence |", [f"recurrence={level}" for level in LEVELS]),
    "transplant": ("| with a transplant |", NORMS),
}


def section(study: str) -> str:
    return PAGE.partition(f"\n## {study}\n")[2].partition("\n## ")[0]


def declared_in(study: str) -> list[list[str]]:
    """Of every primary contrast of a study with data: its place, difference, expectation and p-values."""
    lines = []
    card = json.loads((STUDIES / study / "card.json").read_text())
    for number, row in enumerate(card["primary"], 1):
        shares = ("mass", "overconfidence")
        digits = 3 if any(word in row["outcome"] for word in shares) else 2
        value, low, high = (f"{row[key]:+.{digits}f}" for key in ("value", "low", "high"))
        p_values = [shown(row["p_value"]), shown(row["p_holm"])]
        lines.append(
            [f"{study} {number}", f"{value} [{low}, {high}]", row["expect"] or "none", *p_values]
        )
    return lines


@pytest.mark.parametrize(
    "study", ["short_chains", "crossing", "calibration", "drift", "recurrence", "transplant"]
)
def test_declared_outcomes_of_a_study_with_data_are_those_of_its_card(study: str) -> None:
    rows = cells(section(study), DRIFT)
    assert [[row[0], *row[3:]] for row in rows] == declared_in(study)


@pytest.mark.parametrize("study", ["recurrence", "transplant"])
def test_figures_by_arm_are_those_of_the_card(study: str) -> None:
    card = json.loads((STUDIES / study / "card.json").read_text())
    head, arms = TABLES[study]
    quantities = {quantity["name"]: quantity["arms"] for quantity in card["quantities"]}
    curves = {curve["title"]: curve["arms"] for curve in card["curves"]}

    def intervals(name: str) -> list[str]:
        rows = (quantities[name][arm] for arm in arms)
        return [f"{row['value']:.2f} [{row['low']:.2f}, {row['high']:.2f}]" for row in rows]

    def ends(title: str, digits: int, first: int) -> list[str]:
        steps = (curves[title][arm] for arm in arms)
        return [f"{row[first]['value']:.{digits}f}, {row[-1]['value']:.{digits}f}" for row in steps]

    figures = {
        "acceptance length, chain of 3": intervals("acceptance length, chain of 3"),
        "acceptance length, chain of 8": intervals("acceptance length, chain of 8"),
        "accepted at positions 5 to 8, chain of 8": intervals(
            "acceptance at position 5-8, chain of 8"
        ),
    } | {row: ends(*curve) for row, curve in CURVES.items()}
    rows = cells(section(study), head)
    assert len(rows) >= 8
    assert [row[1:] for row in rows] == [figures[row[0]] for row in rows]


@pytest.mark.parametrize("arms", [("on", "on"), ("off", "off")])
def test_an_interval_of_drift_is_recomputed_from_its_data(arms: tuple[str, str]) -> None:
    fc, out = arms
    arm = f"fc_norm={fc} norm_output={out}"
    card = json.loads((STUDIES / "drift/card.json").read_text())
    quantity = next(q for q in card["quantities"] if q["name"] == "acceptance length, chain of 8")
    figures = [quantity["arms"][arm][key] for key in ("value", "low", "high")]
    assert recomputed(str(STUDIES / "drift"), quantity["name"], arm) == pytest.approx(
        figures, rel=1e-6
    )


@pytest.mark.parametrize(
    ("study", "quantity", "arms"),
    [
        ("short_chains", "acceptance length, chain of 3", EAGLES),
        (
            "crossing",
            "acceptance length, chain of 6",
            ("design=DSpark steps=200", "design=DFlash steps=200"),
        ),
        ("calibration", "Draft's probability less acceptance, step 5-8", EAGLES),
        (
            "drift",
            "acceptance length, chain of 8",
            ("fc_norm=on norm_output=on", "fc_norm=off norm_output=off"),
        ),
        (
            "recurrence",
            "acceptance length, chain of 8",
            ("recurrence=unit_size", "recurrence=norm_output"),
        ),
        (
            "transplant",
            "acceptance length, chain of 8",
            ("fc_norm=on norm_output=on", "fc_norm=off norm_output=off"),
        ),
    ],
)
def test_the_command_on_the_page_prints_what_the_page_says(
    study: str, quantity: str, arms: tuple[str, str]
) -> None:
    three = recomputed(str(STUDIES / study), quantity, *arms)
    assert "{:.4f} [{:.4f}, {:.4f}]".format(*three) in section(study)


def test_figures_by_draft_step_are_those_of_the_card() -> None:
    assert [row[1:] for row in cells(PAGE, "| by draft step |")] == by_step()


@pytest.mark.parametrize("figure", ["+0.071 [+0.051", "| 0.19 |", "< 0.001 | 0.002 | 0.053"])
def test_another_figure_is_found(figure: str) -> None:
    assert figure in PAGE
    assert on_page(PAGE.replace(figure, figure.replace("0.0", "0.1").replace("19", "18"))) != [
        row for name in CARDS for row in declared(name)
    ]


def test_arms_of_one_unrolled_step_are_the_same_weights() -> None:
    runs = CARDS["drift_real"]["manifest"]["runs"]
    for fc in ("off", "on"):
        raw, normed = (runs[f"fc_norm={fc} norm_output={out} K=1"] for out in ("off", "on"))
        assert len(raw) == 3
        for seed in raw:
            assert raw[seed]["fit"]["weights_sha256"] == normed[seed]["fit"]["weights_sha256"]


def test_seeds_vary_initialization_alone() -> None:
    fits = [
        fit["fit"]["config"]
        for card in CARDS.values()
        for arm in card["manifest"]["runs"].values()
        for fit in arm.values()
    ]
    assert {fit["data"]["init_args"]["seed"] for fit in fits} == {0}
    assert {fit["seed_everything"] for fit in fits} == {0, 1, 2}


def test_figures_of_crossing_are_those_of_its_card() -> None:
    card = json.loads((STUDIES / "crossing/card.json").read_text())
    lengths = next(q for q in card["quantities"] if q["name"] == "acceptance length, chain of 6")
    rows = cells(section("crossing"), "| acceptance length, chain of 6 |")
    assert len(rows) == 4
    for design, *shown_lengths in rows:
        for steps, length in zip((40, 200), shown_lengths, strict=True):
            arm = lengths["arms"][f"design={design} steps={steps}"]
            assert length == f"{arm['value']:.2f} [{arm['low']:.2f}, {arm['high']:.2f}]"
    text = " ".join(section("crossing").split())
    curve = next(c for c in card["curves"] if c["title"] == "Acceptance by position, chain of 6")
    for design in ("DSpark", "DFlash"):
        points = [f"{point['value']:.2f}" for point in curve["arms"][f"design={design} steps=200"]]
        assert "{}, {}, {} and {}".format(*points[:4]) in text
    for number in (1, 3):
        ratio = card["primary"][number]["ratio"]
        assert "{value:.2f} [{low:.2f}, {high:.2f}]".format(**ratio) in text


def test_ratios_of_short_chains_are_those_of_its_card() -> None:
    card = json.loads((STUDIES / "short_chains/card.json").read_text())
    text = " ".join(section("short_chains").split())
    for row in card["primary"][:3]:
        value, low, high = (f"{row['ratio'][key]:.2f}" for key in ("value", "low", "high"))
        assert f"{value} [{low}, {high}]" in text
    quantities = {quantity["name"]: quantity["arms"] for quantity in card["quantities"]}
    lengths = [
        f"{quantities[f'acceptance length, chain of {k}']['design=EAGLE-3']['value']:.2f}"
        for k in (1, 2, 3)
    ]
    assert "{}, {} and {}".format(*lengths) in text
    positions = quantities["acceptance at position 2-3, chain of 3"]
    later = (f"{positions[f'design={name}']['value']:.2f}" for name in ("EAGLE-3.1", "EAGLE-3"))
    assert "{} against {}".format(*later) in text
    curve = next(c for c in card["curves"] if c["title"] == "Acceptance by position, chain of 3")
    first = (
        f"{curve['arms'][f'design={name}'][0]['value']:.2f}" for name in ("EAGLE-3.1", "EAGLE-3")
    )
    assert "accepts {} against {}".format(*first) in text
