"""Numbers with a range: the types of options and arguments, and the check that all of them share.

A parameter is annotated, ``depth: Depth = 5``, and whoever takes it calls :func:`check_numbers` once; a command's are
checked before it is called. To a type checker, a config file and the parser they are plain ``int`` and ``float``.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Range:
    """Numbers from ``least`` to ``most``; ``above`` leaves ``least`` itself out. Infinities and NaN never belong."""

    least: float
    most: float = math.inf
    above: bool = False

    def __repr__(self) -> str:
        first = f"above {self.least:g}" if self.above else f"at least {self.least:g}"
        return first if self.most == math.inf else f"{first} and at most {self.most:,}"

    def holds(self, value: float) -> bool:
        """Whether a number belongs."""
        return self.least <= value <= self.most and not (self.above and value == self.least) and value != math.inf


Count = Annotated[int, Range(1, 2**31 - 1)]
Whole = Annotated[int, Range(0, 2**31 - 1)]
Seed = Annotated[int, Range(0, 2**32 - 1)]  # numpy's are no longer
Depth = Annotated[int, Range(1, 64)]  # draft steps, in training or decoding
Width = Annotated[int, Range(1, 2**20)]  # of a layer
Layers = Annotated[int, Range(1, 256)]
Side = Annotated[int, Range(1, 4096)]  # what is computed side by side: rows, nodes
Tokens = Annotated[int, Range(1, 2**24)]  # of one text
Port = Annotated[int, Range(0, 65535)]
Positive = Annotated[float, Range(0, above=True)]
NonNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
PositiveShare = Annotated[float, Range(0, 1, above=True)]


def check_numbers(annotated: Callable[..., Any], values: Mapping[str, Any], where: str = "") -> None:
    """Raise ValueError for the first of the values that is not in the range of its annotation.

    Args:
        annotated: the class, or the function, whose annotations say the ranges.
        values: by name; those that are not annotated are not looked at.
        where: what stands before a name in the message, as ``--`` or ``Chain.``.
    """
    for name, hint in _hints(annotated).items():
        for value, ranges in _numbers(hint, values.get(name)):
            whole = all(kind is int for kind, _ in ranges)
            right = isinstance(value, int) or (isinstance(value, float) and not whole)
            if not right or isinstance(value, bool) or not any(one.holds(value) for _, one in ranges):
                wanted = " or ".join(dict.fromkeys(repr(one) for _, one in ranges))
                raise ValueError(f"{where}{name} must be {'a whole number, ' * whole}{wanted}, not {value!r}")


@functools.cache
def _hints(annotated: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of the parameters."""
    hints = get_type_hints(annotated, include_extras=True)
    return {name: hint for name, hint in hints.items() if name != "return"}


def _ranges(hint: Any) -> Iterator[tuple[type, Range]]:
    """The kinds of number that a value itself may be, not those that it may hold."""
    if get_origin(hint) is Annotated:
        yield from ((get_args(hint)[0], one) for one in hint.__metadata__ if isinstance(one, Range))
    elif get_origin(hint) not in (list, dict):
        for arm in get_args(hint):
            yield from _ranges(arm)


def _numbers(hint: Any, value: Any) -> Iterator[tuple[Any, list[tuple[type, Range]]]]:
    """What must be in a range, and the ranges: the value or, of a list or the values of a dict, each of them."""
    if isinstance(value, list | tuple | dict):
        inner = [arm for arm in (hint, *get_args(hint)) if get_origin(arm) in (list, dict)]
        for one in inner[:1]:
            for child in value.values() if isinstance(value, dict) else value:
                yield from _numbers(get_args(one)[-1], child)
    elif value is not None and (ranges := list(_ranges(hint))):
        if get_origin(hint) is Annotated or not isinstance(value, str):  # of a union another arm may take text
            yield value, ranges
