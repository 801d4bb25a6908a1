"""Regular two-level fractions: which products of axes give the others their levels, and what cannot be told apart.

An axis is a bit. A word is a set of axes whose product is the same in every arm; with the generators' words all their
products are constant too. The shortest is the fraction's resolution. Of all generators those are taken whose words of
length 3 are fewest, then those of length 4, and so on: minimum aberration (Fries and Hunter, Technometrics 22, 1980).
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

ROMAN = {3: "III", 4: "IV", 5: "V", 6: "VI", 7: "VII", 8: "VIII", 9: "IX", 10: "X", 11: "XI", 12: "XII"}
MOST = 11  # axes; the search takes minutes for more


@dataclass(frozen=True)
class Fraction:
    """``2 ** -halvings`` of all combinations of two-level axes, main effects apart from one another.

    Args:
        axes: their names; the last ones are generated.
        generators: of each generated axis the axes whose product it is, as bits of the first ones.
    """

    axes: tuple[str, ...]
    generators: tuple[int, ...]

    @classmethod
    def of(cls, axes: Sequence[str], halvings: int) -> "Fraction":
        """The fraction of least aberration.

        Raises:
            ValueError: main effects would coincide; the message says which fractions there are.
        """
        free = len(axes) - halvings
        if len(axes) > MOST:
            raise ValueError(f"fractional: {len(axes)} axes; at most {MOST} are searched: fix some, or take a grid")
        if halvings < 1 or _candidates(free) < halvings:
            can = [p for p in range(1, len(axes)) if _candidates(len(axes) - p) >= p]
            told = ", ".join(f"1/{2**p} ({2 ** (len(axes) - p)} arms)" for p in can) or "none: take a grid"
            raise ValueError(
                f"fractional: 1/{2**halvings} of {len(axes)} axes would not tell their effects apart; "
                f"there are of {len(axes)} axes: {told}"
            )
        return cls(tuple(axes), _least_aberration(free, halvings))

    @property
    def free(self) -> int:
        """Axes that are not generated."""
        return len(self.axes) - len(self.generators)

    @cached_property
    def words(self) -> frozenset[int]:
        """All sets of axes whose product is constant, as bits."""
        group = {0}
        for number, generator in enumerate(self.generators):
            word = generator | 1 << (self.free + number)
            group |= {word ^ other for other in group}
        return frozenset(group - {0})

    @property
    def resolution(self) -> int:
        """Length of the shortest word: an effect of one axis is aliased with none of fewer than this less one."""
        return min(word.bit_count() for word in self.words)

    def signs(self) -> Iterator[tuple[int, ...]]:
        """The arms: +1 or -1 for every axis; all +1 is the first."""
        for base in itertools.product((1, -1), repeat=self.free):
            yield (*base, *(_product(base, generator) for generator in self.generators))

    def described(self) -> list[str]:
        """The generators, as ``d = a x b x c``; levels count as +1 (the baseline's) and -1."""
        return [
            f"{self.axes[self.free + number]} = {self.name(generator)}"
            for number, generator in enumerate(self.generators)
        ]

    def aliases(self) -> dict[str, list[str]]:
        """What cannot be told from the effect of one axis, up to products of three; and which of two coincide."""
        found: dict[str, list[str]] = {}
        told: set[int] = set()
        for order, others in ((1, (1, 2, 3)), (2, (2,))):
            for chosen in itertools.combinations(range(len(self.axes)), order):
                effect = sum(1 << axis for axis in chosen)
                same = sorted((effect ^ word for word in self.words), key=lambda bits: (bits.bit_count(), bits))
                same = [bits for bits in same if bits.bit_count() in others]
                if same and effect not in told:
                    found[self.name(effect)] = [self.name(bits) for bits in same]
                    told.update(same if order == 2 else ())
        return found

    def name(self, bits: int) -> str:
        """A set of axes as the product that it stands for."""
        return " x ".join(axis for number, axis in enumerate(self.axes) if bits >> number & 1)


def halvings(text: str) -> int | None:
    """The p of ``1/2^p``, also written out as ``1/8``; None where it is neither."""
    one, slash, below = text.replace(" ", "").replace("**", "^").partition("/")
    base, power, exponent = below.partition("^")
    if one != "1" or not slash or not base.isdecimal() or (power and not exponent.isdecimal()):
        return None
    number = int(base) ** int(exponent) if power else int(base)
    return number.bit_length() - 1 if number > 1 and number.bit_count() == 1 else None


def _candidates(free: int) -> int:
    """Products of two and more free axes."""
    return 2**free - free - 1 if free > 0 else 0


def _product(signs: Sequence[int], bits: int) -> int:
    result = 1
    for number, sign in enumerate(signs):
        if bits >> number & 1:
            result *= sign
    return result


def _least_aberration(free: int, count: int) -> tuple[int, ...]:
    """Depth first; a choice is left as soon as its words are worse than the best found, since further ones only add."""
    candidates = sorted((bits for bits in range(2**free) if bits.bit_count() > 1), key=lambda b: (-b.bit_count(), b))
    best: tuple[list[int], tuple[int, ...]] | None = None

    def visit(start: int, chosen: tuple[int, ...], group: list[int], lengths: list[int]) -> None:
        nonlocal best
        if best is not None and lengths >= best[0]:
            return
        if len(chosen) == count:
            best = lengths, chosen
            return
        for index in range(start, len(candidates) - (count - len(chosen)) + 1):
            word = candidates[index] | 1 << (free + len(chosen))
            more = [word ^ other for other in group]
            now = list(lengths)
            for bits in more:
                now[bits.bit_count()] += 1
            visit(index + 1, (*chosen, candidates[index]), group + more, now)

    visit(0, (), [0], [0] * (free + count + 1))
    assert best is not None
    return best[1]
