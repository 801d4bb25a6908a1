"""Parts of a drafter as plain data: ``{"class_path": ..., "init_args": {...}}`` and back."""

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn

from specdec.imports import FLAG, ensure

Part = TypeVar("Part")
Built = TypeVar("Built", bound=nn.Module)


def class_path(part: Any) -> str:
    """A part's class as configs name it."""
    return f"{type(part).__module__}.{type(part).__qualname__}"


def built(axis: str, config: Any, kind: type[Built]) -> Built:
    """The module of one of a config's axes.

    Raises:
        ValueError: it builds something else.
    """
    part = getattr(config, axis)
    module = part.build(config)
    if not isinstance(module, kind):
        made = "None" if module is None else f"a {type(module).__name__}"
        wanted = f"{kind.__module__}.{kind.__qualname__}"
        raise ValueError(f"{axis} {class_path(part)}: its build returned {made}, wanted an instance of {wanted}")
    return module


def describe(part: Any) -> dict[str, Any]:
    """A frozen spec as JSON-able data, in the spelling that configs use.

    Raises:
        ValueError: its class is no dataclass, so that its arguments are not known.
    """
    cls = type(part)
    if not dataclasses.is_dataclass(cls):
        raise ValueError(f"{cls.__name__} cannot be stored: decorate it with @dataclass(frozen=True)")
    return {"class_path": class_path(part), "init_args": dataclasses.asdict(part)}


def _known(base: type[Part]) -> Iterator[type[Part]]:
    if dataclasses.is_dataclass(base):
        yield base
    for cls in base.__subclasses__():
        yield from _known(cls)


def revive(base: type[Part], data: Any, where: str) -> Part:
    """The spec that ``data`` describes. Of modules that are not loaded only allowed ones are; see ``specdec.imports``.

    Raises:
        ValueError: not a part, an unknown class, one that may not be imported, or arguments that it does not take.
    """
    if not isinstance(data, dict) or set(data) != {"class_path", "init_args"}:
        raise ValueError(f"{where}: expected class_path and init_args, found {data!r}")
    path, given = data["class_path"], data["init_args"]
    cls = _find(base, path)
    if cls is None:
        ensure(str(path))
        cls = _find(base, path)
    if cls is None:
        raise ValueError(
            f"{where}: {path!r} is no {base.__name__} that is loaded here; if it is your own, import its module before "
            f"or name it with {FLAG}"
        )
    fields = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if not isinstance(given, dict) or set(given) != fields:
        raise ValueError(f"{where}: {cls.__name__} takes {sorted(fields)}, found {given!r}")
    return cls(**given)


def _find(base: type[Part], path: Any) -> type[Part] | None:
    return next((cls for cls in _known(base) if f"{cls.__module__}.{cls.__qualname__}" == path), None)
