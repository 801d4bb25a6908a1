"""A part of a drafter: a frozen spec that builds a module; and parts as plain data.

specdec's own part is saved by its class's name, so that files can move, a user's own by its import path. A part with
arguments is ``{"class_path": name, "init_args": {...}}``, as in a config; one without is its name alone.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from specdec.utils.config_diff import class_name
from specdec.utils.imports import FLAG, ensure

if TYPE_CHECKING:
    from specdec.drafter.config import DrafterConfig

Kind = TypeVar("Kind")


class Part:
    """Base of fusion, entry and recurrence: a frozen dataclass whose fields are its arguments."""

    def check(self, config: Any) -> None:
        """Raise ValueError for a DrafterConfig or a DrafterSpec that this part cannot serve."""

    def build(self, config: "DrafterConfig") -> nn.Module:
        """The module."""
        raise TypeError(f"{type(self).__name__} must build a module")


def describe(part: Any) -> str | dict[str, Any]:
    """A frozen spec as JSON-able data, in the spelling that configs use.

    Raises:
        ValueError: its class is no dataclass, so that its arguments are not known.
    """
    cls = type(part)
    if not dataclasses.is_dataclass(cls):
        raise ValueError(f"{cls.__name__} cannot be stored: decorate it with @dataclass(frozen=True)")
    arguments = dataclasses.asdict(part)
    return {"class_path": class_name(cls), "init_args": arguments} if arguments else class_name(cls)


def revive(base: type[Kind], data: Any, where: str) -> Kind:
    """The spec that ``data`` describes.

    A module that is not loaded is imported only if the user allowed it; see :mod:`specdec.utils.imports`.

    Raises:
        ValueError: not a part, an unknown class, one that may not be imported, or arguments that it does not take.
    """
    if isinstance(data, str):
        data = {"class_path": data, "init_args": {}}
    if not isinstance(data, dict) or set(data) != {"class_path", "init_args"}:
        raise ValueError(f"{where}: expected a part's name, or class_path and init_args, found {data!r}")
    name, given = str(data["class_path"]), data["init_args"]
    cls = _find(base, name)
    if cls is None:
        ensure(name)
        cls = _find(base, name)
    if cls is None:
        raise ValueError(
            f"{where}: {name!r} is no {base.__name__} that is loaded here; if it is your own, import its module before "
            f"or name it with {FLAG}"
        )
    fields = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if not isinstance(given, dict) or set(given) != fields:
        raise ValueError(f"{where}: {cls.__name__} takes {sorted(fields)}, found {given!r}")
    return cls(**given)


def _find(base: type[Kind], name: str) -> type[Kind] | None:
    if dataclasses.is_dataclass(base) and class_name(base) == name:
        return base
    return next((found for cls in base.__subclasses__() if (found := _find(cls, name))), None)
