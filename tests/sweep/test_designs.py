"""Which combinations a design has, and which it refuses."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.sweep.axes import Axis, read_axes
from specdec.sweep.designs import Combination, arm_name, design

LEVELS = st.lists(st.integers(2, 4), min_size=1, max_size=4)


def axes_of(sizes: list[int]) -> tuple[Axis, ...]:
    named = {f"x{n}": {f"l{i}": {f"model.k{n}": i} for i in range(size)} for n, size in enumerate(sizes)}
    return read_axes(named, Path())


def first(axes: tuple[Axis, ...]) -> Combination:
    return {axis.name: axis.names[0] for axis in axes}


@given(LEVELS)
def test_a_grid_has_every_combination_once(sizes: list[int]) -> None:
    axes = axes_of(sizes)
    found = {arm_name(each) for each in design("grid", axes, first(axes), []).combinations}
    wanted = {
        " ".join(f"{axis.name}={level}" for axis, level in zip(axes, levels, strict=True))
        for levels in itertools.product(*(axis.names for axis in axes))
    }
    assert found == wanted


@given(LEVELS, st.data())
def test_one_factor_changes_one_level_of_the_baseline(sizes: list[int], data: st.DataObject) -> None:
    axes = axes_of(sizes)
    baseline = {axis.name: data.draw(st.sampled_from(axis.names)) for axis in axes}
    found = design("one_factor", axes, baseline, []).combinations
    assert found[0] == baseline and len({arm_name(each) for each in found}) == len(found)
    assert len(found) == 1 + sum(size - 1 for size in sizes)
    assert all(sum(each[axis] != level for axis, level in baseline.items()) == 1 for each in found[1:])


@given(st.integers(3, 6), st.data())
def test_a_fraction_is_balanced_and_has_the_baseline(count: int, data: st.DataObject) -> None:
    axes = axes_of([2] * count)
    baseline = {axis.name: data.draw(st.sampled_from(axis.names)) for axis in axes}
    made = design({"fractional": "1/2"}, axes, baseline, [])
    assert made.combinations[0] == baseline and len(made.combinations) == 2 ** (count - 1)
    assert len(made.generators) == 1 and made.fraction == "1/2"
    for axis, other in itertools.combinations(axes, 2):
        pairs = [(each[axis.name], each[other.name]) for each in made.combinations]
        assert {pairs.count(pair) for pair in pairs} == {2 ** (count - 3)}


def test_what_is_left_out_is_gone_and_nothing_else() -> None:
    axes = axes_of([2, 3])
    found = design("grid", axes, first(axes), [{"x0": "l1", "x1": "l2"}, {"x1": "l1"}]).combinations
    assert [arm_name(each) for each in found] == ["x0=l0 x1=l0", "x0=l0 x1=l2", "x0=l1 x1=l0"]


@pytest.mark.parametrize(
    ("kind", "sizes", "left_out", "message"),
    [
        ("gird", [2], [], "no such design: gird; did you mean grid?"),
        ({"fraction": "1/2"}, [2, 2, 2], [], "no such key: fraction; did you mean fractional?"),
        ({}, [2], [], r"no such design: \{\}"),
        ({"fractional": "1/3"}, [2, 2, 2], [], "must be 1/2, 1/4"),
        ({"fractional": "1/2"}, [2, 3, 2], [], r"axis x1 has 3 levels \(l0, l1, l2\)"),
        ({"fractional": "1/4"}, [2, 2, 2], [], r"there are of 3 axes: 1/2 \(4 arms\)"),
        ({"fractional": "1/2"}, [2, 2, 2], [{"x0": "l1", "x1": "l1"}], "no arms to spare"),
        ("grid", [2, 2], [{"x0": "l0"}, {"x0": "l1"}], "nothing is left of 4 arms"),
        ("grid", [2, 2], [{"x0": "l0", "x1": "l0"}], "the baseline, arm x0=l0 x1=l0, is left out"),
        ("one_factor", [2, 2], [{"x0": "l1", "x1": "l1"}], "x0=l1 x1=l1 is in no arm"),
    ],
)
def test_refused(kind: Any, sizes: list[int], left_out: list[Combination], message: str) -> None:
    axes = axes_of(sizes)
    with pytest.raises(ValueError, match=message):
        design(kind, axes, first(axes), left_out)
