"""A part of a drafter: a frozen dataclass that builds a module; parts as plain data.

specdec's own part is saved by its class's name, so that files can move, a user's own by its import path. A part with
arguments is ``{'class_path': name, 'init_args': {...}}``, as in a config; one without is its name alone.
"""

import dataclasses
from typing import Any, TypeVar

from torch import nn

from specdec.utils.config import class_name
from specdec.utils.imports import FLAG, ensure

Kind = TypeVar("Kind")
Built = TypeVar("Built", bound=nn.Module)


class Part:
    """Base of fusion, entry, recurrence and attention: a frozen dataclass whose fields are its arguments."""

    def check(self, config: Any) -> None:
        """Raise ValueError for a DrafterConfig or a DrafterSpec that this part cannot serve."""

    def build(self, config: Any) -> nn.Module:
        """Return the module, for a DrafterConfig."""
        raise TypeError(f"{type(self).__name__} must build a module")


def part_to_json(part: Any) -> str | dict[str, Any]:
    """A frozen spec as JSON-able data, in the spelling that configs use.

    Raises:
        ValueError: its class is no dataclass, so that its arguments are not known.
    """
    cls = type(part)
    if not dataclasses.is_dataclass(cls):
        raise ValueError(
            f"{cls.__name__} cannot be stored: decorate it with @dataclass(frozen=True)"
        )
    arguments = dataclasses.asdict(part)
    return {"class_path": class_name(cls), "init_args": arguments} if arguments else class_name(cls)


def part_from_json(base: type[Kind], data: Any, where: str) -> Kind:
    """The spec that ``data`` describes.

    A module that is not loaded is imported only if the user allowed it; see :mod:`specdec.utils.imports`.

    Raises:
        ValueError: not a part, an unknown class, one that may not be imported, or arguments that it does not take.
    """
    if isinstance(data, str):
        data = {"class_path": data, "init_args": {}}
    if not isinstance(data, dict) or set(data) != {"class_path", "init_args"}:
        raise ValueError(
            f"{where}: expected a part's name, or class_path and init_args, found {data!r:.200}"
        )
    name = str(data["class_path"])
    arguments = data["init_args"]
    if _find(base, name) is None:
        ensure(name)
    if (cls := _find(base, name)) is None:
        raise ValueError(
            f"{where}: {name!r} is no {base.__name__} that is loaded here; if it is your own, import its module before "
            f"or name it with {FLAG}"
        )
    kinds = {field.name: field.type for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if not isinstance(arguments, dict) or set(arguments) != set(kinds):
        raise ValueError(f"{where}: {cls.__name__} takes {sorted(kinds)}, found {arguments!r:.200}")
    for argument, kind in kinds.items():
        if kind in (bool, int, float, str) and type(arguments[argument]) not in (
            kind,
            int if kind is float else kind,
        ):
            raise ValueError(
                f"{where}: {argument} is {arguments[argument]!r:.60}, wanted {kind.__name__}"
            )
    return cls(**arguments)


def _find(base: type[Kind], name: str) -> type[Kind] | None:
    if dataclasses.is_dataclass(base) and class_name(base) == name:
        return base
    return next((match for cls in base.__subclasses__() if (match := _find(cls, name))), None)


def build_part(axis: str, config: Any, kind: type[Built]) -> Built:
    """The module of one of a config's axes; ``ValueError`` if its part builds something else."""
    part = getattr(config, axis)
    module = part.build(config)
    if not isinstance(module, kind):
        name = class_name(type(part))
        built_class = type(module).__name__
        wanted = f"{kind.__module__}.{kind.__qualname__}"
        raise ValueError(
            f"{axis} {name}: its build returned a {built_class}, wanted an instance of {wanted}"
        )
    return module
