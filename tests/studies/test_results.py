"""Quantities of every arm, their differences from the baseline, and effects: of acceptance, drift and robustness."""

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from specdec.data.regions import CALL, TEXT
from specdec.diagnostics.drift_figures import sums_of
from specdec.diagnostics.drift_measure import SERIES
from specdec.diagnostics.robustness import kept_figures
from specdec.evaluation.metrics import read_answers, write_answers
from specdec.evaluation.summary import shape_summary
from specdec.report.contrasts import holm
from specdec.studies.card import write_card
from specdec.studies.outcomes import _drift_metric, _parts
from specdec.studies.results import read_record, results
from tests.studies.made import SHAPES, lose, make_study

LENGTH, GROWTH = f"acceptance length, {SHAPES[0]}", "RMS of the state fed back, step 6 over step 1"
# the long context was skipped
TYPOS, SYSTEM = "Acceptance kept, Typos", "Acceptance kept, System prompt"
CONDITIONS = ("Clean", "Typos", "System prompt")
UNDER_SYSTEM = "Acceptance length under System prompt"


def all_of(directory: Path) -> dict[str, Any]:
    return results(read_record(directory))


def arms_of(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next((one["arms"] for one in found["quantities"] if one["name"] == name), {})


def places(study: Path, arm: int, kind: str) -> list[Path]:
    runs = json.loads((study / "plan.json").read_text())["arms"][arm]["runs"]
    return [study / "measures" / run[kind] for run in runs]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the norm a third more is accepted under the system prompt."""
    directory = make_study(tmp_path_factory.mktemp("study"), prompts=20)
    for arm in (2, 3):
        for path in places(directory, arm, "robustness"):
            one = json.loads((path / "robustness.json").read_text())
            row = one["conditions"][2]
            row["committed"] = [1.33 * count for count in row["committed"]]
            (path / "robustness.json").write_text(json.dumps(one))
    return directory


@pytest.fixture(scope="module")
def found(study: Path) -> dict[str, Any]:
    return all_of(study)


def test_acceptance_is_that_of_the_answers(found: dict[str, Any], study: Path) -> None:
    texts = [(path / "answers.jsonl").read_text() for path in places(study, 0, "evaluate")]
    rows = [json.loads(line) for text in texts for line in text.splitlines()]
    accepted = [count for row in rows if row["shape"] == SHAPES[0] for count in row["accepted"]]
    one = arms_of(found, LENGTH)["norm=off K=1"]
    assert (
        one["value"] == pytest.approx(1 + sum(accepted) / len(accepted))
        and one["low"] < one["value"] < one["high"]
    )
    assert (one["seeds"], one["prompts"], list(one["by_seed"])) == (3, 20, ["0", "1", "2"])


def test_one_seed_s_figures_are_the_evaluation_s(tmp_path: Path) -> None:
    study = make_study(tmp_path, {"norm": ["off"]}, seeds=[0], curves=False)
    found, shape = all_of(study), SHAPES[1]
    known = shape_summary(
        "tree", {}, read_record(study).arms["norm=off"][0].evaluation.answers[shape]
    )
    length = arms_of(found, f"acceptance length, {shape}")["norm=off"]["value"]
    assert length == pytest.approx(known["acceptance_length"]["mean"])
    (curve,) = (each for each in found["curves"] if each["title"].endswith(shape))
    positions = [point["value"] for point in curve["arms"]["norm=off"]]
    assert positions == pytest.approx(known["accepted_per_position"]["conditional"])


def test_looping_answers_are_told(tmp_path: Path, found: dict[str, Any]) -> None:
    assert found["looping"] == []
    study = make_study(tmp_path, {"norm": ["off", "on"]}, curves=False)
    for path in places(study, 0, "evaluate"):
        rows = [
            json.loads(line) | {"loops": True}
            for line in (path / "answers.jsonl").read_text().splitlines()
        ]
        (path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = all_of(study)["looping"]
    assert [line.partition(": ")[0] for line in lines] == [f"norm=off, {shape}" for shape in SHAPES]
    assert "100% of the answers repeat themselves" in lines[0] and lines[0].endswith(
        "without them of no answer"
    )


def test_growth_is_of_sums_over_all_chains(found: dict[str, Any], study: Path) -> None:
    drifts = [json.loads((path / "drift.json").read_text()) for path in places(study, 1, "drift")]
    sums = np.stack([sums_of(one, "state_rms") for one in drifts])
    first, last = sums[:, 0].sum((0, 1)), sums[:, -1].sum((0, 1))
    one = arms_of(found, GROWTH)["norm=off K=4"]
    assert one["value"] == pytest.approx((last[0] / last[1]) / (first[0] / first[1]))
    assert one["p_value"] < 0.001  # where 1 would be none


def test_chains_that_came_so_far_count_where_another_seed_has_none(tmp_path: Path) -> None:
    """Leaving the prompt out would leave out the hard ones; the first has no chain so deep with any seed."""
    directory = make_study(tmp_path, {"norm": ["off", "on"]}, prompts=6)
    paths = [path / "drift.json" for path in places(directory, 0, "drift")]
    one = json.loads(paths[0].read_text())
    series = one["series"]["state_rms"]
    series["values"][5][2], series["weights"][5][2] = None, 0
    paths[0].write_text(json.dumps(one))
    curves = {curve["title"]: curve["arms"]["norm=off"] for curve in all_of(directory)["curves"]}
    deep = curves["Size of the state fed back"][5]
    value, weight = np.stack(
        [sums_of(json.loads(path.read_text()), "state_rms")[5] for path in paths]
    ).sum((0, 1))
    assert deep["prompts"] == 6 and deep["value"] == pytest.approx(value / weight)
    assert curves["Divergence from the target"][5]["prompts"] == 5


def test_what_is_kept_is_pooled_over_prompts(found: dict[str, Any], study: Path) -> None:
    names = [one["name"] for one in found["quantities"] if one["family"] == "robustness"]
    assert names == [TYPOS, SYSTEM, *(f"Acceptance length under {name}" for name in CONDITIONS)]
    runs = [
        json.loads((path / "robustness.json").read_text())["conditions"]
        for path in places(study, 1, "robustness")
    ]

    def length(row: int) -> float:
        return sum(sum(one[row]["committed"]) for one in runs) / sum(
            sum(one[row]["passes"]) for one in runs
        )

    assert arms_of(found, TYPOS)["norm=off K=4"]["value"] == pytest.approx(length(1) / length(0))


def test_the_length_under_a_condition_is_what_robustness_reports(tmp_path: Path) -> None:
    """Of the prompts with a target pass in the clean run too, with an interval; a share kept is the ratio of two."""
    study = make_study(tmp_path, {"norm": ["off", "on"]}, seeds=[0, 1, 2], prompts=12)
    for path in places(study, 0, "robustness"):
        document = json.loads((path / "robustness.json").read_text())
        clean, typos, *_ = document["conditions"]
        clean["passes"][0] = clean["committed"][0] = 0
        typos["passes"][1] = typos["committed"][1] = 0
        (path / "robustness.json").write_text(json.dumps(document))
    found = all_of(study)
    arms = {name: arms_of(found, f"Acceptance length under {name}") for name in CONDITIONS}
    first = places(study, 0, "robustness")[0] / "robustness.json"
    clean, typos, *_ = json.loads(first.read_text())["conditions"]
    names = [f"p{prompt}" for prompt in range(12)]
    counted = [
        dict(zip(names, zip(row["committed"], row["passes"], strict=True), strict=True))
        for row in (typos, clean)
    ]
    figures = kept_figures(*counted)
    row = arms["Typos"]["norm=off"]
    assert figures["measured_prompts"] == row["prompts"] == 10
    assert row["by_seed"]["0"] == pytest.approx(figures["acceptance_length"]["mean"])
    assert 1 <= row["low"] < row["value"] < row["high"]
    assert arms["Clean"]["norm=off"]["prompts"] == 11
    assert arms_of(found, "Acceptance length under Long context") == {}  # it was skipped
    full = {name: arms[name]["norm=on"]["value"] for name in CONDITIONS}
    kept = arms_of(found, TYPOS)["norm=on"]["value"]
    assert kept == pytest.approx(full["Typos"] / full["Clean"])


def test_the_ratio_of_two_lengths_under_a_condition_has_an_interval(
    found: dict[str, Any],
) -> None:
    arms = arms_of(found, UNDER_SYSTEM)
    rows = [row for row in found["comparisons"] if row["quantity"] == UNDER_SYSTEM]
    assert len(rows) == 3
    for row in rows:
        ratio = row["ratio"]
        lengths = [arms[row[side]]["value"] for side in ("arm", "baseline")]
        assert ratio["value"] == pytest.approx(lengths[0] / lengths[1])
        assert ratio["low"] < ratio["value"] < ratio["high"]
    better = next(row for row in rows if row["arm"] == "norm=on K=1")
    assert better["ratio"]["low"] > 1 and better["p_value"] < 0.01
    shares = [row for row in found["comparisons"] if row["quantity"] == SYSTEM]
    assert [row["ratio"] for row in shares] == [None] * 3


def test_a_length_under_a_condition_can_be_primary(tmp_path: Path) -> None:
    names = ("system prompt", "clean", "long context")
    primary = [
        declared(f"acceptance_length_under.{name}", {"norm": ["on"]}, K="4") for name in names
    ]
    study = make_study(tmp_path, primary=primary)
    found = all_of(study)
    system, clean, skipped = found["primary"]
    values = {arm: row["value"] for arm, row in arms_of(found, UNDER_SYSTEM).items()}
    new, old = values["norm=on K=4"], values["norm=on K=1"]
    assert system["quantity"] == UNDER_SYSTEM
    assert system["value"] == pytest.approx(new - old)
    assert system["ratio"]["value"] == pytest.approx(new / old)
    assert system["p_holm"] is not None and clean["p_holm"] is not None
    assert skipped["verdict"] == "not tested" and skipped["ratio"] is None
    ratio = system["ratio"]
    text = (write_card(study) / "card.md").read_text()
    words = f"| {ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}] |"
    assert words in next(line for line in text.splitlines() if line.startswith(f"| {UNDER_SYSTEM}"))


def test_a_length_in_a_region_can_be_primary(tmp_path: Path) -> None:
    """Every other pass of the first eight prompts begins in a call, and the other prompts have none."""
    name = f"acceptance_length_in_tool_call.{SHAPES[0]}"
    study = make_study(tmp_path, primary=[declared(name, {"norm": ["on"]}, K="4")], curves=False)
    committed: dict[str, list[int]] = {}
    for path in sorted(study.glob("measures/e*/answers.jsonl")):
        answers = [
            [
                answer._replace(regions=(CALL, TEXT) * 12 if int(answer.prompt_id[1:]) < 8 else ())
                for answer in of_shape
            ]
            for of_shape in read_answers(path, len(SHAPES))
        ]
        write_answers(path, SHAPES, answers)
        sums = [1 + n for answer in answers[0][:8] for n in answer.accepted[::2]]
        committed.setdefault(path.parent.name.partition("-")[0], []).extend(sums)
    found = all_of(study)
    (row,) = found["primary"]
    means = {arm: sum(tokens) / len(tokens) for arm, tokens in committed.items()}
    assert row["quantity"] == f"acceptance length in tool call, {SHAPES[0]}"
    assert row["value"] == pytest.approx(means["e3"] - means["e2"])
    assert row["prompts"] == 8 and row["p_holm"] is not None


def test_differences_are_paired_and_their_error_is_of_their_arms(found: dict[str, Any]) -> None:
    for row in found["comparisons"]:
        arms = arms_of(found, row["quantity"])
        assert row["value"] == pytest.approx(
            arms[row["arm"]]["value"] - arms[row["baseline"]]["value"]
        )
        if row["quantity"] in (LENGTH, TYPOS, SYSTEM):
            assert (row["pooled"], row["df"], row["unlike"]) == (0, 2, False)
        assert "p_holm" not in row and "verdict" not in row  # it is exploratory
    rows = {(row["quantity"], row["arm"]): row for row in found["comparisons"]}
    better, same = rows[SYSTEM, "norm=on K=1"], rows[SYSTEM, "norm=off K=4"]
    assert better["p_value"] < 0.01 and same["p_value"] > 0.05
    assert better["value"] == pytest.approx(
        0.33 * arms_of(found, SYSTEM)["norm=off K=1"]["value"], rel=0.15
    )


def test_an_effect_of_several_arms_pools_them_or_says_that_they_are_unlike(
    found: dict[str, Any],
) -> None:
    rows = [row for row in found["effects"] if row["quantity"] in (LENGTH, TYPOS, SYSTEM)]
    assert {(row["pooled"], row["unlike"]) for row in rows} <= {(4, False), (0, True)}
    assert any(row["pooled"] for row in rows)


def without_passes(study: Path, arm: int, seeds: Sequence[int], at: int) -> None:
    """As if no pass of these seeds had come to a position."""
    for seed in seeds:
        path = places(study, arm, "evaluate")[seed] / "answers.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row["accepted"] = [min(count, at - 2) for count in row["accepted"]]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_cell_without_data_is_empty_and_feeds_nothing(tmp_path: Path) -> None:
    """Of one seed or of all: no effect, no contrast and no mean over arms uses the arm."""
    primary = [declared("accepted_at_3.chain of 5", {}, K="4")]
    study = make_study(tmp_path, prompts=8, shapes=SHAPES[:1], primary=primary)
    without_passes(study, 2, [1], at=3)
    found = all_of(study)
    name, empty = f"acceptance at position 3, {SHAPES[0]}", "norm=on K=1"
    arms = arms_of(found, name)
    row = arms.pop(empty)
    by_seed = row.pop("by_seed")
    assert set(row.values()) == {None} and by_seed["1"] is None and by_seed["0"] is not None
    assert all(arm["value"] is not None for arm in arms.values())
    (only,) = found["primary"]
    assert only["value"] is None and only["verdict"] == "not tested"
    rows = [row for row in found["comparisons"] if row["quantity"] == name]
    assert {row["arm"] for row in rows} == {"norm=off K=4", "norm=on K=4"}
    rows = {row["effect"]: row for row in found["effects"] if row["quantity"] == name}
    assert not rows  # each effect averages over the empty cell
    (curve,) = [curve for curve in found["curves"] if curve["axis"] == "draft position"]
    assert curve["arms"][empty][1] is not None and curve["arms"][empty][2] is None
    text = (write_card(study) / "card.md").read_text()
    assert f"| {name} | on · 1 |  | " in text and "0.00 [0.00, 0.00]" not in text
    rows = [*csv.DictReader((study / "card" / "acceptance.csv").read_text().splitlines())]
    (cell,) = [
        row for row in rows if (row["panel"], row["series"], row["x"]) == (name, "all seeds", empty)
    ]
    assert cell["value"] == cell["low"] == cell["high"] == ""


def test_a_share_of_nothing_accepted_has_no_ratio_and_no_interval(tmp_path: Path) -> None:
    """The position is reached, and its draft never accepted: 0 without an interval that would be of no width."""
    primary = [declared("accepted_at_3.chain of 5", {}, norm="on")]
    study = make_study(tmp_path, {"norm": ["off", "on"]}, shapes=SHAPES[:1], primary=primary)
    without_passes(study, 0, [0, 1, 2], at=4)
    found = all_of(study)
    row = arms_of(found, f"acceptance at position 3, {SHAPES[0]}")["norm=off"]
    assert row["value"] == 0 and row["low"] is None and row["high"] is None
    (contrast,) = found["primary"]
    assert contrast["value"] > 0 and contrast["high"] <= 1


@pytest.mark.parametrize(
    ("outcome", "least", "most"),
    [
        ("drift.sink_mass+own_mass_at_3", 0, 1),
        ("drift.sink_mass+sink_own_mass_at_3", 0, 2),
        ("drift.sink_mass_change", -1, 1),
        ("drift.cosine_growth", -math.inf, math.inf),
    ],
)
def test_sums_of_shares_have_the_range_of_what_they_add(
    outcome: str, least: float, most: float
) -> None:
    figure = _drift_metric(outcome, _parts(outcome), cast(Any, Measured()))
    assert figure is not None and figure.bounds == (least, most)


class Measured:
    """A run that was measured for all series of drift."""

    def done(self, kind: str) -> bool:
        return True

    def measured(self, kind: str) -> dict[str, Any]:
        return {"series": dict.fromkeys(SERIES), "depths": 4}


def declared(
    outcome: str, at: dict[str, list[str]], expect: str | None = None, **levels: str
) -> dict[str, Any]:
    """A primary contrast of some levels against the baseline's."""
    base = {"norm": "off", "K": "1"}
    against = {axis: base[axis] for axis in levels}
    return {"outcome": outcome, "effect": levels, "against": against, "at": at, "expect": expect}


def test_primary_contrasts_are_those_declared_and_holm_s_are_over_them_alone(
    tmp_path: Path,
) -> None:
    primary = [
        declared("acceptance_length.chain of 5", {}, "higher", norm="on"),
        declared("accepted_at_2-3.chain of 5", {"K": ["4"]}, norm="on"),
        declared("drift.state_rms+kl_at_2-3", {}, norm="on", K="4"),
        declared("kept.system prompt", {"norm": ["on"]}, K="4"),
        declared("kept.of nobody", {}, K="4"),
    ]
    study = make_study(tmp_path, worth={"norm=on": 0.1}, prompts=10, primary=primary)
    found = all_of(study)
    length, second, drift, kept, nobody = rows = found["primary"]
    values = {arm: one["value"] for arm, one in arms_of(found, LENGTH).items()}
    main = (
        values["norm=on K=1"]
        - values["norm=off K=1"]
        + values["norm=on K=4"]
        - values["norm=off K=4"]
    ) / 2
    assert length["value"] == pytest.approx(main) and (length["verdict"], length["pooled"]) == (
        "higher",
        4,
    )
    answers = {name: [run.evaluation.answers[SHAPES[0]] for run in read_record(study).arms[name]]
               for name in ("norm=off K=4", "norm=on K=4")}  # fmt: skip

    def share(name: str) -> float:
        counts = [count for own in answers[name] for one in own for count in one.accepted]
        return sum((c >= 2) + (c >= 3) for c in counts) / sum((c >= 1) + (c >= 2) for c in counts)

    assert second["value"] == pytest.approx(share("norm=on K=4") - share("norm=off K=4"))
    sums = [np.stack([sums_of(json.loads((place / "drift.json").read_text()), name)[1:3].sum((0, 1))
                      for place in places(study, arm, "drift")]).sum(0)
            for arm in (0, 3) for name in ("state_rms", "kl")]  # fmt: skip
    (a, b), (c, d) = ([top / weight for top, weight in sums[at : at + 2]] for at in (0, 2))
    assert drift["value"] == pytest.approx(c + d - a - b)
    assert kept["prompts"] == 10 and nobody["value"] is None and nobody["verdict"] == "not tested"
    tested = rows[:4]
    assert [row["p_holm"] for row in tested] == holm([row["p_value"] for row in tested])
    told = {(row["quantity"], row["value"]) for row in (*found["comparisons"], *found["effects"])}
    assert not told & {(row["quantity"], row["value"]) for row in tested}  # not told again


def test_acceptance_is_compared_at_the_same_steps_alone(found: dict[str, Any]) -> None:
    """Beyond a trained depth of 1 lie other steps than beyond one of 4."""
    panel = "Conditional acceptance, beyond the trained depth less within"
    own = {one["name"]: one["arms"] for one in found["quantities"] if one["panel"] == panel}
    assert list(own) == [f"{panel} ({K} of 6 steps)" for K in (1, 4)]
    for K, (name, arms) in zip("14", own.items(), strict=True):
        assert set(arms) == {f"norm=off K={K}", f"norm=on K={K}"}
        assert all(one["p_value"] is None and one["value"] < 0 for one in arms.values())
        assert [row["effect"] for row in found["effects"] if row["quantity"] == name] == ["norm=on"]
    assert [row["arm"] for row in found["comparisons"] if row["quantity"] in own] == ["norm=on K=1"]


def test_a_prompt_that_a_condition_leaves_out_counts_nowhere(tmp_path: Path) -> None:
    directory = make_study(tmp_path, {"norm": ["off", "on"]}, prompts=8)
    (place, *_) = places(directory, 1, "robustness")
    one = json.loads((place / "robustness.json").read_text())
    one["conditions"][1]["committed"][3] = one["conditions"][1]["passes"][3] = None
    (place / "robustness.json").write_text(json.dumps(one))
    found = all_of(directory)
    assert {arm: one["prompts"] for arm, one in arms_of(found, TYPOS).items()} == {
        "norm=off": 8,
        "norm=on": 7,
    }
    (row,) = [row for row in found["comparisons"] if row["quantity"] == TYPOS]
    # of one axis the comparisons say the same
    assert row["prompts"] == 7 and found["effects"] == []


def test_effects_average_over_the_other_axis(found: dict[str, Any]) -> None:
    rows = {(row["quantity"], row["effect"]): row for row in found["effects"]}
    assert {effect for _, effect in rows} == {"norm=on", "K=4", "norm=on x K=4"}
    arms = {arm: one["value"] for arm, one in arms_of(found, TYPOS).items()}
    main = (
        arms["norm=on K=1"] - arms["norm=off K=1"] + arms["norm=on K=4"] - arms["norm=off K=4"]
    ) / 2
    assert (
        rows[TYPOS, "norm=on"]["value"] == pytest.approx(main)
        and rows[SYSTEM, "norm=on"]["p_value"] < 0.001
    )


def test_what_an_arm_lacks_leaves_the_others_compared(tmp_path: Path) -> None:
    study = make_study(tmp_path, prompts=8)
    runs = json.loads((study / "plan.json").read_text())["arms"][3]["runs"]
    for run, kind in [*((run, "robustness") for run in runs), (runs[0], "drift")]:
        lose(study, run, kind)
    found = all_of(study)
    assert set(arms_of(found, TYPOS)) == {"norm=off K=1", "norm=off K=4", "norm=on K=1"}
    rows = {(row["quantity"], row["arm"]): row for row in found["comparisons"]}
    assert (TYPOS, "norm=on K=4") not in rows
    assert rows[GROWTH, "norm=on K=4"]["seeds"] == 2 and rows[GROWTH, "norm=on K=1"]["seeds"] == 3
    effects = {(row["quantity"], row["effect"]) for row in found["effects"]}
    assert (TYPOS, "norm=on") in effects and (TYPOS, "norm=on x K=4") not in effects
