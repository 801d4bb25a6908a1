"""Values of configs as plain data: compared, and written in words."""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any


def is_part(value: Any) -> bool:
    """Whether it stands for an object of a class."""
    return isinstance(value, Mapping) and "class_path" in value


def canonical(value: Any) -> Any:
    """The same without tuples, every class by the name under which it was defined, one of specdec's by its own name."""
    if isinstance(value, Mapping):
        plain = {str(key): canonical(child) for key, child in value.items()}
        if is_part(value):
            cls = _loaded(value["class_path"])
            plain["class_path"] = class_name(cls) if cls else value["class_path"]
            plain["init_args"] = plain.get("init_args") or {}
        return plain
    return [canonical(child) for child in value] if isinstance(value, list | tuple) else value


def class_name(cls: type) -> str:
    """The name under which a class is saved: its own in specdec, so that files can move; else its import path."""
    ours = cls.__module__.partition(".")[0] == "specdec"
    return cls.__name__ if ours else f"{cls.__module__}.{cls.__qualname__}"


def _loaded(class_path: str) -> type | None:
    module, _, name = class_path.rpartition(".")
    places = [module] if module else [place for place in list(sys.modules) if place.startswith("specdec.")]
    for place in places:
        found = getattr(sys.modules.get(place), name, None)
        if inspect.isclass(found) and (module or found.__module__ == place):
            return found
    return None


def pairs(one: Any, two: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """What differs, as deep down as both have the same keys or are parts of the same class."""
    if one == two:
        return
    if is_part(one) and is_part(two) and one["class_path"] == two["class_path"]:
        yield from pairs(one["init_args"], two["init_args"], key)
    elif isinstance(one, dict) and isinstance(two, dict) and not (is_part(one) or is_part(two)):
        for name in one | two:
            yield from pairs(one.get(name), two.get(name), f"{key}.{name}" if key else name)
    else:
        yield key, one, two


def keys(value: Any, key: str = "") -> Iterator[str]:
    """All names that :func:`pairs` may give to a difference, and those above them."""
    below = value["init_args"] if is_part(value) else value
    for name, child in below.items() if isinstance(below, dict) else ():
        inner = f"{key}.{name}" if key else name
        yield inner
        yield from keys(child, inner)


def words(value: Any) -> str:
    """In a few words; of a part, only the arguments that are not its class's own defaults."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value):
        return value[:12]
    if isinstance(value, list):
        return f"[{', '.join(map(words, value))}]"
    if is_part(value):
        cls = _loaded(value["class_path"])
        parameters = inspect.signature(cls).parameters if cls else {}
        defaults = {name: canonical(parameter.default) for name, parameter in parameters.items()}
        chosen = [(name, child) for name, child in value["init_args"].items() if defaults.get(name, ...) != child]
        given = [f"{name}={words(child)}" for name, child in chosen]
        return value["class_path"].rpartition(".")[2] + (f"({', '.join(given)})" if given else "")
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} {words(child)}' for name, child in value.items())}}}"
    return str(value)
