"""Conditions by their names, as on a command line."""

import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from specdec.decoding.parse import NUMBERS
from specdec.robustness.conditions import ALL, KINDS, Condition


def parse_conditions(texts: Sequence[str]) -> list[Condition]:
    """Conditions by name: ``no_bos``, ``noise_hidden:alpha=0.5``, ``context:tokens=4096``, ``system:text=long``.

    A name without the parameters that it needs stands for its usual ones; no name at all for those of all kinds. A
    condition that is named twice is measured once.

    Raises:
        ValueError: an unknown condition or parameter, or a value that it cannot have.
    """
    found = [one for text in texts for one in _parse(text)] if texts else [one for kind in ALL for one in kind.usual()]
    return list(dict.fromkeys(found))


def _parse(text: str) -> tuple[Condition, ...]:
    name, colon, parameters = text.partition(":")
    if name not in KINDS:
        raise ValueError(
            f"condition {text!r}: expected one of {', '.join(KINDS)}, with parameters as noise_hidden:alpha=0.5"
        )
    kind = KINDS[name]
    if not colon:
        return kind.usual()
    hints, known = get_type_hints(kind), [field.name for field in fields(kind)]
    arguments: dict[str, Any] = {}
    for item in parameters.split(","):
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in known or key in arguments or (read := _value(hints[key], value)) is None:
            forms = ", ".join(f"{one}={_form(hints[one])}" for one in known) or "none: it takes no parameter"
            raise ValueError(f"condition {text!r}: {item!r} is not one of {forms}, each at most once")
        arguments[key] = read
    return (kind(**arguments),)


def _value(hint: Any, value: str) -> Any:
    if hint is bool:
        return {"true": True, "false": False}.get(value)
    if choices := get_args(hint):
        return value if value in choices else None
    number = NUMBERS[str(hint)]
    return number.read(value) if re.fullmatch(number.spelling, value, re.ASCII) else None


def _form(hint: Any) -> str:
    if hint is bool:
        return "true|false"
    return "|".join(get_args(hint)) or "NUMBER"
