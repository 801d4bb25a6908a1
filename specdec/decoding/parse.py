"""A draft shape from words: chain:depth=3."""

import sys
from dataclasses import fields
from typing import Any, get_type_hints

from specdec.decoding.adaptive_chain import AdaptiveChain
from specdec.decoding.shapes import Chain, DraftShape, DynamicTree
from specdec.decoding.static_tree import StaticTree
from specdec.utils.imports import ensure
from specdec.utils.shape_text import PARAMETERS, Kinds, shape_values, unknown_shape


def parse_shape(text: str) -> DraftShape:
    """A shape as on a command line: ``chain:depth=3``, ``adaptive:depth=8,min_product=0.4``,
    ``tree:depth=6,top_k=10,nodes=59``, ``static``; a name alone is the shape with its defaults; or a class of the
    user's own by its import path, ``my_parts.Mine:depth=3``.

    Raises:
        ValueError: an unknown shape or parameter, or a value that is not a number.
    """
    kinds: dict[str, type[DraftShape]] = {
        "chain": Chain, "adaptive": AdaptiveChain, "tree": DynamicTree, "static": StaticTree,
    }  # fmt: skip
    kind = text.partition(":")[0]
    if (shape := kinds.get(kind) or _own(kind)) is None:
        raise ValueError(unknown_shape(text))
    numbers = PARAMETERS[kind] if kind in PARAMETERS else _numbers(shape)
    values: dict[str, Any] = shape_values(text, numbers)
    return shape(**values)


def _numbers(shape: type[DraftShape]) -> Kinds:
    """Which numbers a class's parameters are."""
    hints = get_type_hints(shape)
    return {
        parameter.name: float if hints[parameter.name] is float else int
        for parameter in fields(shape)
    }


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
