"""The truth that everything rests on: what is trained is what is decoded."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from specdec.drafter import DrafterSpec
from tests.parity.unrolled import STEPS, unrolled_logits, worst_gap
from tests.tiny import all_specs, deeper, presets, tiny_drafter, variants

LENGTH = 8
SPECS = list(all_specs())
WINDOW, LONG = 16, 40
NAMED = presets() | variants() | deeper()
# two documents longer than the window, and one that it never cuts
PACKED = [0] * 19 + [1] * 3 + [2] * 18


def choices(spec: DrafterSpec) -> list[Any]:
    """What a design chooses on every axis, the norms' sites apart."""
    axes = (spec.fusion, spec.entry, spec.recurrence, spec.num_layers, spec.attention_window)
    return [*axes, *dataclasses.astuple(spec.norms)]


def pairwise(specs: list[DrafterSpec]) -> Iterator[DrafterSpec]:
    """Few of the designs, greedily, in which every two choices meet that meet in any."""
    met = [set(itertools.combinations(enumerate(choices(spec)), 2)) for spec in specs]
    missing = set().union(*met)
    while missing:
        best = max(range(len(specs)), key=lambda i: len(met[i] & missing))
        missing -= met[best]
        yield specs[best]


COVERING = list(pairwise(SPECS))


def test_the_covering_designs_are_few() -> None:
    assert len(SPECS) == 464 and len(COVERING) < 40
    met = [{*itertools.combinations(enumerate(choices(spec)), 2)} for spec in SPECS]
    covered = [{*itertools.combinations(enumerate(choices(spec)), 2)} for spec in COVERING]
    assert set().union(*met) == set().union(*covered)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, marks=() if spec in COVERING else pytest.mark.slow, id=str(spec))
        for spec in SPECS
    ],
)
def test_unrolled_logits_equal_cached_drafting(spec: DrafterSpec) -> None:
    assert worst_gap(spec, [0] * LENGTH) < 1e-12


@pytest.mark.parametrize("name", sorted(set(NAMED) - {"dflash"}))
def test_the_same_in_packed_documents(name: str) -> None:
    assert worst_gap(NAMED[name], [0, 0, 0, 0, 1, 1, 1, 1]) < 1e-12


@pytest.mark.parametrize(
    "spec", list(pairwise([spec for spec in SPECS if spec.attention_window == WINDOW])), ids=str
)
def test_the_same_where_the_window_cuts(spec: DrafterSpec) -> None:
    assert worst_gap(spec, PACKED) < 1e-12


@pytest.mark.parametrize("documents", [[0] * LONG, PACKED], ids=["one", "packed"])
def test_the_window_cuts_at_its_width(documents: list[int]) -> None:
    """Else equality would say nothing: step k at anchor t reaches k + t positions back in its document."""
    spec = variants()["sliding_window"]
    full = tiny_drafter(dataclasses.replace(spec, attention_window="full"))
    narrow = tiny_drafter(spec)
    narrow.load_state_dict(full.state_dict())
    pairs = zip(
        unrolled_logits(full, documents, STEPS),
        unrolled_logits(narrow, documents, STEPS),
        strict=True,
    )
    for k, (wide_TD, narrow_TD) in enumerate(pairs):
        differs = ((wide_TD - narrow_TD).abs().amax(-1) > 1e-9).tolist()
        assert differs == [
            t - documents.index(documents[t]) + k >= WINDOW for t in range(len(documents))
        ]


@pytest.mark.parametrize("documents", [[0] * LONG, PACKED], ids=["one", "packed"])
@pytest.mark.parametrize("layers", [1, 2])
def test_the_same_with_sinks(layers: int, documents: list[int]) -> None:
    """And they are seen: without them the logits differ behind the window and nowhere else."""
    spec = dataclasses.replace(variants()["sliding_window"], attention_sinks=2, num_layers=layers)
    assert worst_gap(spec, documents) < 1e-12
    with_sinks, without = (
        tiny_drafter(spec),
        tiny_drafter(dataclasses.replace(spec, attention_sinks=0)),
    )
    without.load_state_dict(with_sinks.state_dict())
    pairs = zip(
        *(unrolled_logits(one, documents, STEPS) for one in (with_sinks, without)), strict=True
    )
    for k, (seen_TD, hidden_TD) in enumerate(pairs):
        differs = ((seen_TD - hidden_TD).abs().amax(-1) > 1e-9).tolist()
        assert differs == [
            t - documents.index(documents[t]) + k >= WINDOW for t in range(len(documents))
        ]


def test_the_smallest_window_holds_as_many_steps() -> None:
    """At step 15 a node's own first key is at the window's edge."""
    assert worst_gap(variants()["sliding_window"], [0] * LONG, steps=WINDOW) < 1e-12
