"""Numbers with a range: the types of options and arguments, and the check that all of them share.

A parameter is annotated, ``depth: Depth = 5``, and whoever takes it calls :func:`check_numbers` once; a command's are
checked before it is called. To a type checker, a config file and the parser they are plain ``int`` and ``float``.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Range:
    """Finite numbers from ``least`` to ``most``; ``above`` leaves ``least`` itself out."""

    least: float
    most: float = math.inf
    above: bool = False

    def __repr__(self) -> str:
        return f"{'>' if self.above else '>='} {self.least}" + (
            f", <= {self.most}" if self.most < 2**20 else ""
        )  # others are no one's concern

    def wanted(self, value: float) -> str | None:
        """The bound that a number is beyond, in words; None if it is within both."""
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
    arms = (hint,) if get_origin(hint) is Annotated else (hint, *get_args(hint))
    ranges = [
        (arm.__origin__, annotation)
        for arm in arms
        if get_origin(arm) is Annotated
        for annotation in arm.__metadata__
    ]
    ranges = [(kind, annotation) for kind, annotation in ranges if isinstance(annotation, Range)]
    if not ranges or get_origin(hint) in (list, dict):
        inner = [get_args(arm)[-1] for arm in arms if get_origin(arm) in (list, dict)]
        children: Iterable[Any] = ()
        if isinstance(value, dict):
            children = value.values()
        elif isinstance(value, list | tuple):
            children = value
        faults = (_fault(child_hint, child) for child in children for child_hint in inner)
        return next(filter(None, faults), None)
    words = [word for arm in arms if get_origin(arm) is Literal for word in get_args(arm)]
    if value in words or isinstance(value, tuple(arm for arm in arms if isinstance(arm, type))):
        return None
    whole = all(kind is int for kind, _ in ranges)
    if not isinstance(value, int if whole else int | float) or isinstance(value, bool):
        wanted = ["a whole number" if whole else "a number"]
    elif None in (wanted := [bounds.wanted(value) for _, bounds in ranges]):
        return None
    return f"must be {' or '.join(dict.fromkeys(map(str, (*words, *wanted))))}, not {value!r:.60}"
