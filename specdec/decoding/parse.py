"""A draft shape from words: chain:depth=3."""

import re
import sys
from dataclasses import fields

from specdec.decoding.shapes import Chain, DraftShape, DynamicTree
from specdec.decoding.static_tree import StaticTree
from specdec.utils.imports import FLAG, ensure


def parse_shape(text: str) -> DraftShape:
    """A shape as on a command line: ``chain:depth=3``, ``tree:depth=6,top_k=10,nodes=59``, ``static``; a name alone is
    the shape with its defaults; or a class of the user's own by its import path, ``my_parts.Mine:depth=3``.

    Raises:
        ValueError: an unknown shape or parameter, or a value that is not a number.
    """
    kinds: dict[str, type[DraftShape]] = {"chain": Chain, "tree": DynamicTree, "static": StaticTree}
    kind, colon, parameters = text.partition(":")
    if (shape := kinds.get(kind) or _own(kind)) is None:
        raise ValueError(
            f"shape {text!r}: expected one of {', '.join(kinds)}, with parameters as chain:depth=3, or your own "
            f"DraftShape, as my_parts.Mine:depth=3, with {FLAG} my_parts"
        )
    if kind == "static" and colon:
        raise ValueError(f"shape {text!r}: static is EAGLE-1's tree and takes no parameters")
    names = [parameter.name for parameter in fields(shape)]
    values: dict[str, int] = {}
    for item in parameters.split(",") if colon else []:
        name, _, value = (part.strip() for part in item.partition("="))
        if name not in names or name in values or not re.fullmatch(r"\d+", value, re.ASCII):
            expected = ", ".join(f"{parameter}=NUMBER" for parameter in names)
            raise ValueError(
                f"shape {text!r}: {item!r} is not one of {expected}, each at most once"
            )
        values[name] = int(value)
    return shape(**values)


def _own(class_path: str) -> type[DraftShape] | None:
    """A user's own class, of a module that the user vouched for; None if it is none."""
    ensure(class_path)
    module, _, name = class_path.rpartition(".")
    shape_class = getattr(sys.modules.get(module), name, None)
    return (
        shape_class
        if isinstance(shape_class, type) and issubclass(shape_class, DraftShape)
        else None
    )
