"""Two-level fractions: orthogonal, with the resolution of the tables, and with aliases that are true."""

import itertools
import math

import pytest

from specdec.sweep.fractions import ROMAN, Fraction, halvings

NAMES = tuple("abcdefghijk")
POSSIBLE = [(k, p) for k in range(3, 9) for p in range(1, k) if 2 ** (k - p) - (k - p) - 1 >= p]
# https://www.itl.nist.gov/div898/handbook/pri/section3/pri3347.htm
TABLE = {
    (3, 1): "III", (4, 1): "IV", (5, 1): "V", (5, 2): "III", (6, 1): "VI", (6, 2): "IV", (6, 3): "III", (7, 1): "VII",
    (7, 2): "IV", (7, 3): "IV", (7, 4): "III", (8, 2): "V", (8, 3): "IV", (8, 4): "IV", (9, 2): "VI", (9, 3): "IV",
    (9, 4): "IV", (9, 5): "III", (10, 3): "V", (10, 4): "IV", (10, 5): "IV", (10, 6): "III",
}  # fmt: skip


def columns(fraction: Fraction) -> list[tuple[int, ...]]:
    return list(zip(*fraction.signs(), strict=True))


@pytest.mark.parametrize(("k", "p"), POSSIBLE)
def test_orthogonal_up_to_the_resolution(k: int, p: int) -> None:
    fraction = Fraction.of(NAMES[:k], p)
    arms = list(fraction.signs())
    assert len(arms) == len(set(arms)) == 2 ** (k - p) and arms[0] == (1,) * k
    signs = columns(fraction)
    for size in range(1, min(fraction.resolution, 5)):
        for chosen in itertools.combinations(signs, size):
            assert sum(math.prod(row) for row in zip(*chosen, strict=True)) == 0
    shortest = min(
        size
        for size in range(1, k + 1)
        for chosen in itertools.combinations(signs, size)
        if abs(sum(math.prod(row) for row in zip(*chosen, strict=True))) == len(arms)
    )
    assert shortest == fraction.resolution


@pytest.mark.parametrize(("size", "resolution"), TABLE.items())
def test_no_better_resolution_exists(size: tuple[int, int], resolution: str) -> None:
    assert ROMAN[Fraction.of(NAMES[: size[0]], size[1]).resolution] == resolution


def test_generators_and_aliases_hold_in_every_arm() -> None:
    fraction = Fraction.of(("norm", "K", "loss", "fusion", "layers"), 2)
    assert fraction.described() == ["fusion = norm x K x loss", "layers = norm x K"]
    named = dict(zip(fraction.axes, columns(fraction), strict=True))

    def column(effect: str) -> tuple[int, ...]:
        return tuple(math.prod(row) for row in zip(*(named[axis] for axis in effect.split(" x ")), strict=True))

    aliases = fraction.aliases()
    for effect, same in aliases.items():
        assert all(column(other) == column(effect) for other in same)
    assert aliases["norm"] == ["K x layers", "K x loss x fusion"]
    told = {effect for effect in aliases if " x " in effect} | {e for same in aliases.values() for e in same}
    for pair in itertools.combinations(fraction.axes, 2):
        others = [o for o in itertools.combinations(fraction.axes, 2) if o != pair]
        confounded = any(column(" x ".join(o)) == column(" x ".join(pair)) for o in others)
        assert not confounded or " x ".join(pair) in told


@pytest.mark.parametrize(("text", "p"), [("1/2", 1), ("1/4", 2), ("1/2^3", 3), ("1/2**2", 2), ("1/ 8", 3)])
def test_how_a_fraction_is_written(text: str, p: int) -> None:
    assert halvings(text) == p


@pytest.mark.parametrize("text", ["1/3", "2", "1/1", "1/0", "2/4", "1/x", "1/2^", "half"])
def test_what_is_no_fraction(text: str) -> None:
    assert halvings(text) is None


def test_what_is_not_possible_says_what_is() -> None:
    with pytest.raises(ValueError, match=r"1/4 of 4 axes .*: 1/2 \(8 arms\)$"):
        Fraction.of(NAMES[:4], 2)
    with pytest.raises(ValueError, match="none: take a grid"):
        Fraction.of(NAMES[:2], 1)
    with pytest.raises(ValueError, match="12 axes; at most 11"):
        Fraction.of([*NAMES, "l"], 1)
