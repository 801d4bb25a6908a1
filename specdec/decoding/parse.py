"""Growths by their names, as on a command line."""

import re
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

from specdec.decoding.confident_chain import ConfidentChain
from specdec.decoding.growth import Chain, DynamicTree, Growth
from specdec.decoding.static_tree import StaticTree, read_static_tree


class Number(NamedTuple):
    """How a parameter of one type is written and read."""

    spelling: str
    read: Callable[[str], int | float]


NUMBERS = {str(int): Number(r"\d+", int), str(float): Number(r"\d*\.?\d+", float)}


def parse_growth(text: str) -> Growth:
    """A growth, or one with parameters: ``chain:depth=3``, ``confident:threshold=0.3``,
    ``tree:depth=6,top_k=10,nodes=59``, ``static:file=PATH``.

    Raises:
        ValueError: an unknown growth or parameter, a value that is not a number, or a file that holds no tree.
    """
    kinds: dict[str, Callable[[str, list[str]], Growth]] = {
        "chain": partial(_numbers, Chain),
        "confident": partial(_numbers, ConfidentChain),
        "tree": partial(_numbers, DynamicTree),
        "static": _static,
    }
    kind, colon, parameters = text.partition(":")
    if kind not in kinds:
        raise ValueError(f"growth {text!r}: expected one of {', '.join(kinds)}, with parameters as chain:depth=3")
    return kinds[kind](text, parameters.split(",") if colon else [])


def _numbers(cls: type[Growth], text: str, items: list[str]) -> Growth:
    known = {field.name: field for field in fields(cls)}
    arguments: dict[str, Any] = {}
    for item in items:
        name, value = (part.strip() for part in (*item.split("=", 1), "")[:2])
        number = NUMBERS.get(str(known[name].type)) if name in known and name not in arguments else None
        if number is None or not re.fullmatch(number.spelling, value, re.ASCII):
            all_of = ", ".join(f"{known_name}=NUMBER" for known_name in known)
            raise ValueError(f"growth {text!r}: {item!r} is not one of {all_of}, each at most once")
        arguments[name] = number.read(value)
    return cls(**arguments)


def _static(text: str, items: list[str]) -> Growth:
    if not items:
        return StaticTree()
    name, _, file = ",".join(items).partition("=")  # a path may hold commas
    if name.strip() != "file" or not file.strip():
        raise ValueError(f"growth {text!r}: a static tree has one parameter, file=PATH")
    return read_static_tree(file.strip())
