"""Documents, intervals and the figures made of them, from numbers that can be checked by hand."""

import json
import math

import numpy as np
import pytest
import torch

from specdec.drafter import DrafterConfig
from specdec.drift import series
from specdec.drift.measure import Sums
from specdec.drift.results import Document, document, measured, sums_of
from specdec.drift.summary import difference, figures, summary
from specdec.evaluation.statistics import interval
from tests.drift.made import drafter

K, CHAINS = 3, 4
NAMES = ["a", "b", "c"]


def sums(rms: list[float], reached: list[int], config: DrafterConfig | None = None) -> Sums:
    """All zero but for the state's RMS and conditional acceptance, of which every chain that is reached but one is."""
    rows = series.rows(config or drafter().config)
    at = {name: row for row, (name, layer) in enumerate(rows) if layer is None}
    found = torch.zeros(len(rows), K, 2, dtype=torch.float64)
    found[..., 1] = CHAINS
    found[at["state_rms"], :, 0] = torch.tensor(rms, dtype=torch.float64) * CHAINS
    found[at["conditional_acceptance"], :, 1] = torch.tensor(reached, dtype=torch.float64)
    found[at["conditional_acceptance"], :, 0] = torch.tensor([max(0, n - 1) for n in reached], dtype=torch.float64)
    sources = torch.full((len(series.source_rows(config or drafter().config)), 2), float(CHAINS), dtype=torch.float64)
    return Sums(found, sources, torch.tensor([0.0, 0.5], dtype=torch.float64))


ALL = [sums([1, 2, 4], [4, 3, 2]), sums([2, 2, 2], [4, 1, 0]), sums([3, 5, 6], [4, 3, 2])]


def made(all_sums: list[Sums] = ALL, trained: int | None = 2) -> Document:
    return document(drafter().config, NAMES, all_sums, trained, K)


def test_every_prompts_values_are_kept() -> None:
    found = made()
    assert found["prompts"] == NAMES and found["chains"] == [CHAINS] * 3 and found["depths"] == K
    assert list(found["series"]) == list(series.SERIES)
    state = found["series"]["state_rms"]
    assert state["values"] == [[1, 2, 3], [2, 2, 5], [4, 2, 6]] and state["mean"] == pytest.approx([2, 3, 4])
    assert state["title"] and state["unit"] == "RMS"
    acceptance = found["series"]["conditional_acceptance"]
    assert acceptance["values"] == [[0.75] * 3, [2 / 3, 0, 2 / 3], [0.5, None, 0.5]]
    assert acceptance["weights"] == [[4, 4, 4], [3, 1, 3], [2, 0, 2]]
    assert acceptance["mean"] == pytest.approx([9 / 12, 4 / 7, 2 / 4])
    wanted = interval(np.array([[1.0, 1], [2, 1], [3, 1]]) * CHAINS)
    assert wanted is not None and (state["low"][0], state["high"][0]) == (wanted.low, wanted.high)
    fused = found["sources"]["fused_rms"]
    assert (fused["of"], fused["values"], fused["mean"], fused["low"]) == (["fused"], [[1, 1, 1]], [1], [1])
    assert [len(one["of"]) for one in found["sources"].values()] == [3, 3, 1]
    assert found["top_positions"] == [{"position": 0, "mass": 0.5}] * 3 and found["layers"] == []
    again = sums_of(json.loads(json.dumps(found, allow_nan=False)), "conditional_acceptance")
    assert again[..., 0].tolist() == [[3, 3, 3], [2, 0, 2], [1, 0, 1]]


def test_layers_are_told_apart() -> None:
    config = drafter("two_layer").config
    found = document(config, NAMES, [sums([1] * K, [4] * K, config)] * 3, None, K)
    assert [list(layer) for layer in found["layers"]] == [list(series.ATTENTION)] * 2


def test_prompts_without_chains_are_left_out() -> None:
    empty = Sums.empty(drafter(), K)
    found = made([ALL[0], empty, ALL[2]])
    assert found["prompts"] == ["a", "c"] and found["series"]["state_rms"]["mean"] == pytest.approx([2, 3.5, 5])
    with pytest.raises(ValueError, match="no answer of the target is long enough"):
        made([empty] * 3)


def test_the_summary() -> None:
    found = summary(made())
    assert found["state_rms_growth"]["mean"] == pytest.approx(12 / 6)
    assert found["state_rms_growth"]["low"] <= 2 <= found["state_rms_growth"]["high"]
    assert found["acceptance_trained"]["mean"] == pytest.approx((9 + 4) / (12 + 7))
    assert found["acceptance_beyond"]["mean"] == pytest.approx(2 / 4)
    assert found["acceptance_change"]["mean"] == pytest.approx(2 / 4 - 13 / 19)
    assert found["acceptance"]["mean"] == pytest.approx(15 / 23)
    assert [one.name for one in figures(K, None)][-1] == "acceptance"
    assert "acceptance_beyond" not in summary(made(trained=3))
    assert summary(made(trained=9))["acceptance_trained"]["mean"] == pytest.approx(15 / 23)


def test_what_is_not_defined_is_not_told() -> None:
    none = {"mean": None, "low": None, "high": None}
    assert measured(np.zeros((3, 2))) == none == measured(np.zeros((0, 2)))
    assert measured(np.array([[3.0, 4], [0, 0]])) == {"mean": 0.75, "low": None, "high": None}
    pair = np.array([[1.0, 2, 1, 2], [1, 2, 0, 0], [1, 2, 0, 0]])  # all of the second pair is one prompt's
    assert measured(pair, lambda x: x[..., 2] / x[..., 3]) == {"mean": 0.5, "low": None, "high": None}


def test_differences_are_paired() -> None:
    base, more = made(), made([sums([2, 3, 8], [4, 3, 2]), sums([4, 2, 4], [4, 1, 0]), sums([6, 5, 12], [4, 3, 2])])
    found = difference(more, base)
    assert found["state_rms_growth"]["mean"] == pytest.approx(0)
    assert max(map(abs, (found["state_rms_growth"]["low"], found["state_rms_growth"]["high"]))) < 1e-12
    assert found["acceptance_trained"]["mean"] == 0 and not math.isnan(found["sink_mass_change"]["mean"])
    assert "acceptance_trained" not in difference(made(trained=None), base)
    deeper = difference(made(trained=3), base)  # steps 1 to 3 less steps 1 to 2 would say nothing
    assert "acceptance_trained" not in deeper and deeper["acceptance"]["mean"] == 0
    with pytest.raises(ValueError, match="not measured on the same prompts"):
        difference(made([ALL[0], Sums.empty(drafter(), K), ALL[2]]), base)
