"""Drift and robustness of an arm, as single figures that are compared."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.card.multiple import distinct, holm
from specdec.card.outcomes import outcomes
from specdec.card.results import results
from specdec.card.study import read
from specdec.card.words import outcome_statements
from specdec.drift.results import sums_of
from tests.card.made import make_study

KEPT = ["kept_typos", "kept_system prompt"]  # the long context was skipped


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
    return outcomes(read(study))


def places(study: Path, arm: int, kind: str) -> list[Path]:
    runs = json.loads((study / "plan.json").read_text())["arms"][arm]["runs"]
    return [study / "measures" / run[kind] for run in runs]


def lose(study: Path, place: Path) -> None:
    """As if the measure had never begun."""
    shutil.rmtree(place)
    (study / "jobs" / place.name / "state.json").unlink()


def test_the_state_s_growth_is_of_sums_over_all_chains(found: dict[str, Any], study: Path) -> None:
    drifts = [json.loads((path / "drift.json").read_text()) for path in places(study, 1, "drift")]
    sums = np.stack([sums_of(one, "state_rms") for one in drifts])
    first, last = sums[:, 0].sum((0, 1)), sums[:, -1].sum((0, 1))
    one = found["arms"]["state_rms_growth_1_to_6"]["norm=off K=4"]
    assert one["value"] == pytest.approx((last[0] / last[1]) / (first[0] / first[1]))
    assert one["low"] < one["value"] < one["high"] and one["p_value"] < 0.001  # growth, where 1 would be none
    assert (one["seeds"], one["prompts"]) == (3, 20)
    change = found["arms"]["sink_mass_change_1_to_6"]["norm=off K=4"]
    assert change["value"] == pytest.approx(0.02 * 5) and found["titles"]["sink_mass_change_1_to_6"]["null"] == 0


def test_what_is_kept_is_what_the_robustness_table_says(found: dict[str, Any], study: Path) -> None:
    assert [name for name in found["titles"] if name.startswith("kept")] == KEPT
    table = results(read(study), 0.1)["robustness"]["arms"]
    for name in KEPT:
        for arm, one in found["arms"][name].items():
            there = table[arm][name.removeprefix("kept_")]["kept"]
            keys = ("value", "low", "high", "p_value")
            assert [one[key] for key in keys] == pytest.approx([there[key] for key in keys])


def test_differences_are_paired_and_corrected_together(found: dict[str, Any]) -> None:
    for row in found["comparisons"]:
        arms = found["arms"][row["outcome"]]
        assert row["value"] == pytest.approx(arms[row["arm"]]["value"] - arms[row["baseline"]]["value"])
        assert row["p_holm"] == pytest.approx(min(1, row["p_holm"])) and row["p_holm"] >= row["p_value"]
    rows = {(row["outcome"], row["arm"]): row for row in found["comparisons"]}
    assert len(rows) == 4 * 3 + 1
    better, same = rows["kept_system prompt", "norm=on K=1"], rows["kept_system prompt", "norm=off K=4"]
    assert better["verdict"] == "higher" and same["verdict"] == "not told apart"
    assert better["low"] < 0.26 < better["high"]  # a third of what is kept without
    for kind in ("drift", "robustness"):
        family = [row for row in found["comparisons"] if found["titles"][row["outcome"]]["kind"] == kind]
        corrected = holm([each[0]["p_value"] for each in distinct(family)])
        assert [each[0]["p_holm"] for each in distinct(family)] == corrected


def test_acceptance_is_compared_at_the_same_steps_alone(found: dict[str, Any]) -> None:
    """Beyond a trained depth of 1 lie other steps than beyond one of 4."""
    names = [name for name in found["titles"] if name.startswith("acceptance_change")]
    assert names == ["acceptance_change_1_to_6", "acceptance_change_4_to_6"]
    assert {found["titles"][name]["panel"] for name in names} == {
        "Conditional acceptance, beyond the trained depth less within"
    }
    for name in names:
        own, K = found["arms"][name], name.split("_")[2]
        assert set(own) == {f"norm=off K={K}", f"norm=on K={K}"}
        assert all(one["p_value"] is None and one["value"] < 0 for one in own.values())
        assert [row["effect"] for row in found["effects"] if row["outcome"] == name] == ["norm=on"]
    assert [row["arm"] for row in found["comparisons"] if row["outcome"] in names] == ["norm=on K=1"]


def test_a_prompt_that_a_condition_leaves_out_counts_nowhere(tmp_path: Path) -> None:
    directory = make_study(tmp_path, {"norm": ["off", "on"]}, prompts=8)
    (place, *_) = places(directory, 1, "robustness")
    one = json.loads((place / "robustness.json").read_text())
    for condition in one["conditions"]:
        condition["committed"][3] *= 2  # an easy prompt
    one["conditions"][1]["committed"][3] = one["conditions"][1]["passes"][3] = None
    (place / "robustness.json").write_text(json.dumps(one))
    card = results(read(directory), 0.1)
    kept, table = card["outcomes"]["arms"]["kept_typos"]["norm=on"], card["robustness"]["arms"]["norm=on"]["typos"]
    assert kept == table["kept"] and kept["prompts"] == 7
    assert card["outcomes"]["arms"]["kept_typos"]["norm=off"]["prompts"] == 8
    (row,) = [row for row in card["outcomes"]["comparisons"] if row["outcome"] == "kept_typos"]
    assert row["prompts"] == 7


def test_effects_average_over_the_other_axis(found: dict[str, Any]) -> None:
    rows = {(row["outcome"], row["effect"]): row for row in found["effects"]}
    assert {effect for _, effect in rows} == {"norm=on", "K=4", "norm=on x K=4"}
    arms = {arm: one["value"] for arm, one in found["arms"]["kept_typos"].items()}
    main = (arms["norm=on K=1"] - arms["norm=off K=1"] + arms["norm=on K=4"] - arms["norm=off K=4"]) / 2
    assert rows["kept_typos", "norm=on"]["value"] == pytest.approx(main)
    assert rows["kept_system prompt", "norm=on"]["verdict"] == "higher"


def test_one_axis_has_comparisons_and_no_effects(tmp_path: Path) -> None:
    study = make_study(tmp_path, {"norm": ["off", "on"]})
    found = results(read(study), 0.1)
    assert found["outcomes"]["effects"] == found["effects"] == [] and len(found["outcomes"]["comparisons"]) == 5
    assert outcome_statements(found)[-1].endswith("differences of 5 tested are not told apart from none.")


def test_what_an_arm_lacks_leaves_the_others_compared(tmp_path: Path) -> None:
    study = make_study(tmp_path, prompts=8)
    for place in (*places(study, 3, "robustness"), places(study, 3, "drift")[0]):
        lose(study, place)
    found = outcomes(read(study))
    assert set(found["arms"]["kept_typos"]) == {"norm=off K=1", "norm=off K=4", "norm=on K=1"}
    rows = {(row["outcome"], row["arm"]): row for row in found["comparisons"]}
    assert ("kept_typos", "norm=on K=4") not in rows
    assert rows["state_rms_growth_1_to_6", "norm=on K=4"]["seeds"] == 2
    assert rows["state_rms_growth_1_to_6", "norm=on K=1"]["seeds"] == 3
    effects = {(row["outcome"], row["effect"]) for row in found["effects"]}
    assert ("kept_typos", "norm=on") in effects and ("kept_typos", "norm=on x K=4") not in effects


def test_without_measures_there_is_nothing(tmp_path: Path) -> None:
    assert outcomes(read(make_study(tmp_path, curves=False))) == {}


def test_every_find_has_its_sentence_and_the_rest_are_counted(study: Path) -> None:
    card = results(read(study), 0.1)
    effects = card["outcomes"]["effects"]
    row = next(row for row in effects if row["kind"] == "interaction" and row["verdict"] == "not told apart")
    row["verdict"] = "lower"  # a find of the other kind
    finds = [row for row in effects if row["verdict"] != "not told apart"]
    said = outcome_statements(card)
    assert sum("norm=on x K=4, interaction: " in line for line in said) == 1
    assert len(said) == len(finds) + 1 and finds
    assert any("norm=on against norm=off: Acceptance kept, System prompt is higher, by +0." in line for line in said)
    told = f"{len(effects) - len(finds)} other differences of {len(effects)} tested are not told apart from none."
    assert said[-1] == f"Drift and robustness: {told}"
