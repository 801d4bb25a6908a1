"""Draft shapes in words, chain:depth=3: their grammar, which needs no import of torch."""

import re
from collections.abc import Mapping

Kinds = Mapping[str, type[int | float]]
"""Which numbers the parameters of a shape are, by name."""

PARAMETERS: dict[str, Kinds] = {
    "chain": {"depth": int},
    "adaptive": {"depth": int, "min_product": float, "min_probability": float},
    "tree": {"depth": int, "top_k": int, "nodes": int},
    "static": {},
}
"""specdec's shapes, and the parameters of each."""


def shape_values(text: str, kinds: Kinds) -> dict[str, float]:
    """Return the parameters that a shape's text gives.

    Args:
        kinds: of the parameters that the shape has.

    Raises:
        ValueError: a parameter is unknown, is given twice, or is not a number.
    """
    kind, colon, parameters = text.partition(":")
    if colon and not kinds:
        raise ValueError(
            f"shape {text!r}: static is EAGLE-1's tree and takes no parameters: write static"
        )
    values: dict[str, float] = {}
    for item in parameters.split(",") if colon else []:
        name, _, value = (part.strip() for part in item.partition("="))
        if name not in kinds or name in values or not _is_number(value, kinds[name]):
            expected = ", ".join(f"{parameter}=NUMBER" for parameter in kinds)
            first = next(iter(kinds))
            remedy = f": write {kind}:{first}={item}" if _is_number(item, kinds[first]) else ""
            raise ValueError(
                f"shape {text!r}: {item!r} is not one of {expected}, each at most once{remedy}"
            )
        values[name] = kinds[name](value)
    return values


def _is_number(text: str, kind: type[int | float]) -> bool:
    pattern = r"\d+" if kind is int else r"\d+(\.\d+)?|\.\d+"
    return re.fullmatch(pattern, text, re.ASCII) is not None


def check_shape_text(text: str) -> None:
    """Raise ValueError if a text is no shape of specdec's; one with a dot before its parameters may be the user's."""
    kind = text.partition(":")[0]
    if kind in PARAMETERS:
        shape_values(text, PARAMETERS[kind])
    elif "." not in kind:
        raise ValueError(unknown_shape(text))


def unknown_shape(text: str) -> str:
    """Return what is wrong with a shape that there is not."""
    return (
        f"shape {text!r}: expected one of {', '.join(PARAMETERS)}, with parameters as chain:depth=3, or your own "
        "DraftShape, as my_parts.Mine:depth=3, with --allow_imports my_parts"
    )
