"""Main effects and interactions, and what a design does not support."""

import itertools

import numpy as np
import pytest

from specdec.card.effects import Effect, effects, measured
from specdec.card.linear import Linear

AXES = {"a": ["0", "1"], "b": ["0", "1"], "c": ["0", "1"]}
BASE = {"a": "0", "b": "0", "c": "0"}


def grid(axes: dict[str, list[str]]) -> list[dict[str, str]]:
    return [dict(zip(axes, levels, strict=True)) for levels in itertools.product(*axes.values())]


def worth(effect: Effect, of: dict[str, float]) -> float:
    """The effect where an arm is worth the sum of the named levels, ``a*b`` being that of both."""

    def value(arm: tuple[tuple[str, str], ...]) -> float:
        up = {axis for axis, level in arm if level == "1"}
        return sum(each for names, each in of.items() if set(names.split("*")) <= up)

    figures = {arm: Linear(value(arm), np.zeros((3, 4))) for arm in effect.weights}
    found: float = measured(effect, figures)["value"]
    return found


def test_a_grid_gives_every_effect_by_itself() -> None:
    found = {effect.name: effect for effect in effects(AXES, BASE, grid(AXES))}
    assert set(found) == {"a=1", "b=1", "c=1", "a=1 x b=1", "a=1 x c=1", "b=1 x c=1"}
    of = {"a": 0.5, "b": 0.25, "a*b": 0.125}
    told = {name: worth(effect, of) for name, effect in found.items()}
    assert told == pytest.approx(
        {"a=1": 0.5625, "b=1": 0.3125, "c=1": 0, "a=1 x b=1": 0.125, "a=1 x c=1": 0, "b=1 x c=1": 0}
    )
    assert not any(effect.aliases for effect in found.values())


def test_three_levels_and_the_baselines_own_as_the_first() -> None:
    axes = {"k": ["1", "4", "7"], "n": ["off", "on"]}
    found = effects(axes, {"k": "4", "n": "off"}, grid(axes))
    assert [effect.name for effect in found] == [
        "k=1", "k=7", "n=on", "k=1 x n=on", "k=7 x n=on",
    ]  # fmt: skip


def test_one_factor_at_a_time_has_no_interaction() -> None:
    arms = [BASE, BASE | {"a": "1"}, BASE | {"b": "1"}]
    assert [effect.name for effect in effects(AXES, BASE, arms)] == ["a=1", "b=1"]


def test_a_missing_arm_takes_with_it_only_what_needs_it() -> None:
    arms = [arm for arm in grid(AXES) if arm != {"a": "1", "b": "1", "c": "1"}]
    found = {effect.name: effect for effect in effects(AXES, BASE, arms)}
    assert len(found["a=1 x b=1"].weights) == 4  # at c=0 alone
    assert len(found["a=1"].weights) == 6


def test_half_a_grid_without_one_of_its_arms_has_no_effects() -> None:
    """Without it each is mixed with the others in part, for which there is no name."""
    arms = [arm for arm in grid(AXES) if sum(map(int, arm.values())) % 2]
    assert effects(AXES, BASE, arms[:3]) == []


def test_half_a_grid_names_what_it_cannot_tell_apart() -> None:
    arms = [arm for arm in grid(AXES) if sum(map(int, arm.values())) % 2]  # c = a * b
    found = {effect.name: effect for effect in effects(AXES, BASE, arms)}
    assert found["a=1"].aliases == ["b x c"]
    assert found["b=1 x c=1"].aliases == ["a"]
    assert worth(found["a=1"], {"a": 0.5}) == pytest.approx(0.5)
    assert worth(found["a=1"], {"b*c": 0.5}) == pytest.approx(0.25)  # half of the interaction passes for it
    other = [arm for arm in grid(AXES) if not sum(map(int, arm.values())) % 2]
    assert {effect.name: effect.aliases for effect in effects(AXES, BASE, other)}["a=1"] == ["minus b x c"]
