"""Parts of a drafter as plain data: ``{"class_path": ..., "init_args": {...}}`` and back."""

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

Part = TypeVar("Part")


def describe(part: Any) -> dict[str, Any]:
    """A frozen spec as JSON-able data, in the spelling that configs use."""
    cls = type(part)
    return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": dataclasses.asdict(part)}


def _known(base: type[Part]) -> Iterator[type[Part]]:
    if dataclasses.is_dataclass(base):
        yield base
    for cls in base.__subclasses__():
        yield from _known(cls)


def revive(base: type[Part], data: Any, where: str) -> Part:
    """The spec that ``data`` describes. Nothing is imported: only classes already loaded are considered.

    Raises:
        ValueError: not a part, an unknown class, or arguments that it does not take.
    """
    if not isinstance(data, dict) or set(data) != {"class_path", "init_args"}:
        raise ValueError(f"{where}: expected class_path and init_args, found {data!r}")
    for cls in _known(base):
        if f"{cls.__module__}.{cls.__qualname__}" == data["class_path"]:
            fields = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
            given = data["init_args"]
            if not isinstance(given, dict) or set(given) != fields:
                raise ValueError(f"{where}: {cls.__name__} takes {sorted(fields)}, found {given!r}")
            return cls(**given)
    raise ValueError(
        f"{where}: {data['class_path']!r} is no {base.__name__} that is loaded here; if it is your own, import its "
        "module before loading the drafter"
    )
