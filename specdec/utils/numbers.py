"""Numbers with a range: the types of options and arguments, and the check that all of them share.

A parameter is annotated, ``depth: Depth = 5``, and whoever takes it calls :func:`check_numbers` once; a command's are
checked before it is called. To a type checker, a config file and the parser they are plain ``int`` and ``float``.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Range:
    """Finite numbers from ``least`` to ``most``; ``above`` leaves ``least`` itself out."""

    least: float
    most: float = math.inf
    above: bool = False

    def __repr__(self) -> str:
        most = f", <= {self.most}" if self.most < 2**20 else ""  # others are no one's concern
        return f"{'>' if self.above else '>='} {self.least}{most}"

    def wanted(self, value: Any, kind: type[float]) -> str | None:
        """What should stand in place of a value, in words; None if it is a number of this kind and range."""
        if isinstance(value, bool) or not isinstance(value, int | kind):
            return "a whole number" if kind is int else "a number"
        if value > self.most or value == math.inf:
            return f"at most {self.most:,}" if self.most < math.inf else "finite"
        if value > self.least or (value == self.least and not self.above):
            return None
        return f"above {self.least:g}" if self.above else f"at least {self.least:g}"


Count = Annotated[int, Range(1, 2**31 - 1)]
Whole = Annotated[int, Range(0, 2**31 - 1)]
FromMinusOne = Annotated[int, Range(-1, 2**31 - 1)]  # -1 for no limit
Seed = Annotated[int, Range(0, 2**32 - 1)]  # numpy's are no longer
Depth = Annotated[int, Range(1, 64)]  # draft steps, in training or decoding
Heads = Annotated[int, Range(1, 2**14)]
Width = Annotated[int, Range(1, 2**20)]  # of a state
Intermediate = Annotated[int, Range(1, 2**22)]  # of a feed-forward layer
Vocabulary = Annotated[int, Range(1, 2**22)]
Positions = Annotated[int, Range(1, 2**40)]  # some configs say "no end" by a number of that kind
MOST_LAYERS = 2**10
Layers = Annotated[int, Range(1, MOST_LAYERS)]
Side = Annotated[int, Range(1, 4096)]  # what is computed side by side: rows, nodes
MOST_TOKENS = 2**24
Tokens = Annotated[int, Range(1, MOST_TOKENS)]  # of one text
RowTokens = Annotated[int, Range(2, MOST_TOKENS)]  # of a packed row: one is predicted from another
Port = Annotated[int, Range(0, 65535)]
Positive = Annotated[float, Range(0, above=True)]
NonNegative = Annotated[float, Range(0)]
Rate = Annotated[float, Range(0, 1e30)]  # float32 holds it
Share = Annotated[float, Range(0, 1)]
PositiveShare = Annotated[float, Range(0, 1, above=True)]


def check_numbers(
    annotated: Callable[..., Any], values: Mapping[str, Any], where: str = ""
) -> None:
    """Raise ValueError for the first of the values that is not in the range of its annotation.

    Args:
        annotated: the class, or the function, whose annotations say the ranges.
        values: by name; those that are not annotated are not looked at.
        where: what stands before a name in the message, as ``--`` or ``Chain.``.
    """
    for name, hint in _hints(annotated).items():
        if name in values and (fault := _fault(hint, values[name])):
            raise ValueError(f"{where}{name} {fault}")


@functools.cache
def _hints(annotated: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(annotated, include_extras=True)


def _fault(hint: Any, value: Any) -> str | None:
    """What is wrong with a value, or one that it holds, by its annotation; None if nothing is."""
    words: list[str] = []
    wanted: list[str] = []
    for arm in get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint]:
        kind = get_origin(arm)
        if kind in (list, dict) and isinstance(value, list | tuple | dict):
            children = value.values() if isinstance(value, dict) else value
            faults = (_fault(get_args(arm)[-1], child) for child in children)
            return next(filter(None, faults), None)
        if kind is Literal:
            words += get_args(arm)
        elif kind is Annotated and isinstance(bounds := arm.__metadata__[0], Range):
            if (what := bounds.wanted(value, arm.__origin__)) is None:
                return None
            wanted.append(what)
        elif arm is Any or (isinstance(arm, type) and isinstance(value, arm)):
            return None
    if not wanted or value in words:
        return None
    return f"must be {' or '.join(dict.fromkeys([*words, *wanted]))}, not {value!r:.60}"
